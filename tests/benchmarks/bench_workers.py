"""Two local workers against one, and the default against one, for the commands that prepare text: new processes, by turns.

    python tests/benchmarks/bench_workers.py --lines 2 10000

measures some numbers of lines alone.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path

from bench_memory import COMMAND, write_table
from measuring import rate_of, test_data
from processor import machine
from targets import floor

LINES = (2, 10_000, 100_000, 290_000, 300_000, 1_740_000)
WORKERS = {"one": ("--workers", "1"), "two": ("--workers", "2"), "default": ()}
# One process counts or encodes 290,000 lines in a second, of which half is no work of workers: two processes gain nothing there.
TWO = {
    ("captions", 290_000): floor("two workers, 290,000 lines"),
    ("captions", 1_740_000): floor("two workers, 1.74 million lines"),
    ("vocabulary", 1_740_000): floor("two workers, vocabulary of 1.74 million lines"),
    ("encode", 1_740_000): floor("two workers, encode of 1.74 million lines"),
}
RUNS = 3
LINES_OF_COPY = 350_000  # Multi30K has more of its training split.


def main() -> None:
    """Print the ratios of the least times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, nargs="+", default=LINES)
    sizes = parser.parse_args().lines
    data = test_data("multi30k")
    if data is None:
        print("workers: skipped, needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
        return
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_table(folder / "all.tsv", data, 1 + max(sizes) // LINES_OF_COPY)
        for lines in sizes:
            with (folder / "all.tsv").open(encoding="utf-8") as rows:
                training = (row for row in rows if "\ttrain\t" in row)
                (folder / "table.tsv").write_text("".join([next(rows), *islice(training, lines)]), encoding="utf-8")
            measure(folder, lines)


def measure(folder: Path, lines: int) -> None:
    """Print the ratios of each command for the table of a folder."""
    captions, vocabulary = f"{folder}/captions-{lines}", f"{folder}/vocabulary-{lines}"
    run("captions", f"{folder}/table.tsv", captions, "--format", "table")
    run("vocabulary", captions, vocabulary, "--min-count", "1")
    for words in (
        ("captions", "--format", "table", f"{folder}/table.tsv"),
        ("vocabulary", "--min-count", "1", captions),
        ("encode", captions, vocabulary),
    ):
        seconds: dict[str, list[float]] = {name: [] for name in WORKERS}
        for _ in range(RUNS):
            for name, options in WORKERS.items():
                with tempfile.TemporaryDirectory(dir=folder) as output:
                    seconds[name].append(1 / rate_of(partial(run, *words, output, *options)))
        one, two, default = (min(values) for values in seconds.values())
        bound = TWO.get((words[0], lines))
        target = f" (target: at least {bound})" if bound is not None else ""
        print(
            f"{words[0]}, {lines:,} lines: {one:.2f} s with one worker, {two:.2f} s with two, {default:.2f} s by default; "
            f"two workers {one / two:.2f} times as fast as one{target}, the default {one / default:.2f} times "
            f"(target: at least {floor('default workers')})",
            flush=True,
        )


def run(*words: str) -> None:
    """Run the command as a new process."""
    subprocess.run([COMMAND, *words], check=True, capture_output=True)


if __name__ == "__main__":
    main()
