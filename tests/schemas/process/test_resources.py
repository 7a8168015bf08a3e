from __future__ import annotations

import os
from pathlib import Path

import pytest

from schemas.process import resources
from schemas.process.resources import bfloat16_remark, core_count, core_quota, memory_limit, usable_cores

HOST = 64 << 30
UNLIMITED = "9223372036854771712"  # What version 1 says where there is no limit.


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": HOST // 4096}.__getitem__)

    def group(groups: str | None, files: dict[str, str]) -> tuple[Path, Path]:
        if groups is not None:
            (tmp_path / "cgroup").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return tmp_path / "cgroup", tmp_path / "mount"

    return group


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, HOST),
        ("0::/\n", {"memory.max": str(2 * HOST)}, HOST),
        # A batch job inside a slice: whichever is lower.
        ("0::/slice/job\n", {"slice/memory.max": "3000", "slice/job/memory.max": "5000"}, 3000),
        ("0::/slice/job\n", {"slice/memory.max": "3000", "slice/job/memory.max": "max", "other/memory.max": "7"}, 3000),
        # The path of the host, seen from a container.
        ("0::/system.slice/docker-1234.scope\n", {"memory.max": "4000"}, 4000),
        ("12:cpu,cpuacct:/a\n4:memory:/a/b\n", {"memory/memory.limit_in_bytes": UNLIMITED}, HOST),
        (
            "12:cpu:/x\n4:memory:/a/b\n1:name=systemd:/a\n",
            {"memory/memory.limit_in_bytes": UNLIMITED, "memory/a/memory.limit_in_bytes": "900", "cpu/x/memory.max": "1"},
            900,
        ),
        ("4:memory:/docker/12\n0::/docker/12\n", {"memory/memory.limit_in_bytes": "800"}, 800),
    ],
)
def test_lowest_limit_counts(group, groups, files, expected):
    assert memory_limit(*group(groups, files)) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, None),
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/slice/job\n", {"slice/cpu.max": "150000 100000", "slice/job/cpu.max": "400000 100000"}, 1.5),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_lowest_quota_of_cores_counts(group, groups, files, expected):
    assert core_quota(*group(groups, files)) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, None),
        ("0::/\n", {"cpu.weight": "39"}, 1.0),
        ("0::/kubepods/pod1\n", {"kubepods/pod1/cpu.weight": "157", "cpu.weight": "10000"}, 4.0),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.shares": "2"}, None),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.shares": "512"}, 0.5),
    ],
)
def test_request_of_a_pod(group, groups, files, expected, monkeypatch):
    """Weights are those of Kubernetes for 1, 8 and 4 cores."""
    places = group(groups, files)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert resources.core_request(*places) is None
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert resources.core_request(*places) == expected


def test_cores_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 7}, raising=False)
    assert core_count() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    assert core_count() == os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "request_", "expected"),
    [*((None, None, 6), (100.0, None, 6), (2.5, None, 2), (0.5, None, 1)), *((None, 4.0, 4), (5.0, 4.0, 5))],
)
def test_usable_cores_are_those_of_quota_else_request(monkeypatch, quota, request_, expected):
    monkeypatch.setattr(resources, "core_count", lambda: 6)
    monkeypatch.setattr(resources, "core_quota", lambda: quota)
    monkeypatch.setattr(resources, "core_request", lambda: request_)
    assert usable_cores() == expected


@pytest.mark.parametrize(
    ("text", "emulates"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", False),
        ("Features\t: fp asimd bf16\n", False),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", True),
        ("vendor_id\t: IBM/S390\n", False),  # It does not say.
    ],
)
def test_bfloat16_without_instructions_has_a_remark(tmp_path, text, emulates):
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(text)
    sentence = bfloat16_remark("bf16", "cpu", cpu)
    assert bool(sentence) is emulates
    assert not emulates or "no instructions for bfloat16" in sentence
    assert (bfloat16_remark("fp32", "cpu", cpu), bfloat16_remark("bf16", "cuda", cpu)) == ("", "")
    assert bfloat16_remark("bf16", "cpu", tmp_path / "missing") == ""
