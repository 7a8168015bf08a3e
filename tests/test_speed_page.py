"""The table of rates in docs/speed.md is one that a run of the benchmark reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import speed_table

PAGE = Path(__file__).parents[1] / "docs" / "speed.md"


def test_a_run_that_measured_nothing_leaves_the_page_as_it_was(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_bytes(PAGE.read_bytes())
    speed_table.write(page, speed_table.merge(speed_table.read(page), {}))
    assert page.read_bytes() == PAGE.read_bytes()


def test_a_run_replaces_the_cells_that_it_has_measured(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text("before\n<!-- speed: begin -->\n<!-- speed: end -->\nafter\n", encoding="utf-8")
    key = ("resnet50-pool", "AVX2", "fp32")
    speed_table.write(page, {key: {"bare": "1", "ours": "2"}})
    speed_table.write(
        page, speed_table.merge(speed_table.read(page), {key: {"ours": "3"}, ("new", "AMX", "bf16"): {"bare": "4"}})
    )
    assert speed_table.read(page) == {key: {"bare": "1", "ours": "3"}, ("new", "AMX", "bf16"): {"bare": "4"}}
    assert page.read_text(encoding="utf-8").startswith("before\n<!-- speed: begin -->\n| extractor | processor |")
    assert page.read_text(encoding="utf-8").endswith("<!-- speed: end -->\nafter\n")


def test_a_page_without_a_table_is_said_to_be_one(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="the page lacks <!-- speed: begin -->"):
        speed_table.read(page)
