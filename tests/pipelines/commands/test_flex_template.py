from __future__ import annotations

import json
import re
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from pipelines.commands import flex_template
from pipelines.commands.flex_template import COMMANDS, LEFT_OUT, command_line, parameters_of
from schemas.errors import UsageError

ROOT = Path(__file__).parents[3]
GOOGLES = ("--runner=DataflowRunner", "--project=p", "--template_location=gs://b/job_object")
METADATA = json.loads((ROOT / "docker" / "metadata.json").read_text(encoding="utf-8"))
PARAMETERS = {parameter["name"]: parameter for parameter in METADATA["parameters"]}
BEAM = {"sdk_container_image", "disk_size_gb"}
"""Flags of Beam's that gcloud has no option for."""


# --- the metadata ------------------------------------------------------------------------------------------------------


def test_google_reads_the_metadata():
    dataflow = pytest.importorskip("google.cloud.dataflow_v1beta3", reason="the extra gcp installs it")
    assert len(PARAMETERS) == len(METADATA["parameters"])
    for parameter in METADATA["parameters"]:
        fields = {re.sub("[A-Z]", lambda letter: "_" + letter[0].lower(), name): value for name, value in parameter.items()}
        fields["param_type"] = dataflow.ParameterType[fields["param_type"]]
        read = dataflow.ParameterMetadata(**fields)
        assert (read.name, list(read.regexes)) == (parameter["name"], parameter["regexes"])


def test_metadata_lists_every_option_of_each_command():
    assert set(LEFT_OUT) <= {option.name for command in COMMANDS.values() for option in command.options.values()}
    assert set(PARAMETERS) == {"command", *BEAM}.union(*map(parameters_of, COMMANDS))
    for name, parameter in PARAMETERS.items():
        [pattern] = parameter["regexes"]
        assert re.fullmatch(r"\^.+\$", pattern)
        assert not re.match(pattern, "")
        having = [command for command in COMMANDS if name in parameters_of(command)]
        helps = dict.fromkeys(re.sub(r"\[/?i\]", "", parameters_of(command)[name].opt.help) for command in having)
        assert parameter["helpText"] == " ".join(helps) or not having
        if name not in {"command", *BEAM}:
            assert parameter.get("parentTriggerValues", list(COMMANDS)) == having, name
            assert parameter.get("parentName", "command") == "command"
    assert {name for name, parameter in PARAMETERS.items() if not parameter["isOptional"]} == {"command", "output"}


@pytest.mark.parametrize("command", COMMANDS)
def test_choices_and_patterns_of_the_metadata_fit_the_options(command):
    assert [option["value"] for option in PARAMETERS["command"]["enumOptions"]] == list(COMMANDS)
    for name, option in parameters_of(command).items():
        [hint, *_] = option.types
        choices = list(get_args(hint)) if get_origin(hint) is Literal else []
        listed = [each["value"] for each in PARAMETERS[name].get("enumOptions", ())]
        assert listed == choices, name
        if choices:
            assert PARAMETERS[name]["regexes"] == [f"^({'|'.join(choices)})$"]
        if hint is bool:
            assert PARAMETERS[name]["regexes"] == ["^(true|false)$"]
        if option.default not in (None, MISSING) and (text := option.text(option.default)):
            text = text.lower() if hint is bool else text
            assert re.match(PARAMETERS[name]["regexes"][0], text), (name, text)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("images", ("gs://b/photos", "s3://b/a b/**/*.jpg"), ("photos", "/photos", "gs://b", "gs:///x", " gs://b/x")),
        ("weights", ("gs://b/w.pth", "/opt/imagepivot/weights/w.pth", "default", "random:0"), ("w.pth", "random:", "")),
        ("shards", ("64", "auto", "like:gs://b/captions"), ("-1", "many", "like:")),
        ("skip", ("a", "a,b 2", "@gs://b/skip.txt"), ("", ",", "a,", "@skip.txt", "@/skip.txt")),
        ("max_failures", ("0", "10", "1%", "0.5%", "100%"), ("", "-1", "1.5", "1 %", "many", "1000%")),
        ("sdk_container_image", ("europe-docker.pkg.dev/p/images/worker:1", "a@sha256:00"), ("-x", "a b")),
    ],
)
def test_patterns(name, good, bad):
    (pattern,) = PARAMETERS[name]["regexes"]
    assert all(re.match(pattern, value) for value in good)
    assert not any(re.match(pattern, value) for value in bad)


# --- the command -------------------------------------------------------------------------------------------------------


def test_arguments_stand_in_their_order_and_parameters_go_before_the_dashes_and_googles_flags_behind_them():
    arguments = (
        *("--runner=DataflowRunner", "--output=gs://b/features", "--command=features", "--project=p", "--batch_size=8"),
        *("--images=gs://b/photos", "--compile=true", "--unpooled=false", "--disk_size_gb=100", "--job_name=x"),
    )
    assert command_line(arguments) == [
        *("features", "gs://b/photos", "gs://b/features", "--compile", "--batch-size=8"),
        *("--", "--runner=DataflowRunner", "--project=p", "--disk_size_gb=100", "--job_name=x"),
    ]
    places = ("--output=gs://b/encoded", "--vocabulary=gs://b/vocabulary", "--captions=gs://b/captions")
    assert command_line(("--command=encode", *places, *GOOGLES)) == [
        *("encode", "gs://b/captions", "gs://b/vocabulary", "gs://b/encoded", "--", *GOOGLES)
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), r"^the parameter 'command' is '', expected one of 'captions', 'vocabulary', 'encode', 'features'$"),
        (("--command=vocabulary", "--output=gs://b/v"), r"^the parameter 'captions' is missing, and vocabulary needs it$"),
        (
            ("--command=features", "--images=gs://b/i", "--output=gs://b/f", "--compile=1"),
            r"^the parameter 'compile' is '1', expected true or false$",
        ),
        (
            ("--command=vocabulary", "--captions=gs://b/c", "--output=gs://b/v", "--gpu=nvidia-l4"),
            r"^vocabulary has no parameter 'gpu': it has 'captions', 'output', 'min_count'",
        ),
        (
            ("--command=captions", "--source=gs://b/1", "--source=gs://b/2"),
            r"^the parameter 'source' is given twice, as 'gs://b/1' and as 'gs://b/2': keep one$",
        ),
    ],
)
def test_command_line_invalid_launch_is_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        command_line(arguments)


def test_launch_runs_the_command(monkeypatch):
    ran = []
    monkeypatch.setattr(flex_template, "run_command", lambda: ran.append(sys.argv))
    given = ("--command=captions", "--source=gs://b/x.tsv", "--output=gs://b/y", "--format=table")
    monkeypatch.setattr(sys, "argv", ["launch.py", *given, *GOOGLES])
    flex_template.main()
    assert ran == [["imagepivot", "captions", "gs://b/x.tsv", "gs://b/y", "--format=table", "--", *GOOGLES]]
