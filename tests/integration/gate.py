"""Workers that stop before they publish a shard for as long as a file exists, so that a job lasts as long as a test wants."""

from pathlib import Path

from tests.integration.processes import wait_for

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


def at_work(output: Path, seconds: float = 120.0) -> None:
    """Wait until the first worker has started."""
    wait_for((output / ".first-worker.tmp-0").exists, seconds)
