"""Measure what only a GPU can tell, and write ``gpu-report.json`` and ``gpu-report.md``.

    python -m tests.benchmarks.gpu                          # everything: at most an hour
    python -m tests.benchmarks.gpu --only speed --minutes 9 # a part, which joins those that the report has already
    python -m tests.benchmarks.gpu --device cpu --quick     # try the code where there is no GPU; the numbers say nothing

Without a GPU nothing is measured, no report is written, and the exit code is 1; so it is where something failed that could have
been measured. docs/internals/gpus.md describes the parts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from tests.benchmarks.gpu import commands, extraction, hardware, training
from tests.benchmarks.gpu.reporting import Settings, run_parts

PARTS = {part.name: part for part in (*hardware.PARTS, *commands.PARTS, *extraction.PARTS, *training.PARTS)}
_ORDER = ("rates", "tests", "agreement", "waits", "memory", "busy", "steps", "speed", "features")


def main() -> int:
    """Measure; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the code")
    parser.add_argument("--only", action="append", choices=_ORDER, help="measure only this part; may be given several times")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing new after so many minutes")
    parser.add_argument("--quick", action="store_true", help="measure little and small, to try the code")
    parser.add_argument("--output", type=Path, default=Path("build/gpu"), help="folder of the report")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured, and no report was written", file=sys.stderr)
        print("To try the code: python -m tests.benchmarks.gpu --device cpu --quick", file=sys.stderr)
        return 1
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    settings = Settings(device, arguments.quick, time.monotonic() + 60 * arguments.minutes)
    chosen = [PARTS[name] for name in arguments.only or _ORDER]
    report = run_parts(chosen, settings, hardware.describe(device), arguments.output)
    rows = [(part.name, row) for part in chosen for row in report["parts"][part.name]["rows"]]
    failed = [(name, row) for name, row in rows if row["error"] or row.get("failed")]
    for name, row in failed:
        print(f"{name} failed: {row['reason'] or row}", file=sys.stderr)
    print(f"The report is in {arguments.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
