"""Figures that must not get worse are in tests/benchmarks/floors.json, and the speed table is one that a run reads and writes."""

import json
import re
from pathlib import Path

from tests.benchmarks import speed_table, targets

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "benchmarks"
FLOORS = json.loads((FOLDER / "floors.json").read_text(encoding="utf-8"))
FIELDS = {"name", "bound", "ratio", "unit", "baseline", "processor", "commit", "script"}


def test_each_floor_has_all_fields_and_a_script_here_or_at_its_commit() -> None:
    assert len({entry["name"] for entry in FLOORS}) == len(FLOORS)
    for entry in FLOORS:
        assert set(entry) == FIELDS
        assert entry["ratio"] > 0
        assert entry["bound"] in ("at least", "at most")
        assert entry["baseline"]
        assert entry["processor"]
        assert re.fullmatch("[0-9a-f]{7,40}", entry["commit"])
        assert (ROOT / entry["script"]).is_file() or entry["script"].startswith(f"{entry['commit']}:tests/benchmarks/bench_")


def test_each_script_measures_its_own_floors() -> None:
    for script in sorted(FOLDER.glob("bench_*.py")):
        text = script.read_text(encoding="utf-8")
        used = {name for _, name in re.findall(r"\bfloor\(([\"'])(.+?)\1\)", text)}
        own = {entry["name"] for entry in FLOORS if entry["script"] == script.relative_to(ROOT).as_posix()}
        assert used == own or script.name == "bench_speed.py"  # Which goes by the targets of a row.
        assert not re.search(r"at_least=[0-9]|target: (at most|at least|under|less than) [0-9.,]*[0-9]+\)", text), script.name


def test_write_replaces_measured_cells(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text("before\n<!-- speed: begin -->\n<!-- speed: end -->\nafter\n", encoding="utf-8")
    key = ("resnet50-pool", "AVX2", "fp32")
    speed_table.write(page, {key: {"baseline": "1", "imagepivot": "2"}})
    speed_table.write(page, {key: {"imagepivot": "3"}, ("new", "AMX", "bf16"): {"baseline": "4"}})
    assert speed_table.read(page) == {key: {"baseline": "1", "imagepivot": "3"}, ("new", "AMX", "bf16"): {"baseline": "4"}}
    assert page.read_text(encoding="utf-8").startswith("before\n<!-- speed: begin -->\n| extractor | processor |")
    assert page.read_text(encoding="utf-8").endswith("<!-- speed: end -->\nafter\n")


def test_verdicts_judge_measured_columns() -> None:
    of_row = targets.targets_of("resnet50-pool", "AVX2", "fp32")
    judged = targets.verdicts(of_row, {"baseline": 10.0, "imagepivot": 10.0, "imagepivot, --compile": 12.9}, 2.6)
    assert [verdict.cell for verdict in judged[:2]] == ["1.00 of 1.0: met", "1.29 of 1.3: missed"]
    assert str(judged[2]) == "one image in at most 2.5 s: missed with 2.60"
