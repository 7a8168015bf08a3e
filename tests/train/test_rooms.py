"""The rooms of the package import one way, and its lighter ones load no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "train"
# The rooms, and the modules beside them, that a room may import.
ALLOWED = {
    "config": set(),
    "data": {"config"},
    "models": {"data"},
    "objectives": {"data", "models"},
    "runs": {"config", "models", "devices"},
    "evaluation": {"config", "data", "models", "runs", "devices"},
}
# Modules beside the rooms stand above them; what stands on top of everything is imported by nothing below it.
BELOW = set(ALLOWED) | {"devices", "distributed", "progress"}
ALLOWED |= {
    **{name: set() for name in ("devices", "distributed", "progress")},
    "material": BELOW,
    "loop": BELOW | {"material"},
    "reports": BELOW | {"material", "loop"},
    "demo": BELOW | {"material", "loop", "reports"},
    "commands": BELOW | {"material", "loop", "reports", "demo"},
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "train" else {node.module}
    return {module.split(".")[1] for module in modules if module and module.startswith("train.")}


def test_every_room_is_known():
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"} == set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_run_one_way(room):
    paths = [path for path in PACKAGE.rglob("*.py") if room_of(path) == room]
    assert paths
    for path in paths:
        assert imported_rooms(path) - {room} <= ALLOWED[room], path.relative_to(ROOT)


def test_imports_are_seen_anywhere_in_a_module(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import train.models.encoders\ndef lazily():\n    from train import loop\n    from train.data import splits\n"
    )
    assert imported_rooms(path) == {"models", "loop", "data"}


def test_configurations_data_and_commands_load_no_torch():
    names = "config", "data", "commands.train", "commands.runs", "commands.tables"
    script = "\n".join(f"import train.{name}" for name in names) + "\nimport sys\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
