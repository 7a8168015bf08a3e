"""Commands for clusters and clouds, run as the pages have them, with stand-ins that refuse what the programs do not know."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.containers.images import ROOT

HOW_TO = ROOT / "docs" / "how-to"

PROGRAM = """#!{python}
# Takes the words of one of the known commands, in which * is one word and NAME=* an option; writes them to a log.
import fnmatch, json, os, pathlib, sys

words = sys.argv[1:]
known = {known!r}
if not any(len(each) == len(words) and all(map(fnmatch.fnmatchcase, words, each)) for each in known):
    sys.exit(f"unknown: {{words}}")
with open("log", "a") as log:
    log.write(json.dumps([{name!r}, *words]) + "\\n")
{more}
"""
WAIT = """
if words[0] == "wait":
    seen = pathlib.Path("log").read_text().count('"wait"')
    holds = words[1] == "--for=condition=" + os.environ["ENDS_AS"] and seen >= 4
    sys.exit(0 if holds or words[1].endswith("=available") else "error: timed out waiting for the condition")
if words[0] == "apply":
    assert pathlib.Path(words[2]).exists(), words[2]
"""
FILES = """
for word in words:
    if "file://" in word or word.startswith("--config="):
        json.loads(pathlib.Path(word.partition("file://")[2] or word.partition("=")[2]).read_text())
"""
KNOWN = {
    "kubectl": (
        [
            ["apply", "-f", "docker/kubernetes/*.yaml"],
            ["wait", "--for=condition=*", "--timeout=*", "job/*"],
            ["wait", "--for=condition=available", "--timeout=*", "deployment/beam-jobs"],
        ],
        WAIT,
    ),
    "aws": (
        [
            ["batch", "register-job-definition", "--cli-input-json", "file://definition.json"],
            [
                *("batch", "submit-job", "--job-name", "features", "--job-queue", "gpu", "--job-definition", "imagepivot"),
                *("--array-properties", "size=*", "--container-overrides", "file://features.json"),
            ],
        ],
        FILES,
    ),
    "gcloud": ([["batch", "jobs", "submit", "features-[0-9]*", "--location=*", "--config=features.json"]], FILES),
}


def blocks(page: str, section: str, language: str) -> list[str]:
    text = (HOW_TO / page).read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(block: str, folder: Path, **settings: str) -> tuple[int, list[list[str]]]:
    """Run a block with the stand-ins; return its exit code and the commands that they took."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, (known, more) in KNOWN.items():
        program = folder / "bin" / name
        program.write_text(PROGRAM.format(python=sys.executable, name=name, known=known, more=more))
        program.chmod(0o755)
    (folder / "log").write_text("")
    if not (folder / "docker").exists():
        (folder / "docker").symlink_to(ROOT / "docker")
    settings = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", **settings}
    done = subprocess.run(
        ["bash", "-c", block], cwd=folder, env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    assert "unknown:" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize("page", ["array-jobs.md", "containers.md"])
@pytest.mark.parametrize(("ends_as", "code"), [("complete", 0), ("failed", 1)])
def test_waiting_for_a_job_of_kubernetes_ends_as_it_does(page, ends_as, code, tmp_path):
    (block,) = blocks(page, "Kubernetes", "bash")
    got, commands = run(block, tmp_path, ENDS_AS=ends_as)
    assert got == code
    assert commands[-1][1:3] == ["wait", f"--for=condition={ends_as}"]
    for _, verb, _, *rest in commands:
        if verb == "wait" and rest[-1].startswith("job/"):
            manifest = (
                ROOT / "docker/kubernetes" / ("features.yaml" if "features" in rest[-1] else "flink-job.yaml")
            ).read_text()
            assert f"name: {rest[-1].removeprefix('job/')}\n" in manifest


@pytest.mark.parametrize(("section", "num_files"), [("AWS Batch", 2), ("Google Batch", 1)])
def test_jobs_of_batch_services_can_be_submitted_again(section, num_files, tmp_path):
    texts = blocks("array-jobs.md", section, "json")
    names = {"AWS Batch": ("definition.json", "features.json"), "Google Batch": ("features.json",)}[section]
    assert len(texts) == len(names) == num_files
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text)
    (block,) = blocks("array-jobs.md", section, "bash")
    for _ in range(2):
        code, commands = run(block, tmp_path)
        assert (code, len(commands)) == (0, num_files)


def test_fields_of_aws_batch_are_those_of_its_service():
    """botocore holds AWS' description of the service, with the types and the required fields."""
    validate = pytest.importorskip("botocore.validate", reason="the extra dev installs it")
    service = pytest.importorskip("botocore.session").get_session().get_service_model("batch")
    definition, overrides = map(json.loads, blocks("array-jobs.md", "AWS Batch", "json"))
    submission = {"jobName": "features", "jobQueue": "gpu", "jobDefinition": "imagepivot", "arrayProperties": {"size": 64}}
    given = {"RegisterJobDefinition": definition, "SubmitJob": {**submission, "containerOverrides": overrides}}
    for operation, fields in given.items():
        report = validate.ParamValidator().validate(fields, service.operation_model(operation).input_shape)
        assert not report.has_errors(), report.generate_report()
    wrong = {**definition, "containerProperties": {**definition["containerProperties"], "entryPoint": ["bash"]}}
    report = validate.ParamValidator().validate(wrong, service.operation_model("RegisterJobDefinition").input_shape)
    assert "entryPoint" in report.generate_report()
    actions = {each["onExitCode"]: each["action"] for each in definition["retryStrategy"]["evaluateOnExit"]}
    assert actions == {"2": "EXIT", "3": "EXIT"}


def fields_of(value: object) -> set[str]:
    """Return all names of fields in a JSON value."""
    if isinstance(value, list):
        return set().union(*map(fields_of, value))
    return set(value).union(*map(fields_of, value.values())) if isinstance(value, dict) else set()


def test_fields_of_google_batch_are_those_of_its_service():
    """google-cloud-batch 0.22.4 takes this job as a message ``Job``, which refuses other fields."""
    (job,) = map(json.loads, blocks("array-jobs.md", "Google Batch", "json"))
    (group,) = job["taskGroups"]
    assert int(group["taskCount"]) == 64
    assert fields_of(group) == {
        *("taskCount", "parallelism", "taskSpec", "runnables", "container", "imageUri", "commands", "computeResource"),
        *("cpuMilli", "memoryMib", "maxRunDuration", "maxRetryCount", "lifecyclePolicies", "action", "actionCondition"),
        "exitCodes",
    }
    assert fields_of({name: each for name, each in job.items() if name != "taskGroups"}) == {
        *("allocationPolicy", "instances", "installGpuDrivers", "policy", "machineType", "provisioningModel"),
        *("logsPolicy", "destination"),
    }
