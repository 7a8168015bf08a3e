"""Fixtures: folders of real data, and the output of the demo."""

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from schemas.console import events
from schemas.user_code import set_user_code

# Before anything imports torch, and for all processes that tests start. Several test processes share the cores: threads of torch
# that wait for one another would spin, and take four times as long. Tests about threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell lets what it starts in the background ignore Ctrl-C, which tests raise.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of `make cluster` as slow, too."""
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker("slow")


# --- caches ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory) -> Path:
    """Folder of the caches of a test session, for the processes that it starts, too; never the user's own."""
    folder = tmp_path_factory.mktemp("caches")
    os.environ["IMAGEPIVOT_CACHE"] = str(folder / "first")
    return folder


@pytest.fixture(autouse=True)
def cache(caches, request, monkeypatch) -> None:
    """Each test begins with an empty cache: what it changes of an extractor, the next one must not remember."""
    monkeypatch.setenv("IMAGEPIVOT_CACHE", str(caches / sha256(request.node.nodeid.encode()).hexdigest()[:16]))


# --- events ----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _end_of_events() -> Iterator[None]:
    """End what ``--log-json`` begins, where a test only parses a command that has it: the next test writes no events."""
    yield
    events.finish(0)


@pytest.fixture(autouse=True)
def _end_of_user_code() -> Iterator[None]:
    """Forget modules that a command of a test imported, which the results of the next test are not made from."""
    yield
    set_user_code({})


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Features of six images, whose numbers count from 0 to 23."""
    import numpy as np

    from schemas.features import FeatureSpec
    from tests.builders import write_rows

    path = tmp_path_factory.mktemp("small") / "features"
    rows = [{"image_id": str(n), "feature": np.arange(4 * n, 4 * n + 4, dtype=np.float32)} for n in range(6)]
    write_rows(path, "features", rows, FeatureSpec(name="pool", shape=(4,)), shards=2)
    return path


# --- real data -------------------------------------------------------------------------------------------------------


def _data(name: str) -> Path:
    root = Path(os.environ.get("IMAGEPIVOT_TEST_DATA", Path(__file__).parent.parent.parent / "shared" / "data"))
    if not (root / name).is_dir():
        pytest.skip(f"no {name!r} in {root}: set IMAGEPIVOT_TEST_DATA to the folder that holds it")
    return root / name


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30K text, as its authors lay it out."""
    return _data("multi30k")


@pytest.fixture(scope="session")
def photos() -> Path:
    """Folder of eighteen photographs (``images/``) with captions (``captions.tsv``)."""
    return _data("photos")


@pytest.fixture(scope="session")
def visual_genome() -> Path:
    """Folder of the names of the 1,600 classes and 400 attributes, as the detector's releases carry them."""
    return _data("visual_genome")


@pytest.fixture(scope="session")
def sts_pairs() -> Path:
    """Folder of sentence pairs with scores: ``images-2014.tsv`` and ``images-2015.tsv`` of the shared tasks."""
    return _data("sts")


# --- the demo --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """Output of ``imagepivot demo build/demo --all``; tests that change it work on a copy.

    Attributes:
        folder: the working folder of the run, which holds ``build/demo``.
        scenes: number of scenes.
    """

    folder: Path
    scenes: int = 24

    @property
    def stdout(self) -> str:
        """Standard output of the run."""
        return (self.folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """Standard error of the run."""
        return (self.folder / "stderr").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The demo as the installed command runs it; it takes a minute, so all processes of a test run share one."""
    root = tmp_path_factory.getbasetemp()
    demo = Demo((root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "demo")
    demo.folder.mkdir(exist_ok=True)
    with (demo.folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (demo.folder / "stdout").exists():
            command = [
                Path(sys.executable).with_name("imagepivot"),
                "demo",
                "build/demo",
                "--all",
                "--scenes",
                str(demo.scenes),
            ]
            environment = {**os.environ, "COLUMNS": "200"}
            done = subprocess.run(command, cwd=demo.folder, env=environment, capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode()
            (demo.folder / "stderr").write_bytes(done.stderr)
            (demo.folder / "stdout").write_bytes(done.stdout)
    return demo
