import os

import pytest

from pipelines.doctor.machine import check_cores, check_memory, check_open_files, check_shared_memory, gigabytes
from schemas.limits import core_count, memory_limit


@pytest.fixture(autouse=True)
def no_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.00 GB"), (64e6, "0.06 GB"), (949e6, "0.95 GB"), (950e6, "0.9 GB"), (7.84e9, "7.8 GB"), (1.2e12, "1,200 GB")],
)
def test_sizes_in_words(size, text):
    assert gigabytes(size) == text


@pytest.mark.parametrize(
    ("usable", "total", "quota", "status", "found"),
    [
        (1, 1, None, "ok", "1 core"),
        (8, 8, None, "ok", "8 cores"),
        (4, 64, None, "ok", "4 cores of 64 (affinity)"),
        (8, 8, 8.0, "ok", "8 cores"),
        (64, 64, 2.5, "note", "64 cores, and a control group allows the time of 2.5"),
    ],
)
def test_cores(usable, total, quota, status, found):
    (finding,) = check_cores(usable, total, quota)
    assert (finding.status, finding.found) == (status, found)
    assert finding.values == {"usable": usable, "total": total, "quota": quota, "omp_num_threads": None}


@pytest.mark.parametrize(("quota", "threads"), [(0.5, 1), (2.9, 2)])
def test_a_quota_says_how_many_threads_there_should_be(monkeypatch, quota, threads):
    (finding,) = check_cores(8, 8, quota)
    assert f"OMP_NUM_THREADS={threads}, and give imagepivot captions --workers {threads}" in finding.advice
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    (finding,) = check_cores(8, 8, quota)
    assert (finding.status, finding.advice) == ("ok", "")
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads + 1))
    (finding,) = check_cores(8, 8, quota)
    assert finding.status == "note"


@pytest.mark.parametrize(
    ("limit", "available", "status", "found"),
    [
        (8_000_000_000, 4_000_000_000, "ok", "8.0 GB, 4.0 GB of it free"),
        (8_000_000_000, None, "ok", "8.0 GB"),
        (8_000_000_000, 500_000_000, "note", "8.0 GB, 0.50 GB of it free"),
        (1_000_000_000, 1_000_000_000, "note", "1.0 GB, 1.0 GB of it free"),
    ],
)
def test_memory(limit, available, status, found):
    (finding,) = check_memory(limit, available)
    assert (finding.status, finding.found, bool(finding.advice)) == (status, found, status == "note")


def test_shared_memory_of_dockers_own_size():
    (finding,) = check_shared_memory(64 << 20)
    assert (finding.status, finding.found) == ("note", "0.07 GB")
    assert "docker run --shm-size=2g" in finding.advice
    assert [finding.status for finding in check_shared_memory(1 << 30)] == ["ok"]


@pytest.mark.parametrize(
    ("most", "status", "found"), [(256, "note", "at most 256"), (1024, "ok", "at most 1,024"), (-1, "ok", "no limit")]
)
def test_open_files(most, status, found):
    (finding,) = check_open_files(most)
    assert (finding.status, finding.found) == (status, found)


def test_this_machine():
    (cores,), (memory,), (files,) = check_cores(), check_memory(), check_open_files()
    assert (cores.values["usable"], cores.values["total"]) == (core_count(), os.cpu_count())
    assert memory.values["limit"] == memory_limit()
    assert files.values["most"] is None or files.values["most"] > 0
