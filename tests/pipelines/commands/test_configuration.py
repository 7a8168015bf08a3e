"""Values from a file and from the environment: which comes first, and what is refused; `test_binding` has every option."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from pipelines.commands import app as cli
from pipelines.commands.binding import flags_of
from schemas.errors import UsageError


@pytest.fixture(scope="module")
def group():
    return typer.main.get_command(cli.app)


@pytest.fixture
def parse(group, tmp_path, monkeypatch):
    """Parses a command line beside a file ``run.toml`` with the given text; returns values and flags."""
    monkeypatch.chdir(tmp_path)

    def run(command: str, *arguments: str, toml: str | None = None):
        if toml is not None:
            Path("run.toml").write_text(toml, encoding="utf-8")
            arguments = ("--config", "run.toml", *arguments)
        with typer.Context(group, info_name="imagepivot") as parent:
            context = group.commands[command].make_context(command, list(arguments), parent=parent)
        options = group.commands[command].options.values()
        params = {option.key: option.value(context.params[option.key]) for option in options if option.key in context.params}
        return SimpleNamespace(params=params, flags=flags_of(context))

    return run


# --- precedence ------------------------------------------------------------------------------------------------------


def test_command_line_comes_before_the_environment_before_the_file_before_the_default(parse, monkeypatch):
    toml = 'images = "photos"\noutput = "features"\nshards = 3\n'
    assert parse("features", "photos", "features").params["shards"] == "auto"
    assert parse("features", toml=toml).params["shards"] == 3
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_SHARDS", "4")
    assert parse("features", toml=toml).params["shards"] == 4
    assert parse("features", "--shards", "5", toml=toml).params["shards"] == 5
    assert parse("features", "--shards", "like:captions", toml=toml).params["shards"] == "like:captions"
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_OUTPUT", "elsewhere")
    params = parse("features", "pictures", toml=toml).params
    assert (params["images"], params["output"]) == ("pictures", "elsewhere")


# --- values ----------------------------------------------------------------------------------------------------------


def test_keys_with_either_dash_and_lists_as_text(parse):
    toml = 'captions = "c"\noutput = "v"\n{} = 7\nlanguages = "en,de"\nportions = []\n'
    for key in ("min-count", "min_count"):
        params = parse("vocabulary", toml=toml.format(key)).params
        assert (params["min_count"], params["languages"], params["portions"]) == (7, ("en", "de"), ())


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("yes", True), ("0", False), ("false", False)])
def test_switches_in_the_environment(parse, monkeypatch, text, value):
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_OVERWRITE", text)
    assert parse("features", toml='images = "i"\noutput = "o"\noverwrite = true\n').params["overwrite"] is value


def test_empty_variable_counts_as_none(parse, monkeypatch):
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_SHARDS", "")
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_OVERWRITE", "")
    params = parse("features", "photos", "features").params
    assert (params["shards"], params["overwrite"]) == ("auto", False)


def test_environment_of_other_programs_is_ignored(group, monkeypatch, capsys):
    for name in ("VERSION", "HELP", "FEATURES_HELP", "OVERWRITE"):
        monkeypatch.setenv(f"IMAGEPIVOT_{name}", "1")
    assert group.commands["features"].make_context("features", ["photos", "features"]).params["overwrite"] is False
    with pytest.raises(SystemExit):
        group.main(["inspect", "--help"])
    assert "Show a dataset" in capsys.readouterr().out


def test_file_itself_may_be_named_in_the_environment(parse, monkeypatch):
    Path("of.toml").write_text('dataset = "d"\nrows = 2\n')
    monkeypatch.setenv("IMAGEPIVOT_INSPECT_CONFIG", "of.toml")
    assert parse("inspect").params["rows"] == 2


# --- flags for Beam --------------------------------------------------------------------------------------------------


def test_flags_for_beam_are_never_arguments(parse):
    toml = 'images = "photos"\noutput = "features"\n'
    context = parse("features", "--", "--runner=DataflowRunner", "--project=x", toml=toml)
    assert (context.params["images"], context.params["output"]) == ("photos", "features")
    assert context.flags == ("--runner=DataflowRunner", "--project=x")


def test_flags_for_beam_in_the_file(parse):
    toml = 'images = "photos"\noutput = "features"\nbeam-flags = ["--runner=DataflowRunner"]\n'
    assert parse("features", toml=toml).flags == ("--runner=DataflowRunner",)
    assert parse("features", "--", "--runner=FlinkRunner", toml=toml).flags == ("--runner=FlinkRunner",)
    with pytest.raises(UsageError, match="inspect has no option or argument 'beam-flags'"):
        parse("inspect", toml='dataset = "d"\nbeam-flags = []\n')


# --- sections --------------------------------------------------------------------------------------------------------

SECTIONS = """
[captions]
source = "multi30k"
output = "captions"
format = "multi30k"

[encode]
captions = "captions"
vocabulary = "vocabulary"
output = "encoded"
"""


def test_one_file_for_several_commands(parse):
    assert parse("captions", toml=SECTIONS).params["format"] == "multi30k"
    params = parse("encode", toml=SECTIONS).params
    assert [params[name] for name in ("captions", "vocabulary", "output")] == ["captions", "vocabulary", "encoded"]


def test_config_key_named_like_a_command_is_no_section(parse):
    assert parse("encode", toml='captions = "c"\nvocabulary = "v"\noutput = "e"\n').params["captions"] == "c"


@pytest.mark.parametrize(
    ("command", "toml", "says"),
    [
        ("features", "batchsize = 8", "'run.toml': features has no option or argument 'batchsize': did you mean 'batch-size'?"),
        ("features", 'config = "b.toml"', "features has no option or argument 'config'"),
        ("features", "shards = 8.0", "--shards is 8.0, expected a whole number or text in quotes"),
        ("captions", 'languages = ["en", 3]', "--languages[1] is 3, expected text in quotes"),
        ("captions", 'languages = ["en,de"]', "--languages holds 'en,de', but a comma separates values: make it several"),
        ("import", 'sources = "a.npy"', "SOURCES is 'a.npy', expected a list, written [\"en\"]"),
        ("features", "min-regions = 3\nmin_regions = 4", "'run.toml': 'min-regions' and 'min_regions' are the same: keep one"),
        ("features", "[feature]\nshards = 2", "has a section [feature], which is no command: did you mean 'features'?"),
        ("features", "[train]\nseed = 1", "has a section [train], which is no command"),
        ("features", SECTIONS, "'run.toml' has no section [features]: its sections are [captions], [encode]"),
        ("captions", "shards = 2\n" + SECTIONS, "'run.toml' has the key 'shards' beside sections: move it into the section"),
        ("captions", SECTIONS + "shard = 2", "section [encode]: encode has no option or argument 'shard'"),
        ("captions", 'output = "a"\noutput = "b"', "'run.toml' is not TOML: "),
    ],
)
def test_config_invalid_file_is_refused(parse, command, toml, says):
    with pytest.raises(UsageError, match=re.escape(says)):
        parse(command, toml=toml)


# --- the file --------------------------------------------------------------------------------------------------------


def test_files_of_other_systems(parse):
    Path("run.toml").write_bytes('\ufeffdataset = "čeština"\r\nrows = 2\r\n'.encode())
    params = parse("inspect", "--config", "run.toml").params
    assert (params["dataset"], params["rows"]) == ("čeština", 2)
