"""Figures that must not get worse are in tests/benchmarks/floors.json."""

import json
import re
from pathlib import Path

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
