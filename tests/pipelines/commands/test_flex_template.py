"""The parameters of the Flex Template: its metadata, and the command that a launch means."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pipelines.commands import flex_template
from pipelines.commands.app import app
from pipelines.commands.flex_template import COMMANDS, LEFT_OUT, command_line, metadata
from schemas.errors import UsageError

ROOT = Path(__file__).parents[3]
GOOGLES = ("--runner=DataflowRunner", "--project=p", "--template_location=gs://b/job_object")
PARAMETERS = {parameter["name"]: parameter for parameter in metadata()["parameters"]}


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app).commands[command].params
    return {max(parameter.opts, key=len).removeprefix("--").replace("_", "-") for parameter in found} - {"help"}


# --- the metadata ------------------------------------------------------------------------------------------------------


def test_the_file_is_what_the_options_say():
    assert json.loads((ROOT / "docker" / "metadata.json").read_text()) == metadata(), (
        "write it anew: python -m pipelines.commands.flex_template > docker/metadata.json"
    )


def test_google_reads_it():
    dataflow = pytest.importorskip("google.cloud.dataflow_v1beta3", reason="the extra gcp installs it")
    described = metadata()
    for parameter in described["parameters"]:
        fields = {re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name): value for name, value in parameter.items()}
        fields["param_type"] = dataflow.ParameterType[fields["param_type"]]
        read = dataflow.ParameterMetadata(**fields)
        assert (read.name, list(read.regexes)) == (parameter["name"], parameter["regexes"])


@pytest.mark.slow
def test_every_option_is_a_parameter_or_left_out_with_a_reason():
    for command in COMMANDS:
        assert {option for option in options_of(command) if option.replace("-", "_") not in PARAMETERS} <= set(LEFT_OUT)
    for name in LEFT_OUT:
        assert name.replace("-", "_") not in PARAMETERS
        assert name == "beam-flags" or any(name in options_of(command) for command in COMMANDS)


@pytest.mark.slow
def test_every_parameter_has_a_pattern_and_says_of_which_command_it_is():
    for name, parameter in PARAMETERS.items():
        (pattern,) = parameter["regexes"]
        assert re.fullmatch(r"\^.+\$", pattern)
        assert parameter["helpText"]
        assert not re.match(pattern, "")
        shown = parameter.get("parentTriggerValues", COMMANDS)
        if name not in ("command", "sdk_container_image", "disk_size_gb"):
            assert list(shown) == [command for command in COMMANDS if name.replace("_", "-") in options_of(command)]
    assert {name for name, parameter in PARAMETERS.items() if not parameter["isOptional"]} == {"command", "output"}


@pytest.mark.parametrize("command", COMMANDS)
def test_defaults_match_their_patterns(command):
    for option in typer.main.get_command(app).commands[command].params:
        name = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        if name in PARAMETERS and option.default not in (None, "", Ellipsis) and option.opts[0].startswith("-"):
            text = str(option.default).lower() if isinstance(option.default, bool) else str(option.default)
            assert re.match(PARAMETERS[name]["regexes"][0], text), (name, option.default)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("images", ("gs://b/photos", "s3://b/a b/**/*.jpg"), ("photos", "/photos", "gs://b", "gs:///x", " gs://b/x")),
        ("weights", ("gs://b/w.pth", "/opt/imagepivot/weights/w.pth", "default", "random:0"), ("w.pth", "random:", "")),
        ("languages", ("en", "en,de"), ("en, de", ",en", "en,")),
        ("columns", ("image_id=file", "image_id=file,text=caption"), ("image_id", "=x", "a=b,c")),
        ("delimiter", (";", "|", "tab"), ("", ";;", '"')),
        ("quoting", ("auto", "rfc4180", "none"), ("minimal", "")),
        ("shards", ("64", "auto", "like:gs://b/captions"), ("-1", "many", "like:")),
        ("score_threshold", ("0.2", "1"), (".2", "-1", "x")),
        ("shared_disk", ("true", "false"), ("True", "1", "yes")),
        ("format", ("multi30k", "table"), ("json", "Multi30k")),
        ("sdk_container_image", ("europe-docker.pkg.dev/p/images/worker:1", "a@sha256:00"), ("-x", "a b")),
    ],
)
def test_patterns(name, good, bad):
    (pattern,) = PARAMETERS[name]["regexes"]
    assert all(re.match(pattern, value) for value in good)
    assert not any(re.match(pattern, value) for value in bad)


# --- the command -------------------------------------------------------------------------------------------------------


def test_parameters_go_before_the_dashes_and_googles_flags_behind_them():
    arguments = (
        *("--runner=DataflowRunner", "--output=gs://b/features", "--command=features", "--project=p", "--batch_size=8"),
        *("--images=gs://b/photos", "--compile=true", "--grid=false", "--disk_size_gb=100", "--job_name=x"),
    )
    assert command_line(arguments) == [
        *("features", "gs://b/photos", "gs://b/features", "--compile", "--batch-size=8"),
        *("--", "--runner=DataflowRunner", "--project=p", "--disk_size_gb=100", "--job_name=x"),
    ]


def test_arguments_stand_in_the_order_of_the_command():
    places = ("--output=gs://b/encoded", "--vocabulary=gs://b/vocabulary", "--captions=gs://b/captions")
    assert command_line(("--command=encode", *places, *GOOGLES)) == [
        *("encode", "gs://b/captions", "gs://b/vocabulary", "gs://b/encoded", "--", *GOOGLES)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"^the parameter 'command' is '', expected one of 'captions', 'vocabulary', 'encode', 'features'$"),
        (("--command=train",), r"^the parameter 'command' is 'train', expected one of 'captions'"),
        (
            ("--command=vocabulary", "--output=gs://b/v"),
            r"^the parameter 'captions' is missing, and vocabulary needs it: expected '",
        ),
        (
            ("--command=vocabulary", "--captions=gs://b/c", "--output=v"),
            r"^the parameter 'output' is 'v', expected '\(gs\|s3\)",
        ),
        (
            ("--command=vocabulary", "--captions=gs://b/c", "--output=gs://b/v", "--gpu=nvidia-l4"),
            r"^vocabulary has no parameter 'gpu': it has 'captions', 'output', 'min_count'",
        ),
        (
            ("--command=captions", "gs://b/x"),
            r"^the launch has an argument 'gs://b/x', expected parameters alone: --NAME=VALUE$",
        ),
        (("--command=captions", "--"), r"^the launch has an argument '--', expected parameters alone"),
        (("--command=captions", "--source"), r"^the launch has '--source' without a value, expected --source=VALUE$"),
        (
            ("--command=captions", "--source=gs://b/1", "--source=gs://b/2"),
            r"^the parameter 'source' is given twice, as 'gs://b/1' and as 'gs://b/2': keep one$",
        ),
    ],
)
def test_a_launch_that_is_wrong(arguments, message):
    with pytest.raises(UsageError, match=message):
        command_line(arguments)


@pytest.mark.slow
def test_a_wrong_launch_ends_in_one_line():
    entry = [sys.executable, str(ROOT / "docker" / "launch.py")]
    wrong = subprocess.run([*entry, "--command=none"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert wrong.stderr.startswith("Error: the parameter 'command' is 'none'")


def test_a_launch_runs_the_command(monkeypatch):
    ran = []
    monkeypatch.setattr(flex_template, "run_command", lambda: ran.append(sys.argv))
    given = ("--command=captions", "--source=gs://b/x.tsv", "--output=gs://b/y", "--format=table")
    monkeypatch.setattr(sys, "argv", ["launch.py", *given, *GOOGLES])
    flex_template.main()
    assert ran == [["imagepivot", "captions", "gs://b/x.tsv", "gs://b/y", "--format=table", "--", *GOOGLES]]
