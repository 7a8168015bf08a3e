"""Plans as their users run them: killed anywhere, interrupted, on the real Multi30K, and in the layouts of Flickr30k and COCO."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from pipelines.plans import building
from schemas.dataset import open_dataset
from schemas.validation import validate
from tests.integration.processes import group_of, wait_for
from tests.pipelines.plans.conftest import PLAN, ForkedStep, write_table
from tests.pipelines.plans.test_building import content

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(1200)]

SCRIPT = Path(sys.executable).with_name("imagepivot")
KILLS = 6


@pytest.fixture
def forked_steps(monkeypatch):
    """Steps of builds in this process are forks."""
    monkeypatch.setattr(building, "StepProcess", ForkedStep)
    ForkedStep.started = []
    return ForkedStep


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
            os.kill(process.pid, signal.SIGKILL)  # The build alone: its steps have to notice.
        process.wait()
    done = subprocess.run(build, cwd=rough, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert content(rough) == content(calm)
    wait_for(lambda: not processes_in(rough))
    again = subprocess.run(build, cwd=rough, check=True, capture_output=True, text=True)
    assert "all 3 steps are up to date" in again.stdout


def test_a_signal_stops_the_steps_in_order(tmp_path):
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


def test_what_is_up_to_date_is_found_without_torch_and_beam(tmp_path, imagepivot, forked_steps):
    folder = plan_in(tmp_path / "plan")
    imagepivot("build", "plan.toml", cwd=folder)
    script = (
        "import sys\nfrom pipelines.commands.build import build_plan\nfrom pipelines.plans.job import BuildJob\n"
        "build = build_plan(BuildJob('plan.toml'))\n"
        "print([end.done for end in build.steps], [name for name in ('torch', 'apache_beam') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "['up to date', 'up to date', 'up to date'] []\n"


def test_events_name_their_step(tmp_path, imagepivot, forked_steps):
    folder = plan_in(tmp_path / "plan")
    done = imagepivot("build", "plan.toml", "captions", "--log-json", cwd=folder)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    steps = [(line["step"], line["status"]) for line in lines if line["event"] == "step"]
    assert steps == [("captions", "started"), ("captions", "made")]
    assert lines[-1]["event"] == "end"
    assert lines[-1]["counts"] == {"steps": 1, "made": 1}


def test_the_captions_of_multi30k(tmp_path, multi30k, imagepivot, forked_steps):
    words = ("build", "multi30k", "encoded", "--set", f"paths.multi30k={multi30k}", "--output", tmp_path / "plan")
    dry = imagepivot(*words, "--dry-run", cwd=tmp_path)
    assert not (tmp_path / "plan").exists()
    imagepivot(*words, cwd=tmp_path)
    imagepivot("captions", multi30k, "captions", "--format", "multi30k", "--languages", "en,de", cwd=tmp_path)
    imagepivot("vocabulary", "captions", "vocabulary", "--min-count", 4, cwd=tmp_path)
    imagepivot("encode", "captions", "vocabulary", "encoded", "--max-length", 100, cwd=tmp_path)
    for name in ("captions", "vocabulary", "encoded"):
        assert content(tmp_path / "plan" / name) == content(tmp_path / name)
    captions = open_dataset(tmp_path / "captions").manifest
    assert f"{captions.rows + captions.failed:,}" in dry.stdout


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
def test_a_plan_in_the_layout_of_its_data(tmp_path, imagepivot, forked_steps, plan, name, images):
    karpathy(tmp_path, name, images)
    words = ("build", plan, "encoded", "features", "--set", f"paths.captions_json={name}", "--set", "paths.photos=photos")
    cheap = ("--set", "steps.features.weights=random:0", "--set", "steps.features.device=cpu")
    dry = imagepivot(*words, *cheap, "--dry-run", cwd=tmp_path)
    assert f"{8 * 2048 * 4 / 1024:.1f} KiB" in dry.stdout
    imagepivot(*words, *cheap, cwd=tmp_path)
    folder = tmp_path / "build" / plan
    features, encoded = open_dataset(folder / "features"), open_dataset(folder / "encoded")
    assert set(features.image_ids()) == {Path(file).stem for _, file, _ in images} == set(encoded.image_ids())
    assert len(encoded) == 16
    assert validate(folder / "features") == validate(folder / "encoded") == []
    assert json.loads((folder / f"{plan}.lock").read_text())["steps"].keys() == {
        "captions",
        "vocabulary",
        "encoded",
        "features",
    }
    # A picture that changes concerns the features alone, and one row of them.
    [(place, file, _), *_] = images
    time.sleep(0.01)
    Image.new("RGB", (64, 48), (255, 0, 0)).save(tmp_path / "photos" / place / file)
    before = features.numpy()
    ForkedStep.started = []
    imagepivot(*words, *cheap, cwd=tmp_path)
    assert [started[0] for started in ForkedStep.started] == ["features"]
    after = open_dataset(folder / "features").numpy()
    assert [bool((old != new).any()) for old, new in zip(before, after, strict=True)].count(True) == 1


def test_the_plan_of_the_demo_is_the_demo(demo, tmp_path, imagepivot):
    shutil.copytree(demo.folder / "build", tmp_path / "build")
    done = imagepivot("build", "demo", "--set", f"steps.scenes.count={demo.scenes}", cwd=tmp_path)
    assert "all 8 steps are up to date" in done.stdout
