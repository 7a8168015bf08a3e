"""Limits of memory, with files as the kernel shows them."""

from __future__ import annotations

import os

import pytest

from train.data.memory import memory_limit

HOST = 64 << 30
UNLIMITED = "9223372036854771712"  # What version 1 says where there is no limit.


@pytest.fixture
def limit(tmp_path, monkeypatch):
    """Return the limit of a process in groups that have these files."""
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": HOST // 4096}.__getitem__)

    def limit(groups: str | None, files: dict[str, str]) -> int:
        if groups is not None:
            (tmp_path / "cgroup").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return memory_limit(tmp_path / "cgroup", tmp_path / "mount")

    return limit


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (None, {}, HOST),
        ("0::/\n", {}, HOST),
        ("0::/\n", {"memory.max": "max"}, HOST),
        ("0::/\n", {"memory.max": "4096000"}, 4096000),
        ("0::/\n", {"memory.max": str(2 * HOST)}, HOST),
        # A batch job inside a slice: whichever is lower.
        ("0::/slice/job\n", {"slice/memory.max": "3000", "slice/job/memory.max": "5000"}, 3000),
        ("0::/slice/job\n", {"slice/memory.max": "max", "slice/job/memory.max": "5000"}, 5000),
        ("0::/slice/job\n", {"slice/memory.max": "3000", "slice/job/memory.max": "max", "other/memory.max": "7"}, 3000),
        # The path of the host, seen from a container.
        ("0::/system.slice/docker-1234.scope\n", {"memory.max": "4000"}, 4000),
        ("0::/../outside\n", {"memory.max": "4000"}, 4000),
        ("12:cpu,cpuacct:/a\n4:memory:/a/b\n", {"memory/memory.limit_in_bytes": UNLIMITED}, HOST),
        (
            "12:cpu:/x\n4:memory:/a/b\n1:name=systemd:/a\n",
            {"memory/memory.limit_in_bytes": UNLIMITED, "memory/a/memory.limit_in_bytes": "900", "cpu/x/memory.max": "1"},
            900,
        ),
        ("4:memory:/docker/12\n0::/docker/12\n", {"memory/memory.limit_in_bytes": "800"}, 800),
    ],
)
def test_the_lowest_limit_counts(limit, groups, files, expected):
    assert limit(groups, files) == expected


def test_this_process_has_a_limit():
    assert 1 << 20 < memory_limit() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
