"""Captions with one worker in this process against the same job on Beam's in-process runner, with Beam loaded before.

Then the command over two captions against the import of apache_beam, both as new processes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import rate_of, ratio
from processor import machine
from targets import floor

from pipelines.jobs import CaptionsJob
from pipelines.running.execution import Execution
from pipelines.text.captions import prepare_captions

ROWS = 100_000
BEAM = Execution(beam_flags=("--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner",))


def main() -> None:
    """Print the ratios."""
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        table, two = Path(folder, "captions.tsv"), Path(folder, "two.tsv")
        table.write_text("image_id\ttext\n" + "".join(_rows(ROWS)), encoding="utf-8")
        two.write_text("image_id\ttext\n" + "".join(_rows(2)), encoding="utf-8")

        def rate(execution: Execution) -> float:
            with tempfile.TemporaryDirectory() as output:
                return rate_of(lambda: prepare_captions(CaptionsJob(str(table), output, "table"), execution), ROWS)

        ratio(
            "captions in this process, against Beam's in-process runner",
            lambda: rate(Execution(workers=1)),
            lambda: rate(BEAM),
            unit="captions/s",
            at_least=floor("captions against Beam"),
        )

        def command() -> float:
            with tempfile.TemporaryDirectory() as output:
                words = ["imagepivot", "captions", str(two), output, "--format", "table"]
                return _rate(f"import sys; sys.argv = {words!r}; from imagepivot import main; main()")

        ratio(
            "the command over two captions, against the import of apache_beam",
            command,
            lambda: _rate("import apache_beam"),
            unit="processes/s",
            at_least=floor("two captions"),
        )


def _rows(count: int) -> list[str]:
    generator = random.Random(0)
    words = [
        "A",
        "man",
        "in",
        "a",
        "blue",
        "shirt",
        "is",
        "standing",
        "on",
        "ladder",
        "don't",
        "(",
        ",",
        "café",
        "cleaning",
        ".",
    ]
    return [f"{number // 5:07d}\t{' '.join(generator.choices(words, k=12))}\n" for number in range(count)]


def _rate(script: str) -> float:
    return rate_of(lambda: subprocess.run([sys.executable, "-c", script], check=True, capture_output=True))


if __name__ == "__main__":
    main()
