"""The parts that run what users run: the tests marked ``gpu``, and the extraction of features from files to shards."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

from extractors import ExtractorRequest
from tests.benchmarks.gpu.reporting import Part, Row, Settings, UnmeasurableError
from tests.benchmarks.gpu.subjects import photographs

_ROOT = Path(__file__).parents[3]
_OURS = ("extractors", "imagepivot", "pipelines", "schemas", "tests", "train")
_DRAWN = 200  # Photographs, each of which stands under several names.
_IMAGES = {"resnet50-pool": 4000, "vgg19-10crop": 1000, "resnet152-grid": 1000, "faster-rcnn-36": 400}


def files_with_gpu_tests() -> list[str]:
    """Return the files of tests that are marked ``gpu``: others are not even read, so that what they import may be missing."""
    paths = sorted((_ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(_ROOT)) for path in paths if re.search(r"\bmark\.gpu\b", path.read_text(encoding="utf-8"))]


# --- tests -----------------------------------------------------------------------------------------------------------


def _run_tests(settings: Settings, file: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={outcome}", file]
        limit = max(60.0, settings.end - time.monotonic()) if settings.end < float("inf") else None
        try:
            done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"reason": "the time was up"}
        if not outcome.exists():
            return {"reason": f"pytest ended with {done.returncode}", "error": done.stdout + done.stderr}
        [suite] = ElementTree.parse(outcome).getroot().iter("testsuite")
    numbers = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    missing = re.search(r"ModuleNotFoundError: (No module named '(\w+)[\w.]*')", done.stdout)
    if numbers["errors"] and missing and missing[2] not in _OURS:
        return {"reason": missing[1]}
    passed = numbers["tests"] - numbers["failures"] - numbers["errors"] - numbers["skipped"]
    found: Row = {"passed": passed, "failed": numbers["failures"] + numbers["errors"], "skipped": numbers["skipped"]}
    return {**found, "error": done.stdout[-20_000:]} if found["failed"] else found


# --- features --------------------------------------------------------------------------------------------------------


def _need_beam(settings: Settings) -> None:
    if find_spec("apache_beam") is None:
        raise UnmeasurableError("Beam is not installed")


def _feature_subjects(settings: Settings) -> list[tuple[str, str, int]]:
    if settings.is_quick:
        return [("timm:resnet18", "fp32", 4)]
    precisions = ("fp32", "bf16")
    return [(name, precision, images) for name, images in _IMAGES.items() for precision in precisions]


def _measure_features(settings: Settings, name: str, precision: str, images: int) -> Row:
    from pipelines.features.extraction import extract_features
    from pipelines.inputs.images.opening import open_images
    from pipelines.jobs import FeaturesJob

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "images"
        source.mkdir()
        drawn = []
        for number, image in enumerate(photographs(min(_DRAWN, images))):
            drawn.append(source / f"{number:06d}.jpg")
            image.save(drawn[-1], quality=90)
        for number in range(len(drawn), images):
            (source / f"{number:06d}.jpg").hardlink_to(drawn[number % len(drawn)])
        job = FeaturesJob(
            images=open_images(str(source)),
            output=str(Path(folder) / "features"),
            extractor=ExtractorRequest(name, weights="random:0", precision=precision),
            device=str(settings.device),
            shards=4,
        )
        with _Utilization(settings) as utilization:
            started = time.perf_counter()
            extract_features(job)
            seconds = time.perf_counter() - started
    found: Row = {"seconds": seconds, "images_per_second": images / seconds, "gpu_utilization": utilization.mean()}
    return found if found["gpu_utilization"] is not None else {**found, "reason": "gpu_utilization: nvidia-smi says nothing"}


class _Utilization:
    """Samples of ``utilization.gpu`` of nvidia-smi, a few in a second: the share of each in which a kernel ran."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[str] | None = None
        self._samples: list[float] = []

    def __enter__(self) -> _Utilization:
        if self._settings.is_gpu:
            number = self._settings.device.index or 0
            command = f"nvidia-smi --id={number} --query-gpu=utilization.gpu --format=csv,noheader,nounits -lms 200".split()
            try:
                self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            except OSError:
                self._process = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            output, _errors = self._process.communicate()
            self._samples = [float(line) / 100 for line in output.split() if line.isdigit()]

    def mean(self) -> float | None:
        """Return the mean; None without a sample."""
        return sum(self._samples) / len(self._samples) if self._samples else None


PARTS = (
    Part(
        "tests",
        "the tests that are marked gpu",
        ("file",),
        ("passed", "failed", "skipped"),
        lambda settings: [(file,) for file in files_with_gpu_tests()],
        _run_tests,
        lambda settings: settings.need_gpu("the tests would skip"),
    ),
    Part(
        "features",
        "from JPEG files of 500 × 375 pixels to shards with imagepivot features, start and loading counted",
        ("extractor", "precision", "images"),
        ("seconds", "images_per_second", "gpu_utilization"),
        _feature_subjects,
        _measure_features,
        _need_beam,
    ),
)
