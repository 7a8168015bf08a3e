"""Commands for clusters and clouds, run as the pages have them, with stand-ins that refuse what the programs do not know."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from pipelines.commands.flex_template import command_line
from pipelines.running.execution import Execution
from schemas.console import events
from tests.containers import flex_service, platforms
from tests.containers.images import ROOT

HOW_TO = ROOT / "docs" / "how-to"
PAGES = ("array-jobs.md", "clusters.md", "containers.md", "dataflow.md", "nightly.md")
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page in PAGES
    for number, (_, block) in enumerate(
        re.findall(r"^( *)```(?:bash|sh)\n(.*?)^ *```$", (HOW_TO / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )
]

PROGRAM = """#!{python} -IS
# Takes the words of one of the known commands, in which * is one word and NAME=* an option, or any; writes them to a log.
import fnmatch, json, os, pathlib, sys

words = sys.argv[1:]
known = {known!r}
if known is not None and not any(len(each) == len(words) and all(map(fnmatch.fnmatchcase, words, each)) for each in known):
    sys.exit(f"unknown: {{words}}")
with open(os.environ["LOG"], "a") as log:
    log.write(json.dumps([{name!r}, *words]) + "\\n")
{more}
"""
WAIT = """
if words[0] == "wait":
    seen = pathlib.Path(os.environ["LOG"]).read_text().count('"wait"')
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
# A container starts the image's entry point; `exec` of Apptainer starts the words themselves.
CONTAINER = """
if words[0] == "run":
    image = next(number for number, word in enumerate(words) if "/imagepivot/" in word)
    os.execv("docker/entrypoint.sh", ["docker/entrypoint.sh", *words[image + 1 :]])
if words[0] == "exec":
    os.execvp(words[3], words[3:])
if words[:3] == ["buildx", "imagetools", "inspect"]:
    print("sha256:" + "0" * 64)
"""
ACCOUNT = "serviceAccount:imagepivot@my-project.iam.gserviceaccount.com"
JOBS = "--job-port=8099 --artifacts-dir=/*"  # Of a job server of Beam.
LINES = rf"""
kubectl apply -f docker/kubernetes/*.yaml
kubectl wait --for=condition=* --timeout=* job/*
kubectl wait --for=condition=available --timeout=* deployment/beam-jobs
aws batch register-job-definition --cli-input-json file://definition.json
aws batch submit-job --job-name features --job-queue gpu --job-definition imagepivot \
    --array-properties size=* --container-overrides file://features.json
aws s3 sync --only-show-errors --exclude * --exclude * * *
aws s3 cp --only-show-errors * *
gcloud batch jobs submit features-[0-9]* --location=* --config=features.json
gcloud storage rsync --recursive --exclude=* gs://* gs://*
gcloud storage cp gs://* gs://*
gcloud dataflow flex-template build gs://*.json --image=*/launcher:* --sdk-language=PYTHON --metadata-file=docker/metadata.json
gcloud dataflow flex-template run captions-[0-9]* --region=* --template-file-gcs-location=gs://*.json --parameters=*
gcloud dataflow jobs describe * --region=* --format=value(currentState)
gcloud iam service-accounts create imagepivot --project=*
gcloud projects add-iam-policy-binding my-project --member={ACCOUNT} --role=roles/dataflow.worker
gcloud projects add-iam-policy-binding my-project --member={ACCOUNT} --role=roles/artifactregistry.reader
gcloud storage buckets add-iam-policy-binding gs://* --member={ACCOUNT} --role=roles/storage.objectAdmin
gcloud compute networks subnets update dataflow --project=* --region=* --enable-private-ip-google-access
gcloud dataflow flex-template run features-[0-9]* --project=* --region=* --template-file-gcs-location=gs://*.json \
    --service-account-email=* --subnetwork=regions/*/subnetworks/* --disable-public-ips --num-workers=8 --max-workers=8 \
    --additional-user-labels=*=* --parameters=*
mvn dependency:copy -Dartifact=org.apache.beam:beam-runners-flink-1.20-job-server:{beam.__version__} -DoutputDirectory=.
mvn dependency:copy -Dartifact=org.apache.beam:beam-runners-spark-3-job-server:{beam.__version__} -DoutputDirectory=.
java -jar beam-runners-flink-1.20-job-server-{beam.__version__}.jar --flink-master=* --flink-conf-dir=* {JOBS}
java -jar beam-runners-spark-3-job-server-{beam.__version__}.jar --spark-master-url=spark://* {JOBS}
go install github.com/apache/beam/sdks/v2/go/cmd/prism@v{beam.__version__}
prism --job_port=*
sbatch --parsable features.sbatch
sbatch --dependency=afterany:* complete.sbatch
sbatch --array=* features.sbatch
docker run --rm --volume *:/data */worker-cpu:* * * * * * *
docker run --rm --gpus all --volume *:/data */train:* * * * * * * * * * *
docker run --rm --network host --user [0-9]* --volume /*:/* */worker-cpu:* --worker_pool
docker buildx build --load --build-arg *=* --file docker/Dockerfile --target * --tag * .
docker buildx imagetools inspect --format * *:*
apptainer pull worker.sif docker://*/worker:*
apptainer exec --nv worker.sif * * * * * * * * * *
python -m apache_beam.runners.worker.worker_pool_main --service_port=*
python -m tests.cluster.engines flink *
make container-test
"""
KNOWN: dict[str, list[list[str]] | None] = {"boot": None, "imagepivot": None}  # `platforms.check_command` parses its words.
for program, *pattern in map(str.split, LINES.replace("\\\n", "").strip().splitlines()):
    KNOWN.setdefault(program, []).append(pattern)
MORE = {"kubectl": WAIT, "aws": FILES, "gcloud": FILES, "sbatch": "print(7)", "docker": CONTAINER, "apptainer": CONTAINER}
# Arguments of the resource in the providers google and google-beta, version 7.
TERRAFORM = {
    *("provider", "name", "project", "region", "container_spec_gcs_path", "parameters", "labels", "on_delete"),
    *("service_account_email", "network", "subnetwork", "ip_configuration", "num_workers", "max_workers", "machine_type"),
    *("launcher_machine_type", "temp_location", "staging_location", "sdk_container_image", "skip_wait_on_job_termination"),
    *("additional_experiments", "additional_pipeline_options", "autoscaling_algorithm", "enable_streaming_engine"),
    *("kms_key_name", "transform_name_mapping"),
}


def blocks(page: str, section: str, language: str) -> list[str]:
    text = (HOW_TO / page).read_text(encoding="utf-8").partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(block: str, folder: Path, **settings: str) -> tuple[int, list[list[str]]]:
    """Run a block with the stand-ins; return its exit code and the commands that they took."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, known in KNOWN.items():
        program = folder / "bin" / name
        program.write_text(PROGRAM.format(python=sys.executable, name=name, known=known, more=MORE.get(name, "")))
        program.chmod(0o755)
    (folder / "log").write_text("")
    if not (folder / "docker").exists():
        (folder / "docker").symlink_to(ROOT / "docker")
    settings = {
        **os.environ,
        "LOG": str(folder / "log"),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **settings,
    }
    done = subprocess.run(
        ["bash", "-e", "-c", block], cwd=folder, env=settings, capture_output=True, text=True, timeout=60, check=False
    )
    assert "unknown:" not in done.stderr, done.stderr
    return done.returncode, [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_runs_to_its_end(block, tmp_path):
    """Words of `imagepivot`, also those that an image's entry point starts, are then parsed by the program."""
    shutil.copytree(ROOT / "docker", tmp_path / "docker")  # `pin.sh` writes into it.
    for section, names in {"AWS Batch": ("definition.json", "features.json"), "Google Batch": ("features.json",)}.items():
        for name, text in zip(names, blocks("array-jobs.md", section, "json"), strict=True):
            (tmp_path / name).write_text(text)
    given = {"ENDS_AS": "complete", "SLURM_ARRAY_TASK_ID": "63", "features": "s3://bucket/features", "night": "2026-11-23"}
    code, commands = run(block, tmp_path, **given)
    assert code == 0
    assert commands
    written = Counter(re.findall(r"^ *(?:exec )?([\w-]+) ", block, re.MULTILINE))
    taken = Counter(program for program, *_ in commands)
    assert {program: taken[program] for program in written if taken[program] < written[program] and program in KNOWN} == {}
    for program, *words in commands:
        if program == "gcloud" and words[:3] == ["dataflow", "flex-template", "run"]:
            check_launch(dict(pair.split("=", 1) for pair in words[-1].removeprefix("--parameters=").split(",")))
        elif program == "boot":
            assert words == ["--worker_pool"]
        elif program == "imagepivot":
            platforms.check_command([program, *words])


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


# --- Dataflow ----------------------------------------------------------------------------------------------------------


def check_launch(parameters: dict[str, str]) -> None:
    """Check a launch as the service does, and its command line as the program does."""
    flex_service.check(json.loads((ROOT / "docker" / "metadata.json").read_text())["parameters"], parameters)
    words = command_line([f"--{name}={value}" for name, value in parameters.items()])
    platforms.check_command(["imagepivot", *words])


def test_launches_of_the_flex_template_give_one_command(tmp_path):
    (block,) = blocks("dataflow.md", "Flex Template", "bash")
    _, ((*_, last),) = run(block, tmp_path)
    parameters = dict(pair.split("=", 1) for pair in last.removeprefix("--parameters=").split(","))
    (resource,) = blocks("dataflow.md", "Flex Template", "terraform")
    arguments = read_terraform(resource, "google_dataflow_flex_template_job")
    assert set(arguments) <= TERRAFORM
    assert arguments["parameters"] == parameters
    for name, flag in {
        "region": "region",
        "subnetwork": "subnetwork",
        "service_account_email": "service-account-email",
    }.items():
        assert f"--{flag}={arguments[name]} " in block
    with pytest.raises(ValueError, match="Unrecognized parameter: gpus"):
        check_launch({**parameters, "gpus": "1"})


def read_terraform(text: str, kind: str) -> dict[str, object]:
    """Read one resource of texts, numbers and maps of texts; an `AssertionError` names any other line."""
    first, *lines, last = text.splitlines()
    assert re.fullmatch(rf'resource "{kind}" "[a-z_]+" {{', first)
    assert last == "}"
    arguments: dict[str, object] = {}
    inner: dict[str, object] | None = None
    for line in lines:
        target = arguments if inner is None else inner
        if line == "  }" and inner is not None:
            inner = None
        elif (opened := re.fullmatch(r"  (\w+) = {", line)) is not None and inner is None:
            inner = arguments[opened[1]] = {}
        else:
            value = re.fullmatch(r' +(\w+) += (?:"([^"$\\]*)"|([0-9]+)|(google-beta))', line)
            assert value is not None, line
            assert value[1] not in target, f"{value[1]} is given twice"
            target[value[1]] = next(group for group in value.groups()[1:] if group is not None)
    assert inner is None
    return arguments


def test_flags_for_beam_on_the_page_are_those_of_beam(monkeypatch):
    """Unknown flags are an error or a remark; flags with a value of another form are an error."""
    remarks: list[str] = []
    monkeypatch.setattr(events, "remark", lambda message, style="": remarks.append(message))
    lines = re.findall(r"^imagepivot .* -- (.+)$", (HOW_TO / "dataflow.md").read_text(), re.MULTILINE)
    assert len(lines) == 3
    for line in lines:
        options = Execution(beam_flags=tuple(shlex.split(line))).to_options()
        assert options.get_all_options()["runner"] == "DataflowRunner"
    assert remarks == []
    Execution(beam_flags=("--runner=DataflowRunner", "--bogus_flag=1")).flags  # noqa: B018 -- read once, as by a run
    assert len(remarks) == 1
    given = PipelineOptions(shlex.split(lines[1])).get_all_options()
    assert (given["num_workers"], given["max_num_workers"], given["use_public_ips"]) == (8, 8, False)
    assert (given["labels"], given["element_processing_timeout_minutes"]) == (["team=vision"], 120)


def test_every_statement_about_dataflow_says_how_it_is_known():
    text = (HOW_TO / "dataflow.md").read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^\|.*\n\| ---.*$", "", text, flags=re.MULTILINE)  # Headings of tables.
    unmarked = []
    for part in re.split(r"\n\n|\n(?=- |\|)", text.partition("\n\n")[2]):
        if part.strip() and not part.startswith("#") and not re.search(r"\([TGU]\)( \||:)?$", part.strip()):
            unmarked.append(part)
    assert unmarked == ["Nothing on this page was run on Google's cloud. A mark ends each statement, row and paragraph:"]
