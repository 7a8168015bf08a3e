"""The front door: every name is there, loads what it needs only, and means ours beside a foreign ``train.py`` or ``schemas/``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import imagepivot

ROOT = Path(__file__).parent.parent
FOREIGN = "raise RuntimeError('a module of the user was imported: ' + __file__)\n"


@pytest.fixture
def here(tmp_path) -> Path:
    """A folder of a user who has modules with the names of our packages."""
    for name in ("train.py", "schemas/__init__.py", "pipelines.py", "extractors/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(FOREIGN)
    return tmp_path


def python(*arguments: str, cwd: Path, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # This checkout, wherever the environment's editable one lies.
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, input=stdin, capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == code, done.stderr
    return done


# --- names -----------------------------------------------------------------------------------------------------------


def test_public_names_load_from_their_modules():
    for name in dir(imagepivot):
        module, original = imagepivot._places()[name]
        assert getattr(imagepivot, name) is getattr(sys.modules[module], original)


@pytest.mark.slow
def test_reading_loads_neither_torch_nor_beam(small_features):
    script = (
        "import sys, imagepivot\n"
        "dataset = imagepivot.open_dataset(sys.argv[1])\n"
        "print(dataset.numpy().sum(), imagepivot.validate_dataset(sys.argv[1]))\n"
        "print([name for name in ('torch', 'apache_beam', 'PIL', 'typer') if name in sys.modules])"
    )
    assert python("-c", script, str(small_features), cwd=ROOT).stdout == "276.0 []\n[]\n"


@pytest.mark.slow
def test_missing_extra_is_named_on_first_use(small_features):
    script = (
        "import sys, imagepivot\n"
        "sys.modules['apache_beam'] = None\n"
        "print(len(imagepivot.open_dataset(sys.argv[1])))\n"
        "imagepivot.ReadCaptions\n"
    )
    done = python("-c", script, str(small_features), cwd=ROOT, code=1)
    assert done.stdout == "6\n"
    assert "ImportError: imagepivot.ReadCaptions needs apache_beam" in done.stderr
    assert "pip install 'imagepivot[pipelines]'" in done.stderr


# --- beside modules of the same names --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("script", ["script.py", "train.py"])
def test_script_beside_foreign_modules(here, small_features, script):
    (here / script).write_text(
        "import sys\nimport imagepivot\n\nprint(imagepivot.open_dataset(sys.argv[1]).image_ids())\n"
        "import schemas, train\nprint(schemas.__name__, train.__name__)\n"
    )
    done = python(script, str(small_features), cwd=here)
    assert done.stdout.splitlines()[0] == str(imagepivot.open_dataset(small_features).image_ids())
    assert done.stdout.splitlines()[1] == "schemas train"


@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["script.py"], ["extractors/__init__.py", "pipelines.py", "schemas/__init__.py", "train.py"]),
        (["train.py"], ["extractors/__init__.py", "pipelines.py", "schemas/__init__.py"]),
        (["-m", "script"], ["extractors/__init__.py", "pipelines.py", "schemas/__init__.py", "train.py"]),
        (["-m", "imagepivot", "--version"], []),
        (["-c", "import imagepivot"], []),
    ],
)
def test_modules_beside_a_script_are_warned_of_once(here, words, hidden):
    for script in ("script.py", "train.py"):
        (here / script).write_text("import imagepivot\nimport pipelines\nimport imagepivot\n")
    warnings = [line for line in python(*words, cwd=here).stderr.splitlines() if "is hidden" in line]
    assert [line.partition("UserWarning: ")[2].partition(" is hidden")[0] for line in warnings] == [
        str(here / name) for name in hidden
    ]


PIPELINE = """
import sys

import imagepivot

if __name__ == "__main__":
    job = imagepivot.CaptionsJob(source=imagepivot.open_captions("table", sys.argv[1]), output="captions", shards=2)
    manifest = imagepivot.prepare_captions(job, imagepivot.Execution(workers=2))
    print(manifest.rows)
"""


@pytest.mark.cluster
def test_worker_processes_of_a_pipeline_beside_foreign_modules(here):
    (here / "captions.tsv").write_text("image_id\ttext\n" + "".join(f"img{n}\tA dog runs .\n" for n in range(50)))
    (here / "script.py").write_text(PIPELINE)
    assert python("script.py", "captions.tsv", cwd=here).stdout == "50\n"


@pytest.mark.parametrize("content", ["VERSION = 1\n", None], ids=["module", "folder"])
def test_loaded_foreign_module_is_named(tmp_path, content):
    place = tmp_path / "schemas" / ("__init__.py" if content else "data.txt")
    place.parent.mkdir()
    place.write_text(content or "")
    packages_last = f"import sys\nwhile {str(ROOT)!r} in sys.path: sys.path.remove({str(ROOT)!r})\n"
    (tmp_path / "script.py").write_text(f"{packages_last}import schemas\nsys.path.append({str(ROOT)!r})\nimport imagepivot\n")
    done = python("script.py", cwd=tmp_path, code=1)
    assert "ImportError: imagepivot has a package 'schemas'" in done.stderr
    assert f"from '{place if content else place.parent}'" in done.stderr
    assert "rename that module" in done.stderr
