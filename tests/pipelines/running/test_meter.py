import io
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipelines.running import meter as meters
from pipelines.running.meter import Meter, failure_counts, show_progress
from schemas.console import progress
from schemas.console.progress import Monitoring
from tests.integration.processes import wait_for
from tests.prometheus import read_metrics

JSON = Monitoring(log_json=True)


@pytest.fixture
def always(monkeypatch):
    """Let a meter write at every call instead of five times a second."""
    monkeypatch.setattr(meters, "_WRITE_SECONDS", -1.0)


def test_counts_of_threads_add_up(tmp_path, always):
    meter = Meter(str(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: meter.add(images=1), range(200)))
    assert meter.total() == {"images": 200}


@pytest.mark.parametrize("start", [0.0, 0.5, 1e6])
def test_counts_are_written_at_once_and_then_five_times_a_second(tmp_path, monkeypatch, start):
    """The monotonic clock may start at any number, even at zero."""
    now = start
    monkeypatch.setattr(meters, "time", SimpleNamespace(monotonic=lambda: now))
    meter = Meter(str(tmp_path))
    totals = []
    for seconds in (0.0, 0.1, 0.15, 0.25, 0.35, 0.5):
        now = start + seconds
        meter.add(images=1)
        totals.append(meter.total()["images"])
    assert totals == [1, 1, 1, 4, 4, 6]


def test_deleted_folder_does_not_stop_the_work(tmp_path, always):
    Meter(str(tmp_path / "gone")).add(images=1)
    assert Meter(str(tmp_path / "gone")).total() == {}


def test_half_written_file_is_skipped(tmp_path):
    (tmp_path / "1.json").write_text('{"images": 4}')
    (tmp_path / "2.json").write_text('{"ima')
    assert Meter(str(tmp_path)).total() == {"images": 4}


def test_plain_lines_outside_a_terminal(monkeypatch, always):
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.05)
    file = io.StringIO()
    with show_progress(Console(file=file, width=200), "captions", unit="captions", total=10) as meter:
        meter.add(captions=4, failed=1)
        wait_for(lambda: "4 of 10" in file.getvalue())
        folder = meter.folder
    line = next(line for line in file.getvalue().splitlines() if "4 of 10" in line)
    assert re.fullmatch(r"captions: 4 of 10 captions, \d+ s left, [\d,.]+(/s| s each), 1 failed", line)
    assert Meter(folder).total() == {}, "the folder of the counts is deleted"


def test_error_passes_through_and_ends_the_display():
    before = threading.active_count()
    with pytest.raises(ValueError, match="inside"), show_progress(Console(file=io.StringIO()), "x", unit="y"):
        raise ValueError("inside")
    assert threading.active_count() == before


def test_json_lines_for_programs(always):
    file = io.StringIO()
    with show_progress(Console(file=file, width=20), "vgg19-10crop", unit="images", total=10, monitoring=JSON) as meter:
        meter.add(images=4, failed=1, wait_msec=900, forward_msec=100)
    last = json.loads(file.getvalue().splitlines()[-1])
    assert last.pop("per_second") > 0
    assert last.pop("seconds") >= 0
    assert last.pop("seconds_left") >= 0
    assert datetime.fromisoformat(last.pop("time")).utcoffset() == timedelta(0)
    assert re.fullmatch(r"vgg19-10crop: 4 of 10 images, .*, 1 failed, bound by decoding", last.pop("message"))
    fixed = {"severity": "INFO", "event": "progress", "task": "vgg19-10crop", "unit": "images", "bottleneck": "decoding"}
    assert last == {"done": 4, "failed": 1, "total": 10, **fixed}


def test_settled_counts_are_those_of_the_dataset_and_not_of_this_run(tmp_path, monkeypatch):
    monkeypatch.setattr(meters, "_WRITE_SECONDS", 1000.0)
    (tmp_path / "12345.json").write_text('{"images": 4, "forward_msec": 7}')
    meter = Meter(str(tmp_path))
    for _ in range(3):
        meter.add(images=1, failed=1)
    meter.flush()
    assert meter.total() == {"images": 7, "failed": 3, "forward_msec": 7}
    meter.finalize(images=10, failed=2)
    assert meter.total() == {"images": 10, "failed": 2, "forward_msec": 7, "earlier_images": 3, "earlier_failed": 0}
    meter.flush()
    assert meter.total()["images"] == 10


def test_meter_report_replaces_files(always):
    file = io.StringIO()
    with show_progress(Console(file=file), "captions", unit="captions", total=9, monitoring=JSON) as meter:
        assert meter.is_known
        meter.report({})
        meter.add(captions=2)  # By a worker on this machine.
        assert (meter.total(), meter.is_known) == ({}, False)
        meter.report({"captions": 5, "failed": 1})
        assert (meter.total(), meter.is_known) == ({"captions": 5, "failed": 1}, True)
        meter.finalize(captions=9)
        assert meter.total()["captions"] == 9
    last = json.loads(file.getvalue().splitlines()[-1])
    assert (last["done"], last["total"]) == (9, 9)


def test_metrics_have_the_shard_of_each_worker_until_the_end(tmp_path, monkeypatch, always):
    monkeypatch.setattr(progress, "_METRICS_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_PLAIN_SECONDS", 0.01)
    file = tmp_path / "a.prom"

    def shards() -> list[float]:
        return list(read_metrics(text).get("imagepivot_current_shard", {}).values()) if (text := file.read_text()) else []

    console = Console(file=io.StringIO())
    with show_progress(console, "x", unit="images", total=9, monitoring=Monitoring(metrics_file=str(file))) as meter:
        (Path(meter.folder) / "1.shard").write_text("40")
        (Path(meter.folder) / "2.shard").write_text("")  # Half written.
        meter.start_shard(7)
        wait_for(lambda: sorted(shards()) == [7, 40])
        meter.add(images=4, forward_msec=1500, **failure_counts({"empty": 1}))
        meter.finish_shard(bytes_written=10)
        wait_for(lambda: "shards_total{" in file.read_text())
        metrics = read_metrics(file.read_text())
        meter.finalize(images=9, shards=3)
    labels = frozenset({"run": "a", "task": "x", "unit": "images"}.items())
    assert metrics["imagepivot_running"] == metrics["imagepivot_shards_total"] == {labels: 1}
    assert metrics["imagepivot_work_seconds_total"] == {labels | {("part", "forward")}: 1.5}
    assert metrics["imagepivot_failed_total"][labels | {("reason", "empty")}] == 1
    last = read_metrics(file.read_text())
    assert (last["imagepivot_running"], last["imagepivot_done_total"]) == ({labels: 0}, {labels: 9})
    assert (last["imagepivot_shards_total"], "imagepivot_current_shard" in last) == ({labels: 3}, False)


def test_metrics_that_can_no_longer_be_written_do_not_stop_the_run(tmp_path, always):
    file = tmp_path / "a" / "a.prom"
    with show_progress(Console(file=io.StringIO()), "x", unit="images", monitoring=Monitoring(metrics_file=str(file))):
        for number in count():  # The metrics are written again every second, in a new folder if need be.
            file.parent.rename(tmp_path / f"b{number}")
            with suppress(IsADirectoryError):
                file.parent.write_text("in the way")
                break
