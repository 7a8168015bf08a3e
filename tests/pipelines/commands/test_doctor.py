import json
import subprocess
import sys

import pytest

from pipelines.commands import app as cli
from pipelines.doctor import diagnosis
from pipelines.doctor.findings import Finding

FINE = Finding("machine", "cores", "ok", "2 cores [red]", values={"usable": 2})
PROBLEM = Finding("storage", "bucket", "problem", "there is none", "make one")


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command; gives exit code, standard output, standard error and the job that it made."""

    def run(*arguments: str, finds=(FINE,)):
        jobs = []

        def examine(job):
            jobs.append(job)
            return iter(finds)

        monkeypatch.setattr(diagnosis, "examine", examine)
        monkeypatch.setattr(sys, "argv", ["imagepivot", "doctor", *arguments])
        for console in (cli.console, cli.notes):
            monkeypatch.setattr(console, "_width", 200)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err, *jobs

    return run


def test_what_works_ends_well(call):
    code, out, err, job = call()
    assert (code, err) == (0, "")
    assert out == "machine\n  ok       cores         2 cores [red]\nnothing to do\n"
    assert job == diagnosis.DoctorJob()


def test_what_cannot_work_is_exit_code_1(call):
    code, out, err, _ = call(finds=(FINE, PROBLEM))
    assert (code, err) == (1, "")
    assert out.endswith("storage\n  PROBLEM  bucket        there is none\n           -> make one\n1 problem\n")


def test_json(call):
    code, out, err, _ = call("--json", finds=(FINE, PROBLEM))
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["works"] is False
    assert found["findings"] == [FINE.to_json(), PROBLEM.to_json()]


def test_options_become_a_job(call):
    words = ("a", "gs://b/c", "--extractor", "vgg19-10crop", "--weights", "random:1", "--device", "cuda", "--measure")
    *_, job = call(*words, "--images", "photos.csv", "--columns", "image_id=file", "--ids", "path")
    assert job.locations == ("a", "gs://b/c")
    assert (job.extractor.name, job.extractor.weights, job.extractor.precision) == ("vgg19-10crop", "random:1", "fp32")
    assert (job.device, job.measure, job.images, job.columns, job.ids) == (
        "cuda",
        True,
        "photos.csv",
        {"image_id": "file"},
        "path",
    )
    assert job.execution is None


def test_a_runner_stands_behind_two_dashes(call):
    *_, job = call("gs://b/c", "--gpu", "nvidia-l4", "--start-timeout", "7", "--", "--runner=DataflowRunner", "--project=p")
    assert job.locations == ("gs://b/c",)
    assert job.execution.beam_flags == ("--runner=DataflowRunner", "--project=p")
    assert (job.execution.accelerator.type, job.execution.start_timeout) == ("nvidia-l4", 7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weights", "w.pth"), "--weights is that of an extractor: give --extractor, too"),
        (("--precision", "bf16"), "--precision is that of an extractor: give --extractor, too"),
        (("--shared-disk",), "--shared-disk is for a runner: give --runner behind --, too"),
        (("--start-timeout", "3"), "--start-timeout is for a runner: give --runner behind --, too"),
        (("a", "--", "--project=p"), "flags for Beam choose a runner, and these name none: give --runner behind --, too"),
        (("--", "--runner=PortableRunner"), "LOCATION is missing: the workers of PortableRunner"),
        (("--gpus-per-worker", "2"), "--gpus-per-worker is 2"),
        ((" ",), "LOCATION is ' ', expected a value"),
    ],
)
def test_what_makes_no_sense_is_exit_code_2(call, words, message):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert message in err


WITHOUT_EXTRAS = """
import sys

import imagepivot

for name in ("torch", "torchvision", "PIL", "apache_beam", "packaging", "botocore", "google", "obstore", "ijson", "requests"):
    sys.modules[name] = None
sys.argv = ["imagepivot", "doctor"]
imagepivot.main()
"""


@pytest.mark.slow
def test_the_bare_package_is_enough(tmp_path):
    """As a health check in an image that reads datasets only."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch is not installed" in done.stdout
    assert done.stderr == ""


WITHOUT_BEAM = """
import sys

import imagepivot

sys.argv = ["imagepivot", "doctor", "--json"]
try:
    imagepivot.main()
finally:
    print(sorted({"apache_beam", "torchvision"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_a_health_check_loads_no_more_than_torch(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_BEAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n"), done.stdout + done.stderr
    assert json.loads(done.stdout)["works"] is True
