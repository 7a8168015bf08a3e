"""What a step of training asks of a GPU, counted without one, and what follows at published rates: the tables of steps."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

from tests.benchmarks.gpu.counting import Counting, Counts
from tests.benchmarks.gpu.data_sheets import DATA_SHEETS, Estimate
from tests.benchmarks.gpu.training import PRESETS, Sizes, write_corpus
from tests.pretended_gpu import pretended_gpu
from train.config.sections import resolve
from train.jobs import TrainJob
from train.loop import _Loop, train

__all__ = ["count_step", "table_of_step_counts", "table_of_step_estimates"]

_SIZES = Sizes(272, 8000, 13)  # Two whole batches of 128 images.
_STEP = 2  # The first one also makes the state of the optimizer.


@cache
def count_step(preset: str) -> tuple[int, Counts]:
    """Train on invented data, in float32, and count the second step. Values are computed: of SCAN the counts depend on them.

    Returns:
        Captions or images of a batch, and the counts.
    """
    steps: list[Counts] = []
    step = _Loop._step
    config = resolve(preset, {})
    schedule = replace(config.schedule, max_steps=_STEP, max_epochs=0, evaluate_every=_STEP, patience=0, decay_epochs=0)
    with tempfile.TemporaryDirectory() as folder, pretended_gpu() as gpu:

        def counted(loop: _Loop) -> object:
            gpu.reset()
            with Counting(gpu) as counting:
                done = step(loop)
            counting.counts.launches, counting.counts.waits = gpu.launches.total(), gpu.waits.total()
            steps.append(counting.counts)
            return done

        corpus = write_corpus(Path(folder) / "corpus", _SIZES, PRESETS[preset])
        job = TrainJob(
            replace(config, schedule=schedule), corpus, f"{folder}/run", device="cuda", save_every=_STEP, curves=False
        )
        with mock.patch.object(_Loop, "_step", counted):
            train(job)
    write_corpus.cache_clear()
    return schedule.batch_size, steps[_STEP - 1]


def table_of_step_counts(presets: Iterable[str]) -> list[list[str]]:
    """Return the table of what is counted."""
    rows = [["preset", "batch", "GMAC", "MB", "launches", "waits", "kB over the bus"]]
    for preset in presets:
        batch, counts = count_step(preset)
        row = [f"`{preset}`", f"{batch}", f"{counts.macs / 1e9:,.1f}", f"{counts.bytes / 1e6:,.0f}"]
        rows.append([*row, f"{counts.launches:,}", f"{counts.waits}", f"{counts.moved / 1e3:,.0f}"])
    return rows


def table_of_step_estimates(presets: Iterable[str]) -> list[list[str]]:
    """Return the table of steps a second of each GPU, estimated."""
    head = ["preset", "precision"]
    for sheet in DATA_SHEETS:
        head += [f"{sheet.name.partition(' ')[0]}, estimate", "measured"]
    rows = [head]
    for preset in presets:
        for precision in ("fp32", "tf32"):  # They ask for the same operations.
            row = [f"`{preset}`", precision]
            for sheet in DATA_SHEETS:
                estimate = Estimate.of(count_step(preset)[1], sheet, precision)
                row += [f"{float(f'{1 / estimate.seconds:.2g}'):,.0f}, {estimate.bound}" if estimate else "", ""]
            rows.append(row)
    return rows
