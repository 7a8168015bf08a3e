import json
import subprocess
import sys

import pytest

from pipelines import doctor
from pipelines.doctor import Check

FINE = Check("cpu", "ok", "2 threads [red]")
WARNING = Check("device", "warning", "torch is not installed", "pip install")
FAILED = Check("output", "failed", "there is no bucket", "create it")


@pytest.fixture
def check(monkeypatch, call):
    """Runs the command; gives exit code, standard output, standard error and the arguments of the checks."""

    def run(*words: str, checks=(FINE,)):
        arguments = []

        def run_checks(*given):
            arguments.extend(given)
            return list(checks)

        monkeypatch.setattr(doctor, "run_checks", run_checks)
        return *call("doctor", *words), arguments

    return run


def test_warning_is_exit_code_0(check):
    code, out, err, arguments = check(checks=(FINE, WARNING))
    assert (code, err) == (0, "")
    assert out == (
        "ok       cpu         2 threads [red]\nwarning  device      torch is not installed\n         -> pip install\n"
    )
    assert arguments == [None, None, "auto"]


def test_failed_check_is_exit_code_1(check):
    code, out, err, _ = check(checks=(FAILED, FINE))
    assert (code, err) == (1, "")
    assert out.startswith("FAILED   output      there is no bucket\n         -> create it\n")
    code, out, err, _ = check("--json", checks=(FAILED,))
    expected = {"name": "output", "status": "failed", "result": "there is no bucket", "advice": "create it"}
    assert (code, json.loads(out), err) == (1, {"ok": False, "checks": [expected]}, "")


WITHOUT_EXTRAS = """
import sys

import imagepivot

for name in ("torch", "torchvision", "PIL", "apache_beam", "packaging", "botocore", "google", "ijson", "requests"):
    sys.modules[name] = None
sys.argv = ["imagepivot", "doctor"]
imagepivot.main()
"""


@pytest.mark.slow
def test_bare_package_is_enough(tmp_path):
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch is not installed" in done.stdout
    assert done.stderr == ""
