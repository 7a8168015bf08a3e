"""The lowest versions that `pyproject.toml` allows: the floor of each extra is installed, and the quick tests of its folders run.

Floors without torch are tested with the wheel; LOWEST=all takes all extras (`make lowest-test`).
"""

import os
import re
import subprocess

import pytest

from tests.packaging.environments import ROOT, UV, Environment

pytestmark = [pytest.mark.packaging, pytest.mark.slow]

# By extra: the folders and files of tests. Tests that need a package of another extra are skipped (`skip_missing`).
TESTS = {
    "": ["schemas"],
    "stores": ["schemas/storage"],
    "text": ["pipelines/text", "pipelines/inputs"],
    "extractors": ["extractors"],
    "pipelines": ["pipelines/inputs", "pipelines/features", "pipelines/running"],
    "gcp": ["pipelines/running"],
    "demo": ["extractors/whole_image"],
    "mteb": ["train/evaluation"],
    "train": ["train"],
    "figures": ["train/reports"],
    "timm": ["extractors/whole_image", "extractors/test_request.py"],
    "hdf5": ["schemas/test_vector_files.py"],
    "heif": ["extractors/images"],
    "fasttext": ["pipelines/text/test_word_vectors.py"],
    "bert": ["extractors/tokens", "pipelines/text/test_text_features.py"],
    "clip": ["extractors/tokens"],
    "duplicates": ["pipelines/datasets"],
    "all": ["pipelines/exchange", "pipelines/commands", "pipelines/looking"],
}
WITHOUT_TORCH = {"", "stores", "text"}
QUICK = "not slow and not cluster and not gpu and not engines and not containers and not packaging"


@pytest.mark.parametrize("extra", TESTS)
def test_quick_tests_pass_with_the_lowest_versions(extra, dist, tmp_path):
    if extra not in WITHOUT_TORCH and "LOWEST" not in os.environ:
        pytest.skip("installs torch of 4 GB: make lowest-test")
    floor = tmp_path / "floor.txt"
    words = ["--resolution", "lowest-direct", "--python-version", "3.11", *(["--extra", extra] if extra else [])]
    subprocess.run([UV, "pip", "compile", "--quiet", *words, ROOT / "pyproject.toml", "--output-file", floor], check=True)
    environment = Environment(tmp_path)
    environment.pip("install", "--requirement", floor)
    environment.pip("install", "--constraint", floor, "pytest", "pytest-timeout", "pyyaml")
    environment.pip("install", "--no-deps", dist.wheel)
    paths = [ROOT / "tests" / path for path in TESTS[extra]]
    command = [
        environment.python,
        "-m",
        "pytest",
        "-q",
        "-m",
        QUICK,
        "-p",
        "tests.packaging.skip_missing",
        "-p",
        "no:cacheprovider",
    ]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *paths], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", done.stdout.splitlines()[-1])}
    assert counts["passed"] > counts.get("skipped", 0), done.stdout
