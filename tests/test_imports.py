"""Imports run one way: ``schemas <- extractors <- pipelines`` and ``schemas <- train``; nothing heavy is imported unasked."""

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "extractors", "pipelines", "train")
# What a package must not import.
FORBIDDEN = {
    "extractors": {"apache_beam", "pipelines", "train", "imagepivot"},
    "pipelines": {"train", "imagepivot"},
    "train": {"apache_beam", "extractors", "pipelines", "imagepivot"},
}
# All that a package may import.
ALLOWED = {"schemas": {*sys.stdlib_module_names, "numpy", "pyarrow", "schemas"}}
# The commands over models call `train`, as does the demo. Workers on other machines import `pipelines` first, and with it the
# rule that the names of our packages mean ours.
EXCEPTIONS = {
    "pipelines/__init__.py": {"imagepivot"},
    **{f"pipelines/commands/{name}.py": {"train"} for name in ("demo", "looking", "training")},
    "schemas/drawing/style.py": {"matplotlib"},  # Loaded to draw.
    "schemas/drawing/fonts.py": {"matplotlib"},
    "schemas/process/devices.py": {"torch"},  # Loaded to compute.
    "schemas/console/progress.py": {"rich"},  # Loaded to draw on a terminal.
    "schemas/console/tables.py": {"rich"},
    "schemas/storage/s3.py": {"botocore"},  # Loaded for objects in S3.
    "schemas/storage/google_storage.py": {"google", "requests"},  # Loaded for objects in Google's store.
}

# By package: what the modules of a room may import of the same package besides their own room. Modules that stand in the package's
# own folder are rooms of their own. A trailing "*" stands for every room.
ROOMS: dict[str, dict[str, set[str]]] = {
    "extractors": {
        "images": set(),
        "computing": {"base"},
        "networks": set(),
        "options": {"images", "weights"},
        "base": set(),
        "description_cache": {"base"},
        "sample_outputs": {"base", "description_cache"},
        "weights": {"description_cache"},
        "fixed_size": {"images", "computing", "options", "base"},
        "whole_image": {"images", "computing", "networks", "weights", "options", "base", "fixed_size"},
        "regions": {"images", "computing", "weights", "options", "base"},
        "tokens": {"computing", "weights", "base", "description_cache", "sample_outputs"},
        "catalogue": {"weights", "options", "base", "whole_image", "regions"},
        "registration": {"weights", "options", "base", "catalogue"},
        "batch_sizes": {"base", "description_cache"},
        "request": {"*"},
    },
    "pipelines": {
        "jobs": {"inputs", "running"},
        "running": set(),
        "inputs": set(),
        "text": {"inputs", "jobs", "running"},
        "datasets": {"inputs", "jobs", "running"},
        "exchange": {"inputs", "jobs", "running"},
        "features": {"datasets", "inputs", "jobs", "running"},
        "doctor": set(),
        "plans": set(),
        "looking": {"datasets", "inputs", "jobs", "running"},
        "demo": {"datasets", "features", "inputs", "running", "text"},
        "commands": {"*"},
    },
    "train": {
        "config": set(),
        "devices": set(),
        "chance": set(),
        "progress": {"chance"},
        "data": {"config", "devices"},
        "models": {"config", "data", "devices"},
        "losses": {"config", "data", "models"},
        "runs": {"config", "losses", "models"},
        "evaluation": {"chance", "config", "data", "devices", "jobs", "losses", "models", "runs"},
        "jobs": {"chance", "config", "data", "runs"},
        "loop": {"chance", "config", "data", "devices", "evaluation", "jobs", "losses", "models", "progress", "runs"},
        "reports": {"chance", "config", "data", "devices", "evaluation", "jobs", "loop", "models", "runs"},
        "sts": {"chance", "data", "devices", "evaluation", "jobs", "models", "reports", "runs"},
        "demo": {"config", "data", "evaluation", "jobs", "loop", "progress", "reports", "runs"},
    },
}

# Outside `schemas.storage` nothing imports these: files are reached through `schemas.storage.folder`.
CLIENTS = {
    *("botocore", "google.auth", "google.cloud", "requests"),
    *(f"schemas.storage.{name}" for name in ("google_storage", "object_store", "s3")),
}

HEAVY = ("torch", "torchvision", "apache_beam", "PIL", "sacremoses", "detectron2", "typer", "rich", "pandas")


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every import of a module, wherever it stands; '.' for a relative one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." if node.level else (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__"):
                yield node.lineno, str(node.args[0].value).partition(".")[0]


def breaches(path: str, source: str) -> list[str]:
    """Imports of a module that break the direction, as ``path:line imports name``."""
    package = path.partition("/")[0]
    forbidden = {*FORBIDDEN.get(package, set()), "."} - EXCEPTIONS.get(path, set())
    allowed = ALLOWED.get(package) and ALLOWED[package] | EXCEPTIONS.get(path, set())
    return [
        f"{path}:{line} imports {name}"
        for line, name in sorted(imported(source))
        if name in forbidden or (allowed is not None and name not in allowed)
    ]


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


# --- direction -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_imports_run_one_way():
    found = [
        breach for path in modules() for breach in breaches(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_every_package_is_looked_at():
    assert {path.relative_to(ROOT).parts[0] for path in modules()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("path", "statement", "name"),
    [
        ("schemas/a.py", "import pandas as pd", "pandas"),
        ("schemas/a.py", "import os, json, train.data.splits", "train"),
        ("schemas/deep/a.py", "from . import keys", "."),
        ("extractors/a.py", "from apache_beam.metrics import Metrics", "apache_beam"),
        ("pipelines/inputs/app.py", "from train.main import app", "train"),
        ("train/models/a.py", "import importlib; importlib.import_module('pipelines.commands.app')", "pipelines"),
        ("train/a.py", "__import__('extractors')", "extractors"),
    ],
)
def test_checker_finds_imports_at_any_depth(path, statement, name):
    source = f"class A:\n    def lazily(self):\n        if True:\n            {statement}"
    assert breaches(path, source) == [f"{path}:4 imports {name}"]


# --- rooms and circles -----------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, known: Collection[str]) -> Iterator[tuple[int, str]]:
    """Line and name of every module of ours that a module imports, wherever the import stands; of packages their modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from ((node.lineno, name) for name in names & set(known))
            if names - set(known):
                yield node.lineno, node.module


def graph(sources: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """By module the modules that it imports, with the line of the import."""
    return {
        name: {other: line for line, other in imported_modules(text, sources) if other != name}
        for name, text in sources.items()
    }


def circle(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Modules that import each other in a circle, whose first is also its last; empty without a circle."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def room(module: str) -> tuple[str, str]:
    package, _, rest = module.partition(".")
    return package, rest.partition(".")[0]


def trespasses(edges: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Imports across rooms that the layout does not allow, as ``module:line imports module``."""
    wrong = []
    for name, others in edges.items():
        package, own = room(name)
        for other, line in others.items():
            target_package, target = room(other)
            if package == target_package and package in ROOMS and own and target not in ("", own):
                allowed = ROOMS[package].get(own, set())
                if target not in allowed and "*" not in allowed:
                    wrong.append(f"{name}:{line} imports {other}")
    return sorted(wrong)


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {module_name(path): path.read_text(encoding="utf-8") for path in modules()}


@pytest.mark.slow
def test_no_modules_import_each_other(sources):
    assert circle(graph(sources)) == []


@pytest.mark.slow
def test_packages_follow_the_import_layout(sources):
    assert trespasses(graph(sources)) == []


def test_every_room_is_in_the_layout(sources):
    for package, rooms in ROOMS.items():
        assert {room(name)[1] for name in sources if room(name)[0] == package} - {""} == set(rooms)


def clients(source: str) -> set[str]:
    """Clients of object stores that a module imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {client for client in CLIENTS for name in names if f"{name}.".startswith(f"{client}.")}


def test_only_the_console_package_draws_tables_and_progress(sources):
    drawing = [name for name, text in sources.items() if re.search(r"rich(\.| import )(table|progress|live|status)\b", text)]
    assert sorted(drawing) == ["schemas.console.progress", "schemas.console.tables"]


def test_only_the_storage_package_imports_store_clients(sources):
    found = {name: clients(text) for name, text in sources.items() if not name.startswith("schemas.storage.")}
    assert {name: names for name, names in found.items() if names} == {}
    assert set().union(*map(clients, sources.values())) == CLIENTS


def test_stores_have_one_client_each(sources):
    """Neither obstore nor pyarrow reaches a store; local disks need no file system of pyarrow."""
    others = r"\bobstore\b|pyarrow\.fs\b|from pyarrow import .*\bfs\b|\.__reduce__\("
    assert [name for name, text in sources.items() if re.search(others, text)] == []


def test_figures_are_created_with_the_names_and_the_style_of_drawing(sources):
    importing = {name for name, text in sources.items() if re.search(r"(from|import) matplotlib\b", text)}
    assert importing == {"schemas.drawing.style", "schemas.drawing.fonts"}
    creating = {name for name, text in sources.items() if re.search(r"\b(Figure|new_figure)\(", text)}
    assert creating >= {"pipelines.datasets.view", "train.reports.comparison_plot", "train.runs.curves"}
    assert creating == {name for name in creating if re.search(r"^@own_style|with own_style", sources[name], re.MULTILINE)}


@pytest.mark.parametrize("place", ["{}", "def lazily():\n    {}"])
def test_trespass_is_found(place):
    source = place.format("from pipelines.features.extraction import FeaturesPlan")
    found = graph({"pipelines.inputs.files": source, "pipelines.features": "", "pipelines.features.extraction": ""})
    assert trespasses(found) == [f"pipelines.inputs.files:{source.count(chr(10)) + 1} imports pipelines.features.extraction"]


# --- without the rest ------------------------------------------------------------------------------------------------

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocker())
for name in {blocked!r}:
    try:
        __import__(name)
    except ImportError as error:
        assert str(error) == name + " is blocked", error
    else:
        raise AssertionError(name + " was imported")
"""


def run(script: str, *arguments: str, blocked: tuple[str, ...] = ()) -> str:
    """Output of a script in a process in which some packages cannot be imported."""
    process = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
def test_schemas_need_numpy_and_pyarrow_only(small_features):
    script = """
import schemas.console.progress
from schemas.dataset import open_dataset
from schemas.writing.validation import validate

dataset = open_dataset(sys.argv[1], kind="features")
assert validate(sys.argv[1]) == []
for image_id, row in zip(dataset.image_ids(), dataset.numpy()):
    print(image_id, *row.astype(int))
"""
    lines = run(script, str(small_features), blocked=HEAVY).splitlines()
    assert sorted(lines) == [f"{n} {4 * n} {4 * n + 1} {4 * n + 2} {4 * n + 3}" for n in range(6)]


def test_arrow_calls_import_no_pandas(sources):
    for path, text in sources.items():
        assert "to_pandas" not in text, f"{path}: `schemas.kinds.numpy_type` needs no pandas"


def test_extractors_need_no_beam_and_load_no_torch():
    script = (
        "import extractors.images.preprocessing\n"
        "print(extractors.extractor_names(), {'torch', 'apache_beam'} & set(sys.modules))"
    )
    assert run(script, blocked=("apache_beam",)).endswith("set()\n")


@pytest.mark.slow
def test_configurations_and_data_load_no_torch_and_jobs_no_arrays():
    script = "import train.config\nimport train.data\nprint('torch' in sys.modules)"
    assert run(script) == "False\n"
    run("import train.jobs", blocked=("torch", "numpy", "pyarrow", "typer", "rich"))


CALL = """
import os, sys
from imagepivot import main
os.chdir(sys.argv[1])
for command in sys.argv[2:]:
    sys.argv = ["imagepivot", *command.split()]
    try:
        main()
    except SystemExit as error:
        print(error.code or 0)
heavy = ("torch", "torchvision", "torch._dynamo", "transformers", "apache_beam", "pandas", "sacremoses")
print([name for name in heavy if name in sys.modules])
"""


def without_seconds(lines: list[str]) -> list[str]:
    return [re.sub(r"B, [^,)]+", "B", line) for line in lines]


@pytest.mark.slow
def test_features_in_process_import_neither_torchvision_nor_beam_and_up_to_date_no_torch(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "image.png")
    first, second = (run(CALL, str(tmp_path), "features image.png features --weights random:0").splitlines() for _ in range(2))
    assert (first[-1], second[-1]) == ("['torch']", "[]")
    assert without_seconds(second[:-1]) == without_seconds(first[:-1])


@pytest.fixture
def text_inputs(tmp_path: Path) -> Path:
    (tmp_path / "table.csv").write_text("image_id,text,language,split\n1,A dog runs .,en,train\n", encoding="utf-8")
    (tmp_path / "words.vec").write_text("dog 1 2\nruns 3 4\n", encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_text_in_process_imports_neither_beam_nor_torch_and_up_to_date_nothing(text_inputs):
    commands = (
        "captions table.csv captions --format table",
        "vocabulary captions vocabulary --min-count 1",
        "encode captions vocabulary encoded",
        "word-vectors vocabulary words.vec vectors --languages en",
    )
    first, second = (run(CALL, str(text_inputs), *commands).splitlines() for _ in range(2))
    assert (first[-1], second[-1]) == ("['sacremoses']", "[]")
    assert without_seconds(second[:-1]) == without_seconds(first[:-1])
