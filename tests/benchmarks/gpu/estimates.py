"""The tables of estimates in ``docs/gpus.md``: what is counted without a GPU, and what follows at published rates.

python -m tests.benchmarks.gpu.estimates            # print them
python -m tests.benchmarks.gpu.estimates --write    # put them into the page; measurements that stand there are lost
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.benchmarks.gpu.counting import Counts, count
from tests.benchmarks.gpu.data_sheets import DATA_SHEETS, Estimate
from tests.benchmarks.gpu.steps import table_of_step_counts, table_of_step_estimates
from tests.benchmarks.gpu.subjects import SUBJECTS, Subject
from tests.benchmarks.gpu.training import PRESETS

__all__ = [
    "PAGE",
    "all_tables",
    "counted",
    "markdown",
    "rates_of_sheets",
    "read_tables",
    "replaced",
    "table_of_counts",
    "table_of_estimates",
    "without_measurements",
]

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
BATCHES = (1, 16)
_COUNTED = {"fp32": "fp32", "tf32": "fp32", "bf16": "bf16"}  # TF32 asks for the same operations as fp32.

Table = list[list[str]]


@cache
def counted(subject: Subject, precision: str) -> tuple[int, dict[int, Counts]]:
    """Count the batches of an extractor, once."""
    return count(subject.name, precision, subject.size_hw, sorted({*BATCHES, *subject.estimated}))


def rates_of_sheets() -> Table:
    """Return the table of published rates."""
    head = ["GPU", "fp32, TFLOP/s", "TF32", "16 bits", "memory, GB/s", "measured: fp32", "TF32", "16 bits", "memory"]
    rows = []
    for sheet in DATA_SHEETS:
        rates = [f"{value:g}" if value else "" for value in sheet.tflops.values()]
        rows.append([f"[{sheet.name}]({sheet.source})", *rates, f"{sheet.bandwidth:,.0f}", *[""] * 4])
    return [head, *rows]


def table_of_counts(subjects: Sequence[Subject]) -> Table:
    """Return the table of what is counted."""
    head = ["extractor", "GMAC an image", "weights, MB", "MB an image at 1", "at 16", "the same in 16 bits at 1", "at 16"]
    head += ["launches at 1", "at 16", "waits at 16", "kB over the bus"]
    rows = []
    for subject in subjects:
        (weights, wide), (_, narrow) = counted(subject, "fp32"), counted(subject, "bf16")
        one, many = (wide[images] for images in BATCHES)
        megabytes = [f"{counts[images].bytes / images / 1e6:,.0f}" for counts in (wide, narrow) for images in BATCHES]
        launches = [f"{wide[images].launches:,}" for images in BATCHES]
        row = [f"`{subject.name}`", f"{one.macs / 1e9:,.2f}", f"{weights / 1e6:,.0f}", *megabytes, *launches]
        rows.append([*row, f"{many.waits}", f"{many.moved / BATCHES[1] / 1e3:,.0f}"])
    return [head, *rows]


def table_of_estimates(subjects: Sequence[Subject]) -> Table:
    """Return the table of images a second of each GPU, estimated."""
    head = ["extractor", "batch", "precision"]
    for sheet in DATA_SHEETS:
        head += [f"{sheet.name.partition(' ')[0]}, estimate", "measured"]
    rows = []
    for subject in subjects:
        for images in subject.estimated:
            for precision, of in _COUNTED.items():
                row = [f"`{subject.name}`", f"{images}", "16 bits" if precision == "bf16" else precision]
                for sheet in DATA_SHEETS:
                    estimate = Estimate.of(counted(subject, of)[1][images], sheet, precision)
                    row += [f"{_rounded(images / estimate.seconds)}, {estimate.bound}" if estimate else "", ""]
                rows.append(row)
    return [head, *rows]


def _rounded(rate: float) -> str:
    """Return a rate with two digits, which is more than an estimate has."""
    return f"{float(f'{rate:.2g}'):,.{0 if rate >= 9.5 else 1}f}"


def markdown(table: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    head, *rows = table
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def blocks(page: str) -> list[tuple[int, int]]:
    """Return first and last line of each table of the page but the first, which names the parts; the last is no longer of it."""
    is_row = [line.startswith("|") for line in page.splitlines()] + [False]
    edges = [n for n in range(1, len(is_row)) if is_row[n] != is_row[n - 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))[1:]


def replaced(page: str, tables: Iterable[Table]) -> str:
    """Return the page with other tables in place of its own, which stand in the same order."""
    lines = page.splitlines(keepends=True)
    for (start, end), table in reversed(list(zip(blocks(page), tables, strict=True))):
        lines[start:end] = [markdown(table)]
    return "".join(lines)


def read_tables(page: str) -> list[Table]:
    """Return the cells of the tables."""
    lines = page.splitlines()
    tables = [[[cell.strip() for cell in line.strip("|").split("|")] for line in lines[a:b]] for a, b in blocks(page)]
    return [[head, *rows] for head, _, *rows in tables]


def without_measurements(table: Table) -> Table:
    """Return a table without the columns of measurements: from ``measured: ...`` on, and those of that name."""
    first = next((n for n, name in enumerate(table[0]) if name.startswith("measured: ")), len(table[0]))
    kept = [n for n, name in enumerate(table[0][:first]) if name != "measured"]
    return [[row[n] for n in kept] for row in table]


def all_tables() -> list[Table]:
    """Make the tables, in the order of the page."""
    subjects = [subject for subject in SUBJECTS if subject.estimated]
    steps = [table_of_step_counts(PRESETS), table_of_step_estimates(PRESETS)]
    return [rates_of_sheets(), table_of_counts(subjects), table_of_estimates(subjects), *steps]


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    arguments = parser.parse_args()
    tables = all_tables()
    if arguments.write:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    else:
        print("\n".join(map(markdown, tables)))


if __name__ == "__main__":
    main()
