"""The table of rates in docs/speed.md is one that a run of the benchmark reads and writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import aims, speed_table

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
    speed_table.write(page, {key: {"baseline": "1", "imagepivot": "2"}})
    speed_table.write(
        page, speed_table.merge(speed_table.read(page), {key: {"imagepivot": "3"}, ("new", "AMX", "bf16"): {"baseline": "4"}})
    )
    assert speed_table.read(page) == {key: {"baseline": "1", "imagepivot": "3"}, ("new", "AMX", "bf16"): {"baseline": "4"}}
    assert page.read_text(encoding="utf-8").startswith("before\n<!-- speed: begin -->\n| extractor | processor |")
    assert page.read_text(encoding="utf-8").endswith("<!-- speed: end -->\nafter\n")


def test_a_page_without_a_table_is_said_to_be_one(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="the page lacks <!-- speed: begin -->"):
        speed_table.read(page)


@pytest.mark.parametrize(
    ("extractor", "processor", "precision", "expected"),
    [
        ("resnet50-pool", "AVX2", "fp32", [("imagepivot", "baseline", 1.0), ("imagepivot, --compile", "baseline", 1.3)]),
        (
            "resnet50-pool",
            "AVX-512 with bf16",
            "fp32",
            [("imagepivot", "baseline", 1.0), ("imagepivot, --compile", "baseline", 1.3)],
        ),
        ("resnet50-pool", "AVX2", "bf16", []),
        ("resnet50-pool", "AVX-512", "bf16", []),
        ("resnet50-pool", "AVX-512 with bf16", "bf16", [("imagepivot", "folded", 0.95)]),
        ("faster-rcnn-36", "AVX-512", "fp32", [("imagepivot", "baseline", 1.0)]),
        ("faster-rcnn-36", "AMX", "bf16", [("imagepivot", "baseline", 2.5)]),
    ],
)
def test_each_class_of_processor_has_aims(extractor: str, processor: str, precision: str, expected: list[tuple]) -> None:
    assert list(aims.aims_of(extractor, processor, precision)) == expected


def test_a_row_is_judged_by_what_was_measured() -> None:
    of_row = aims.aims_of("resnet50-pool", "AVX2", "fp32")
    judged = aims.verdicts(of_row, {"baseline": 10.0, "imagepivot": 10.0, "imagepivot, --compile": 12.9}, None)
    assert [verdict.word for verdict in judged] == ["met", "missed", "not measured"]
    assert [verdict.cell for verdict in judged] == ["1.00 of 1.0: met", "1.29 of 1.3: missed", ""]
    assert str(judged[1]) == "imagepivot, --compile at least 1.3 of baseline: missed with 1.29"
    judged = aims.verdicts(of_row, {"imagepivot": 10.0}, 2.6)
    assert [verdict.word for verdict in judged] == ["not measured", "not measured", "missed"]
    assert str(judged[2]) == "one image in at most 2.5 s: missed with 2.60"
