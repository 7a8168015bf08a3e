"""Plans as their users run them: killed anywhere, interrupted, on the real Multi30K, and in the layouts of Flickr30k and COCO."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.builders import tree
from tests.integration.processes import ForkedSteps, group_of, wait_for
from tests.pipelines.plans.conftest import PLAN, write_table

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPT = Path(sys.executable).with_name("imagepivot")
KILLS = 6


@pytest.fixture
def forked_steps(monkeypatch) -> ForkedSteps:
    """Steps of builds in this process are forks."""
    steps = ForkedSteps()
    monkeypatch.setattr("schemas.process.steps.run_command", steps)
    return steps


def plan_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(PLAN, encoding="utf-8")
    write_table(folder / "captions.tsv")
    return folder


def processes_in(folder: Path) -> list[int]:
    """Processes whose working folder this is."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if link.readlink() == folder:
                found.append(int(link.parent.name))
        except OSError:
            continue
    return found


def test_killed_anywhere_it_goes_on_to_the_same_bytes(tmp_path):
    calm, rough = plan_in(tmp_path / "calm"), plan_in(tmp_path / "rough")
    build = [SCRIPT, "build", "plan.toml"]
    started = time.monotonic()
    subprocess.run(build, cwd=calm, check=True, capture_output=True)
    seconds = time.monotonic() - started
    moments = random.Random(0)
    for _ in range(KILLS):
        process = subprocess.Popen(
            build, cwd=rough, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            process.wait(moments.uniform(0.2, 0.6) * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        wait_for(lambda: not processes_in(rough))  # A step has a group of its own, and ends with its launcher.
    done = subprocess.run(build, cwd=rough, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert tree(rough) == tree(calm)
    before = {path: path.stat().st_mtime_ns for path in rough.rglob("*")}
    subprocess.run(build, cwd=rough, check=True, capture_output=True)
    assert {path: path.stat().st_mtime_ns for path in rough.rglob("*") if path.is_file()}.items() <= before.items()


def test_signal_stops_the_steps_in_order(tmp_path):
    folder = plan_in(tmp_path / "plan")
    process = subprocess.Popen(
        [SCRIPT, "build", "plan.toml"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: len(processes_in(folder)) > 1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; finished steps are kept, the same command continues from here" in stderr
    assert "Traceback" not in stderr
    assert not group_of(process.pid)
    assert not processes_in(folder)


def test_another_dataset_stops_the_build_and_overwrite_replaces_it(tmp_path, imagepivot, forked_steps):
    folder = plan_in(tmp_path / "plan")
    imagepivot("build", "plan.toml", cwd=folder)
    before = tree(folder)
    changed = ("build", "plan.toml", "--set", "steps.vocabulary.min-count=2")
    refused = imagepivot(*changed, cwd=folder, code=1).stderr
    assert "min_count" in refused
    assert "step vocabulary (imagepivot vocabulary) failed with exit code 1" in refused
    assert tree(folder) == before
    imagepivot(*changed, "--overwrite", "vocabulary", "--overwrite", "encoded", cwd=folder)
    assert open_dataset(folder / "build/plan/vocabulary").manifest.parameters["min_count"] == 2
    imagepivot(*changed, cwd=folder)


def karpathy(folder: Path, name: str, images: list[tuple[str, str, str]]) -> None:
    """Write Karpathy's file, and pictures where they belong: folder, file name and split of each image."""
    entries = []
    for number, (place, file, split) in enumerate(images):
        (folder / "photos" / place).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48), (number * 9 % 256, 80, 120)).save(folder / "photos" / place / file)
        raw = [f"A dog number {number} runs .", "A dog sleeps ."]
        entries.append(
            {
                "filename": file,
                "imgid": number,
                "split": split,
                "sentids": [2 * number, 2 * number + 1],
                "sentences": [
                    {"raw": text, "tokens": text.lower().split()[:-1], "imgid": number, "sentid": 2 * number + which}
                    for which, text in enumerate(raw)
                ],
                **({"filepath": place, "cocoid": number} if place else {}),
            }
        )
    (folder / name).write_text(json.dumps({"dataset": name.split("_")[1].split(".")[0], "images": entries}))


@pytest.mark.parametrize(
    ("plan", "name", "images"),
    [
        ("flickr30k", "dataset_flickr30k.json", [("", f"{n}.jpg", "train" if n < 6 else "test") for n in range(8)]),
        (
            "coco",
            "dataset_coco.json",
            [("train2014", f"COCO_train2014_{n:012}.jpg", "train") for n in range(6)]
            + [("val2014", f"COCO_val2014_{n:012}.jpg", "test") for n in range(6, 8)],
        ),
    ],
)
def test_plan_in_the_layout_of_its_data(tmp_path, imagepivot, forked_steps, plan, name, images):
    karpathy(tmp_path, name, images)
    words = ("build", plan, "encoded", "features", "--set", f"paths.captions_json={name}", "--set", "paths.photos=photos")
    cheap = ("--set", "steps.features.weights=random:0", "--set", "steps.features.device=cpu")
    imagepivot(*words, *cheap, cwd=tmp_path)
    folder = tmp_path / "build" / plan
    features, encoded = open_dataset(folder / "features"), open_dataset(folder / "encoded")
    assert set(features.image_ids()) == {Path(file).stem for _, file, _ in images} == set(encoded.image_ids())
    assert len(encoded) == 16
    assert validate(folder / "features") == validate(folder / "encoded") == []
    # A picture that changes concerns the features alone, and one row of them.
    [(place, file, _), *_] = images
    time.sleep(0.01)
    Image.new("RGB", (64, 48), (255, 0, 0)).save(tmp_path / "photos" / place / file)
    before = features.numpy()
    others = tree(folder / "encoded")
    imagepivot(*words, *cheap, cwd=tmp_path)
    assert tree(folder / "encoded") == others
    after = open_dataset(folder / "features").numpy()
    assert [bool((old != new).any()) for old, new in zip(before, after, strict=True)].count(True) == 1
