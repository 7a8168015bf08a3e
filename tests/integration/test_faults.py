import random
import signal
import time
from pathlib import Path

import pytest

from pipelines.demo.scenes import draw, make_scenes
from schemas.writing.records import record_name
from schemas.writing.validation import validate
from tests.builders import tree
from tests.integration.processes import start

pytestmark = pytest.mark.cluster

pytest.importorskip("timm", reason="a small model of timm's makes many runs possible")

SMALL = ("--extractor", "timm:test_resnet.r160_in1k", "--weights", "random:0", "--device", "cpu")
KILLS = 6


def shards_in(folder: Path) -> dict[str, int]:
    """Return the time of writing of each finished shard, by name: its record comes after it, and a kill may come between."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*") if (folder / record_name(path.name)).exists()}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes")
    for name, scene in make_scenes(120):
        draw(scene).resize((160, 120)).save(folder / f"{name}.jpg", quality=90)
    return folder


def test_repeatedly_killed_run_ends_with_the_same_bytes(scenes: Path, imagepivot, tmp_path: Path) -> None:
    """120 images in 40 shards; the whole process group gets SIGKILL at random moments of its work."""
    options = ("--shards", "40", "--batch-size", "1", *SMALL)
    imagepivot("features", scenes, tmp_path / "undisturbed", *options)
    expected = tree(tmp_path / "undisturbed")
    generator = random.Random(2018)
    kills, dataset, output = 0, 0, tmp_path / "killed-0"
    while kills < KILLS:
        before = shards_in(output)
        with start("features", scenes, output, *options, folder=tmp_path / "process") as run:
            # Either during start-up, or up to 0.2 seconds after the next finished shard.
            deadline = time.monotonic() + (generator.uniform(0, 1) if generator.random() < 0.3 else 120)
            while time.monotonic() < deadline and run.runs:
                if len(shards_in(output)) > len(before):
                    deadline = min(deadline, time.monotonic() + generator.uniform(0, 0.2))
                time.sleep(0.005)
            if run.runs:
                run.send(signal.SIGKILL)
                kills += 1
            run.wait()
        after = shards_in(output)
        assert {name: stamp for name, stamp in after.items() if name in before} == before, "a finished shard was made again"
        if (output / "_manifest.json").exists():
            assert tree(output) == expected
            dataset += 1
            output = tmp_path / f"killed-{dataset}"
    imagepivot("features", scenes, output, *options)
    assert tree(output) == expected
    assert validate(output) == []
