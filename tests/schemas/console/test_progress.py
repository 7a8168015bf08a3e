import io
import json
import re

import pytest
from rich.console import Console

from schemas.console.progress import ProgressDisplay, Snapshot
from tests.prometheus import read_metrics


def smoothed(snapshot):
    return ProgressDisplay(Console(file=io.StringIO()))._smooth(snapshot)


def test_line_of_a_slow_extractor_shows_seconds_per_image():
    snapshot = smoothed(Snapshot("faster-rcnn-36", "images", {"images": 10, "failed": 1}, 24.0, 100))
    assert snapshot.to_line() == "faster-rcnn-36: 10 of 100 images, 3 min 36 s left, 2.4 s each, 1 failed"


def test_rate_has_three_digits_and_excludes_earlier_units():
    snapshot = smoothed(Snapshot("x", "images", {"images": 30}, 10.0, 40, earlier=20))
    assert (snapshot.done, snapshot.rate, snapshot.seconds_left) == (30, 1.0, 10.0)
    fields = smoothed(Snapshot("x", "images", {"images": 1}, 400.0, 10)).to_fields()
    assert fields["per_second"] == 0.0025
    assert fields["seconds_left"] == 3600.0
    assert json.loads(json.dumps(fields)) == fields


def test_unknown_counts_are_null_and_no_metrics():
    snapshot = Snapshot("captions", "captions", {}, 75.0, 40, is_known=False)
    assert snapshot.to_line() == "captions: running for 1 min 15 s, the runner does not say how far it is"
    fields = snapshot.to_fields()
    assert (fields["done"], fields["failed"], fields["total"], fields["seconds_left"]) == (None, None, 40, None)
    metrics = read_metrics(Snapshot("x", "images", {}, 1.0, is_known=False).to_metrics("x", is_running=True))
    assert set(metrics) == {"imagepivot_running", "imagepivot_elapsed_seconds"}
    assert Snapshot("captions", "captions", {}, 3.0).to_line() == "captions: 0 captions"


@pytest.mark.parametrize(
    ("waited", "worked", "expected"), [(0, 0, None), (5, 0, None), (10, 90, "model"), (11, 89, "decoding"), (0, 1, "model")]
)
def test_bottleneck_is_named(waited, worked, expected):
    counts = {"images": 1, "wait_msec": waited, "forward_msec": worked}
    assert Snapshot("x", "images", counts, 1.0).bottleneck == expected


@pytest.mark.parametrize("width", [80, 130])
def test_live_line_fits_the_terminal(width):
    file = io.StringIO()
    counts = {"images": 30000, "failed": 1234, "wait_msec": 900, "forward_msec": 100}
    with ProgressDisplay(Console(file=file, width=width, force_terminal=True, color_system=None)) as display:
        display.show(Snapshot("timm:vit_base_patch14_reg4_dinov2.lvd142m", "images", counts, 1.0, 31014))
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    assert "…e_patch14_reg4_dinov2.lvd142m" in shown
    assert "30000/31014 images" in shown
    assert "30,000.0/s, 1,234 failed, bound by decoding" in shown


def test_labels_of_metrics_are_escaped():
    name = 'a\\b"c\nd{}=, é'
    (samples,) = [read_metrics(Snapshot(name, "images", {}, 1.0).to_metrics(name, is_running=True))["imagepivot_done_total"]]
    assert [dict(labels) for labels in samples] == [{"run": name, "task": name, "unit": "images"}]
