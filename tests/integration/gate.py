"""Workers that stop before they publish a shard for as long as a file exists, so that a job lasts as long as a test wants."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from tests.integration.processes import wait_for

__all__ = ["GATE", "at_work", "job_of"]

GATE = """
import os, time
fsync, parent = os.fsync, os.getppid()

def held(number):
    name = os.readlink(f"/proc/self/fd/{number}")
    while ".part-" in name and os.path.exists(os.environ["HOLD"]) and os.getppid() == parent:
        time.sleep(0.05)
    fsync(number)

os.fsync = held
"""
"""Module ``sitecustomize``, which Python itself starts in every worker; the variable ``HOLD`` names the file.

A worker whose pool is gone waits no longer.
"""


def job_of(output: Path) -> dict[str, object]:
    """Return what the job file says, once the runner has accepted the job."""
    with suppress(FileNotFoundError):
        content = json.loads((output / "_job.json").read_text())
        return content if content["id"] else {}
    return {}


def at_work(output: Path, seconds: float = 120.0) -> str:
    """Wait until the first worker has started; return the job's id."""
    wait_for(lambda: job_of(output) and (output / ".first-worker.tmp-0").exists(), seconds)
    return str(job_of(output)["id"])
