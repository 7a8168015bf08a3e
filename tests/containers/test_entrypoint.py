"""The entry point of the images, on this machine, with the words of every page and manifest that starts one."""

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.containers.images import ROOT
from tests.containers.platforms import check_command, stand_ins, start, started

yaml = pytest.importorskip("yaml", reason="the extra dev installs it")

TARGETS = re.findall(r"^FROM \S+ AS (\S+)", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
MANIFESTS = sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
IMAGE = re.compile(r"\b(?:registry\.example\.com|europe-docker\.pkg\.dev)/[\w./-]+:[\w.]+")
INDEX = dict.fromkeys(("JOB_COMPLETION_INDEX", "AWS_BATCH_JOB_ARRAY_INDEX", "BATCH_TASK_INDEX", "SLURM_ARRAY_TASK_ID"), "63")


@pytest.fixture
def programs(tmp_path):
    return stand_ins(tmp_path / "bin")


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from dictionaries(each)


def containers() -> Iterator[tuple[str, list[str]]]:
    """Yield where a container of ours is started, and with which words: none replaces the entry point.

    `docker run` on the pages is started by `tests.containers.test_command_blocks`.
    """
    for path in MANIFESTS:
        for each in dictionaries(list(yaml.safe_load_all(path.read_text()))):
            if "imagepivot/" in str(each.get("image", "")):
                assert "command" not in each, f"{path.name}: Kubernetes' command replaces the entry point"
                yield f"{path.name}-{each['name']}", each["args"]
    for path in PAGES:
        for number, (language, block) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8"))):
            name = f"{path.name}-{number}"
            for each in dictionaries(json.loads(block)) if language == "json" and "imageUri" in block else ():
                if "imageUri" in each:
                    assert "entrypoint" not in each
                    yield name, each["commands"]
            for each in dictionaries(json.loads(block)) if language == "json" and '"command": [' in block else ():
                if "command" in each:  # AWS Batch has no field for an entry point.
                    yield name, each["command"]


CONTAINERS = list(containers())


def test_every_platform_is_checked():
    places = {name.partition(".")[0] for name, _ in CONTAINERS}
    assert places == {"features", "flink", "flink-job", "nightly", "array-jobs"}
    assert len(CONTAINERS) == 4 + 3  # Manifests; AWS Batch twice and Google Batch.


@pytest.mark.parametrize(("place", "words"), CONTAINERS, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CONTAINERS)])
def test_words_of_a_platform_start_a_command_or_a_worker(place, words, programs):
    program, *arguments = started(words, programs, INDEX)
    if program == "boot":
        assert arguments == ["--worker_pool"]
    elif arguments != ["--help"]:
        check_command([program, *arguments])
        if any("/64" in word for word in words):
            assert arguments[-2:] == ["--task", "63/64"]


def test_words_of_a_runner_start_a_worker(programs):
    words = ["--id=1-1", "--logging_endpoint=localhost:1", "--control_endpoint=localhost:2"]
    assert started(words, programs) == ["boot", *words]


def test_other_words_are_a_command(programs, tmp_path):
    assert started([], programs) == ["imagepivot", "--help"]
    assert start(["sh", "-c", "exit 7"], programs).returncode == 7
    assert start(["bash", "-c", 'echo "$#" "$0"', "a b"], programs).stdout == "0 a b\n"
    missing = start(["captions"], programs)
    assert (missing.returncode, "captions" in missing.stderr) == (127, True)
    done = start(["--worker_pool"], stand_ins(tmp_path / "train", ["imagepivot"]))
    assert (done.returncode, done.stdout) == (2, "")
    assert "this image has no worker of Beam; give a command" in done.stderr


def test_images_of_the_pages_are_those_that_a_target_builds():
    found = {}
    for path in (*PAGES, *MANIFESTS):
        for image in IMAGE.findall(path.read_text(encoding="utf-8")):
            found.setdefault(image.rpartition("/")[2].partition(":")[0], set()).add(path.name)
    assert set(found) <= {*TARGETS}, found
    assert set(found) == {"worker", "worker-cpu", "launcher", "train"}
    versions = {image.rpartition(":")[2] for path in PAGES for image in IMAGE.findall(path.read_text(encoding="utf-8"))}
    assert versions == {"0.2.0"}


def test_entry_point_is_that_of_every_image_but_the_launcher():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE) == [
        '["/opt/imagepivot/entrypoint.sh"]',
        '["/opt/google/dataflow/python_template_launcher"]',
    ]
    assert "COPY docker/entrypoint.sh /opt/imagepivot/" in text
    assert "HEALTHCHECK" not in text
    assert os.access(ROOT / "docker" / "entrypoint.sh", os.X_OK)
