"""``--import``: modules of users."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.commands.app import _PANELS
from pipelines.commands.imports import import_modules
from schemas.errors import UsageError
from schemas.user_code import user_code
from tests.train.conftest import EDGES
from train.config.models import model_kinds

OWN = '[data]\nportions = { en = ["comparable"] }\n[model]\nkind = "counts"\nwidth = 4\n[schedule]\nmax_steps = 5\n'


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty folder as the current one; its modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in (path.stem for path in tmp_path.glob("*.py")):
        sys.modules.pop(name, None)


def test_modules_are_imported_in_order_and_from_the_current_folder_last(folder):
    (folder / "first_of_two.py").write_text("value = 1\n")
    (folder / "second_of_two.py").write_text("import first_of_two\nvalue = first_of_two.value + 1\n")
    (folder / "colorsys.py").write_text("raise RuntimeError('hides the module of the standard library')\n")
    sys.modules.pop("colorsys", None)
    import_modules(["first_of_two", "second_of_two", "colorsys"])
    assert sys.modules["second_of_two"].value == 2
    assert Path(sys.modules["colorsys"].__file__).parent != folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "missing_module",
            r"--import is 'missing_module', but there is no module 'missing_module': expected the dotted name, w",
        ),
        ("schemas.missing", "--import is 'schemas.missing', but there is no module 'schemas.missing'"),
        ("own.py", r"--import is 'own\.py', but there is no module 'own\.py': .* without \.py"),
        ("./own", r"--import is '\./own', .*(relative import|no module)"),
        (
            "needs_another",
            r"--import is 'needs_another', which fails at .*needs_another\.py:1 \(ModuleNotFoundError: .*'another'\)",
        ),
        ("broken", r"--import is 'broken', which fails at .*broken\.py:2 \(ZeroDivisionError: division by zero\): correct"),
        ("no_python", r"--import is 'no_python', which fails at .* \(SyntaxError: "),
        ("exits", r"--import is 'exits', which fails at .*exits\.py:1 \(SystemExit: 0\)"),
        ("refuses", r"--import is 'refuses', which fails at .*refuses\.py:2 \(UsageError: refused\)"),
    ],
)
def test_unusable_module_is_wrong_usage(folder, name, message):
    for module, text in {
        "own": "",
        "needs_another": "import another\n",
        "broken": "x = 0\ny = 1 / x\n",
        "no_python": "def\n",
        "exits": "raise SystemExit(0)\n",
        "refuses": "import schemas.errors\nraise schemas.errors.UsageError('refused')\n",
    }.items():
        (folder / f"{module}.py").write_text(text)
    with pytest.raises(UsageError, match=message):
        import_modules([name])


def test_commands_with_models_and_extractors_take_modules():
    takers = [command for commands in _PANELS.values() for command in commands if "import_" in command.options]
    names = [command.name for command in takers]
    assert sorted(names) == ["embed", "evaluate", "extractors", "features", "figures", "search", "sts", "train"]
    train = takers[names.index("train")]
    values = train.convert({"output": "run", "import": ["a", "b"]}, "a plan")
    assert values["import_"] == ("a", "b")
    assert train.words(values) == ["train", "--import=a", "--import=b", "run"]


@pytest.mark.parametrize("place", ["option", "environment"])
def test_module_that_registers_a_kind_is_imported_first(folder, kinds, call, monkeypatch, place):
    (folder / "edges.py").write_text(EDGES)
    (folder / "own.toml").write_text(OWN)
    code, out, err = call("train", "own.toml", "--show")
    assert (code, out) == (2, "")
    assert "own.toml: model.kind is 'counts'" in err
    if place == "environment":
        monkeypatch.setenv("IMAGEPIVOT_TRAIN_IMPORT", "edges")
    options = ("--import", "edges") if place == "option" else ()
    code, out, _ = call("train", "own.toml", "--show", *options)
    assert (code, "width = 4" in out, model_kinds()) == (0, True, ("counts", "vse"))


def test_user_code_has_all_loaded_modules_of_users_and_changes_with_each(folder):
    for name, text in (("base_of_own", "import json\nimport schemas.text\n"), ("own_model", "import base_of_own\n")):
        (folder / f"{name}.py").write_text(text)
    import_modules(["own_model"])
    before = user_code()
    assert list(before) == ["base_of_own", "own_model"]
    for name in before:
        with (folder / f"{name}.py").open("a") as file:
            file.write("sign = -1\n")
        import_modules(["own_model"])
        assert user_code()[name] != before[name]
    import_modules([])
    assert user_code() == {}
