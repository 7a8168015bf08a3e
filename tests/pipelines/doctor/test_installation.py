import sys

import pytest

from pipelines.doctor import installation
from pipelines.doctor.installation import Requirement, check_extras, check_installation, check_packages, requirements

LINES = (
    "numpy>=1.26",
    'torch>=2.6; extra == "extractors"',
    'pillow>=11; extra == "extractors"',
    "imagepivot[extractors]; extra == 'pipelines'",
    'apache-beam<3,>=2.77; extra == "pipelines"',
    'imagepivot[pipelines]; extra == "all"',
    'gensim<5,>=4.4; python_version < "3.14" and extra == "dev"',
    'pytest>=8; extra == "dev"',
)


def test_requirements_are_read_as_metadata_have_them():
    found = requirements(LINES)
    assert (Requirement("gensim", "<5,>=4.4", (), "dev") in found) == (sys.version_info < (3, 14))
    assert [one for one in found if one.name != "gensim"] == [
        Requirement("numpy", ">=1.26"),
        Requirement("torch", ">=2.6", (), "extractors"),
        Requirement("pillow", ">=11", (), "extractors"),
        Requirement("imagepivot", "", ("extractors",), "pipelines"),
        Requirement("apache-beam", "<3,>=2.77", (), "pipelines"),
        Requirement("imagepivot", "", ("pipelines",), "all"),
        Requirement("pytest", ">=8", (), "dev"),
    ]


def test_the_requirements_of_this_installation():
    found = {(one.extra, one.name) for one in requirements()}
    assert {("", "numpy"), ("extractors", "torch"), ("timm", "timm"), ("pipelines", "apache-beam")} <= found


def test_versions_that_will_not_do_are_notes():
    installed = {"numpy": "2.0.1", "torch": "2.5", "apache-beam": "3.0.0", "pytest": "1"}
    *notes, summary = check_packages(requirements(LINES), installed)
    assert [(note.status, note.found, note.advice) for note in notes] == [
        ("note", "apache-beam 3.0.0 is installed, expected <3,>=2.77", "pip install --upgrade 'imagepivot[pipelines]'"),
        ("note", "torch 2.5 is installed, expected >=2.6", "pip install --upgrade 'imagepivot[extractors]'"),
    ]
    assert (summary.status, summary.found) == ("ok", "numpy 2.0.1, torch 2.5, apache-beam 3.0.0")
    assert summary.values == {"apache-beam": "3.0.0", "numpy": "2.0.1", "torch": "2.5"}


def test_extras_by_way_of_others():
    installed = {"numpy": "2.0", "apache-beam": "2.77"}
    (found,) = check_extras(requirements(LINES), {}, installed)
    assert (found.status, found.found) == ("ok", "installed: none; not installed: extractors, pipelines")
    assert found.values == {"extractors": ["pillow", "torch"], "pipelines": ["pillow", "torch"]}
    (found,) = check_extras(requirements(LINES), {"pipelines": "reading"}, {**installed, "torch": "3", "pillow": "11"})
    assert (found.status, found.found) == ("ok", "installed: extractors, pipelines")


def test_an_extra_that_something_needs_is_a_problem():
    problem, rest = check_extras(requirements(LINES), {"extractors": "extractor 'x'"}, {"torch": "2.6"})
    assert (problem.status, problem.found) == (
        "problem",
        "extractor 'x' needs the extra extractors, of which pillow is missing",
    )
    assert problem.advice == "pip install 'imagepivot[extractors]'"
    assert rest.status == "ok"


def test_what_an_extra_of_beams_brings_is_looked_for(monkeypatch):
    versions = {"apache-beam": "2.77", "google-cloud-dataflow-client": None}
    monkeypatch.setattr(installation, "_version", lambda name: versions.get(name, "1"))
    problem, _ = check_extras(requirements(['apache-beam[gcp]; extra == "gcp"']), {"gcp": "the runner"})
    assert problem.found == "the runner needs the extra gcp, of which google-cloud-dataflow-client is missing"


def test_variables_have_names_and_no_values(monkeypatch):
    monkeypatch.setenv("IMAGEPIVOT_FEATURES_WEIGHTS", "s3://key:hidden@bucket/w.pth")
    monkeypatch.setenv("https_proxy", "http://anna:hidden@proxy")
    monkeypatch.setenv("SOMETHING_ELSE", "hidden")
    first, second = check_installation()
    assert first.found.startswith(f"{first.values['version']} in ")
    assert {"IMAGEPIVOT_FEATURES_WEIGHTS", "https_proxy"} <= set(second.values["variables"])
    assert "SOMETHING_ELSE" not in second.found
    assert "hidden" not in f"{first.to_json()}{second.to_json()}"


@pytest.mark.parametrize("name", ["version", "distribution"])
def test_files_without_metadata(monkeypatch, name):
    def missing(_):
        raise installation.PackageNotFoundError

    monkeypatch.setattr(installation, name, missing)
    if name == "version":
        assert next(check_installation()).status == "problem"
    else:
        assert list(check_extras(requirements(), {"timm": "it"})) == []
