"""Every extractor end to end without its start-up, against its bare model, that with batch norm folded, and that compiled.

Rates are images per second. A run of the job gives the steady rate, from the end of the first batch to the end of the last, files
to shards, in a process that keeps its memory as that of the command; models run as in any script. The start-up is the command's
time over a single image. ``--write`` puts the rows of this processor into the table of a page. ``--clock processor`` divides by
processor time instead, as if every core were free: for a machine that others use.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import speed_table
import torch
from baselines import BATCH, CROPS, bare, compiled, folded, inputs, layer_by_layer, make_photographs, ready
from processor import Conditions, computes_bf16, machine, name_of_kind, processor_class
from targets import REGIONS, targets_of, verdicts
from timeline import Timeline, steady

from extractors import ExtractorRequest
from pipelines.features.extraction import extract_features
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from schemas.errors import ImagepivotError
from schemas.process.startup import keep_freed_memory

PHOTOGRAPHS = 16
"""Different images; a run takes each of them several times, under several names."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAME_NETWORK = {"vgg19-10crop-caffe": "vgg19-10crop"}  # Its weights and preprocessing are others.


class Rate(NamedTuple):
    """Images per second, by the clock and by processor time times threads."""

    clock: float
    processor: float


def main() -> None:
    """Print the rates and their ratios, and write the table if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extractors", nargs="+", choices=BATCH, default=list(BATCH))
    parser.add_argument(
        "--precisions", nargs="+", choices=DTYPES, help="all that the processor has instructions for, if left out"
    )
    parser.add_argument("--seconds", type=float, default=6, help="least time of a measurement")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=Rate._fields, default="clock")
    parser.add_argument("--only", nargs="+", choices=speed_table.COLUMNS, default=list(speed_table.COLUMNS))
    parser.add_argument("--write", type=Path, help="page with the table, e.g. docs/internals/performance.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(machine(), f"torch {torch.__version__}, {arguments.threads} threads", flush=True)
    precisions = arguments.precisions or [name for name in DTYPES if name == "fp32" or computes_bf16()]
    if arguments.precisions is None and "bf16" not in precisions:
        print("bf16: left out, this processor has no instructions for it; --precisions bf16 measures it all the same")
    before, rows, of_networks = Conditions(), {}, {}
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), PHOTOGRAPHS)
        for extractor in arguments.extractors:
            for precision in precisions:
                known = of_networks.setdefault((SAME_NETWORK.get(extractor, extractor), precision), {})
                bench = Bench(
                    extractor, precision, folder, arguments.seconds, arguments.clock, frozenset(arguments.only), known
                )
                row = {(extractor, name_of_kind(), precision): bench.row()}
                rows.update(row)
                if arguments.write is not None:  # Row by row: all of them take half an hour.
                    speed_table.write(arguments.write, row)
    print(speed_table.render(rows), end="")
    print(f"{arguments.clock}, {arguments.threads} threads; {before.later()}", flush=True)


class Bench(NamedTuple):
    """The measurements of one row.

    Attributes:
        extractor: its name.
        precision: ``fp32`` or ``bf16``.
        folder: the photographs.
        seconds: least time of a measurement.
        clock: which of the rates counts.
        only: columns to measure.
        known: rates of the same network's baselines so far; gets what is measured.
    """

    extractor: str
    precision: str
    folder: str
    seconds: float
    clock: str
    only: frozenset[str]
    known: dict[str, float]

    def row(self) -> dict[str, str]:
        """Measure the columns one after the other, print each, and return the cells."""
        rates = {}
        for column, measured in (
            ("baseline", self._baseline),
            ("folded", lambda: self._model(folded)),
            ("compiled", lambda: self._model(compiled)),
            ("imagepivot", lambda: self._imagepivot(rates, compiles=False)),
            ("imagepivot, --compile", lambda: self._imagepivot(rates, compiles=True)),
        ):
            if column not in self.only:
                continue
            if column in self.known:
                rates[column] = self.known[column]
                continue
            rate = measured()
            if isinstance(rate, str):
                print(f"{self.extractor}, {self.precision}, {column}: not measured, {rate}", flush=True)
                continue
            rates[column] = getattr(rate, self.clock)
            if not column.startswith("imagepivot"):
                self.known[column] = rates[column]
            print(
                f"{self.extractor}, {self.precision}, {column}: {rate.clock:.2f} images/s by the clock, "
                f"{rate.processor:.2f} by processor time{_ratios(rates, column)}",
                flush=True,
            )
        cells = {column: f"{rate:.3g}" for column, rate in rates.items()}
        seconds = self._one_image() if "one image, s" in self.only else None
        if seconds is not None:
            cells["one image, s"] = f"{seconds:.1f}"
        if "targets" in self.only:
            by_clock = seconds if self.clock == "clock" else None
            judged = verdicts(targets_of(self.extractor, processor_class(), self.precision), rates, by_clock)
            for verdict in judged:
                print(f"{self.extractor}, {self.precision}, target: {verdict}", flush=True)
            if reached := [verdict.cell for verdict in judged if verdict.cell]:
                cells["targets"] = ", ".join(reached)
        return cells

    def _baseline(self) -> Rate:
        if self.extractor == REGIONS:
            plain, pixels = layer_by_layer(), ready(self.folder)[:1]
            return repeated(lambda: plain(pixels), 1, self.seconds)
        return self._model(lambda model: model)

    def _model(self, prepare: Callable[[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor] | str]) -> Rate | str:
        if self.extractor == REGIONS:
            return "the detector is no single network"
        dtype = DTYPES[self.precision]
        model, batch = prepare(bare(self.extractor, dtype)), inputs(self.extractor, dtype)
        if isinstance(model, str):
            return model
        with torch.inference_mode():
            return repeated(lambda: model(batch), len(batch) // CROPS.get(self.extractor, 1), self.seconds)

    def _imagepivot(self, rates: dict[str, float], *, compiles: bool) -> Rate | str:
        batch = BATCH[self.extractor]
        guess = rates.get("imagepivot", rates.get("baseline", 1.0))  # Roughly: it only decides how many images there are.
        count = batch * max(2, round(guess * self.seconds / batch) + 1)
        # A process of its own, which starts as that of the command does.
        with ProcessPoolExecutor(1, get_context("spawn"), _start, (torch.get_num_threads(),)) as process:
            try:
                return process.submit(
                    end_to_end, self.extractor, self.precision, self.folder, count, compiles=compiles
                ).result()
            except ImagepivotError as error:
                return str(error)

    def _one_image(self) -> float:
        """Return the seconds of the command over one image."""
        image = sorted(Path(self.folder).glob("*.jpg"))[0]
        seconds = one_image(self.extractor, self.precision, image, self.clock)
        print(f"{self.extractor}, {self.precision}, the command over one image: {seconds:.1f} s", flush=True)
        return seconds


def repeated(run: Callable[[], object], images: int, seconds: float) -> Rate:
    """Run once to warm up, which is also when a model is compiled, then again and again; return the rate."""
    run()
    count, started, worked = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds or count == 0:
        run()
        count += images
    return _rate(count, time.perf_counter() - started, time.process_time() - worked)


def end_to_end(extractor: str, precision: str, folder: str, count: int, *, compiles: bool = False) -> Rate:
    """Run the job over so many images; return the rate between the ends of the first and the last batch.

    Raises:
        ImagepivotError: the extractor does not compile here.
    """
    with tempfile.TemporaryDirectory() as images, tempfile.TemporaryDirectory() as output:
        photographs = sorted(Path(folder).glob("*.jpg"))
        for number in range(count):
            Path(images, f"{number}.jpg").symlink_to(photographs[number % len(photographs)])
        job = FeaturesJob(
            images=open_images(images),
            output=output,
            extractor=ExtractorRequest(extractor, weights="random:0", precision=precision, compile=compiles),
            device="cpu",
            batch_size=BATCH[extractor],
            shards=1,
        )
        with Timeline.recorded() as marks:
            extract_features(job, meter=Timeline())
        return _rate(*steady(marks))


def one_image(extractor: str, precision: str, image: Path, clock: str) -> float:
    """Run the command over one image; return its seconds by the clock or its processor time."""
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        images.mkdir()
        (images / image.name).symlink_to(image)
        command = [sys.executable, "-c", "import imagepivot; imagepivot.command()", "features", str(images), f"{folder}/output"]
        options = ["--extractor", extractor, "--weights", "random:0", "--precision", precision, "--device", "cpu"]
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([*command, *options], check=True, capture_output=True)
        after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - started
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds if clock == "clock" else used


def _start(threads: int) -> None:
    keep_freed_memory()
    torch.set_num_threads(threads)


def _rate(images: int, seconds: float, worked: float) -> Rate:
    return Rate(images / seconds, images / worked * torch.get_num_threads())


def _ratios(rates: dict[str, float], column: str) -> str:
    others = [f"{rates[column] / rate:.2f} of {name}" for name, rate in rates.items() if name != column]
    return f"; {', '.join(others)}" if others else ""


if __name__ == "__main__":
    main()
