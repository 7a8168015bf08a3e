from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from schemas.process.startup import keep_freed_memory

ROOT = Path(__file__).parents[3]
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="needs Linux with glibc")


def run(code: str, *words: str, **environment: str) -> str:
    """Run Python code in a process in which nobody has set the allocator but ``environment``; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=clean | environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@glibc
@pytest.mark.parametrize(
    ("environment", "is_set"),
    [
        ({}, True),
        ({"MALLOC_ARENA_MAX": "4"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=3"}, False),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),
    ],
)
def test_keep_freed_memory_keeps_user_settings(environment, is_set):
    code = "from schemas.process import startup; print(startup.keep_freed_memory())"
    assert run(code, **environment) == str(is_set)


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_keep_freed_memory_without_mallopt_does_nothing(system, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert keep_freed_memory() is False


SET = """
from schemas.process import startup
startup.keep_freed_memory = lambda: print("set")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        "import sys, imagepivot; sys.argv[1:] = ['--version']; imagepivot.command()",
        "import os; from pipelines.running.process_pool import serve; serve(os.getppid(), os.open('/dev/null', os.O_RDONLY))",
        "import sys; from importlib.machinery import ModuleSpec; sys.modules['__main__'].__spec__ = "
        "ModuleSpec('apache_beam.runners.worker.sdk_worker_main', None); import pipelines",
    ],
    ids=["command", "local worker", "worker on another machine"],
)
def test_every_process_of_ours_sets_its_allocator(start):
    assert run(SET + start).split()[0] == "set"


@pytest.mark.slow
def test_import_leaves_the_allocator_of_a_program_alone():
    assert run(SET + "import imagepivot, pipelines, schemas; imagepivot.open_dataset") == ""
