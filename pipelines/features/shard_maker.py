"""Make shards in one worker process: what `pipelines.features.transforms` wraps for Beam.

Where one process of this machine makes all shards, `make_here` takes Beam's place: there is nothing to deal out, and importing Beam
and starting its runner would take longer than the features of a few images.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import extractors
from pipelines.features.forward import Tally
from pipelines.features.references import Piece, pieces_of, unpacked
from pipelines.features.shards import make_shard
from pipelines.features.workers import (
    check_fingerprint,
    decoding_processes,
    decoding_threads,
    devices_of_worker,
    planned_fingerprint,
)
from pipelines.inputs.images import CopiedImages, Copies, ImageRef
from pipelines.jobs import FeaturesJob
from pipelines.running.meter import Meter
from schemas.limits import usable_cores
from schemas.writing.output import OutputDataset


class LoadedExtractors:
    """The extractors of a process, one on each of its devices; each of them makes one shard at a time, in whatever thread.

    Beam's ``Shared`` keeps weak references, which need a class that allows them.

    Args:
        loaded: the extractors.
        batch_size: see `FeaturesJob`.
        threads: from `pipelines.features.workers.decoding_threads`.
    """

    def __init__(self, loaded: Sequence[extractors.Extractor], batch_size: int | None = None, threads: int = 1) -> None:
        from extractors.batch_sizes import find_batch_size

        self.fingerprints = [extractor.fingerprint for extractor in loaded]
        self.batch_sizes = {id(extractor): batch_size or find_batch_size(extractor) for extractor in loaded}
        self.processes = {id(extractor): decoding_processes(extractor, threads) for extractor in loaded}
        self._free: SimpleQueue[extractors.Extractor] = SimpleQueue()
        for extractor in loaded:
            self._free.put(extractor)

    @contextmanager
    def extractor(self) -> Iterator[extractors.Extractor]:
        """Wait for an extractor that is free."""
        extractor = self._free.get()
        try:
            yield extractor
        finally:
            self._free.put(extractor)


class ShardMaker:
    """Makes shards of features, in one worker process. Can be pickled until it is set up.

    Args:
        job: images, extractor and how to run it.
        output: the dataset.
        meter: counts images.
        threads: torch's threads; 0 for torch's own number.
        gpus: as `pipelines.features.workers.devices_of_worker` takes it.
        copies: where images have been copied to; None where each is read where it is.
    """

    def __init__(
        self,
        job: FeaturesJob,
        output: OutputDataset,
        meter: Meter,
        threads: int = 0,
        gpus: int = 0,
        copies: Copies | None = None,
    ) -> None:
        self._job = job
        self._output = output
        self._meter = meter
        self._threads = threads
        self._gpus = gpus
        self._copies = copies

    def set_up(self, share: Callable[[Callable[[], LoadedExtractors]], LoadedExtractors] = lambda load: load()) -> None:
        """Load the extractors, or take those that another maker of this process has loaded.

        Args:
            share: returns what its argument makes, or what it has made before.

        Raises:
            ImagepivotError: the weights or the device are missing, or are not those that were planned.
        """
        import torch

        if self._threads:
            torch.set_num_threads(self._threads)
        devices = devices_of_worker(self._job, os.environ.get("WORKER_ID", ""), self._gpus)
        load, size = self._job.extractor.load, self._job.batch_size
        cores = max(1, usable_cores() // self._gpus) if self._gpus > 1 else self._threads
        threads = decoding_threads(self._job, cores)
        self._loaded = share(lambda: LoadedExtractors([load(device) for device in devices], size, threads))
        self._decoding_threads = threads
        for fingerprint in self._loaded.fingerprints:
            check_fingerprint(self._job, planned_fingerprint(self._output), fingerprint)

    def make(self, shard: int, pieces: Iterable[Piece]) -> dict[str, int]:
        """Write one shard, and return the counts of `COUNTERS`.

        Args:
            shard: its number.
            pieces: references to its images, and to the places of their copies; those that are empty count for nothing.

        Raises:
            InputError: see `pipelines.features.shards.make_shard`.
        """
        refs, copied = unpacked(piece for piece in pieces if piece)
        copies = {copy.uri: copy for copy in copied}
        images = self._job.open_images()
        if self._copies is not None:
            images = CopiedImages(images, self._copies.folder, copies)
        with self._loaded.extractor() as extractor:
            tally = make_shard(
                self._output,
                shard,
                refs,
                self._job.policy,
                images=images,
                extractor=extractor,
                batch_size=self._loaded.batch_sizes[id(extractor)],
                threads=self._decoding_threads,
                processes=self._loaded.processes[id(extractor)],
                on_batch=self._show,
            )
        size = self._output.folder.size(self._output.name(shard)) or 0
        self._meter.flush()
        return {**_counts(tally), "bytes_written": size}

    def _show(self, batch: Tally) -> None:
        counts = _counts(batch)
        self._meter.add(
            images=batch.images + len(batch.failures),
            failed=len(batch.failures),
            forward_msec=counts["forward_msec"],
            wait_msec=counts["wait_msec"],
        )


def make_here(
    maker: ShardMaker,
    refs: Iterable[ImageRef],
    shards: int,
    *,
    finished: frozenset[int] = frozenset(),
    folder: str | None = None,
) -> None:
    """Make all shards in this process, one after the other.

    Args:
        maker: not set up yet.
        refs: references to the images.
        shards: number of shards.
        finished: numbers of those that an earlier run finished.
        folder: as `pipelines.features.references.pieces_of` takes it.

    Raises:
        ImagepivotError: see `ShardMaker`.
    """
    pieces: defaultdict[int, list[Piece]] = defaultdict(list)
    for shard, piece in pieces_of(refs, shards, left_out=finished, folder=folder):
        pieces[shard].append(piece)
    maker.set_up()
    for shard in range(shards):
        if shard not in finished:
            maker.make(shard, pieces.pop(shard, ()))


def _counts(tally: Tally) -> dict[str, int]:
    return {
        "images_read": tally.images,
        "images_failed": len(tally.failures),
        "decode_msec": round(tally.decode_seconds * 1000),
        "forward_msec": round(tally.forward_seconds * 1000),
        "wait_msec": round(tally.wait_seconds * 1000),
    }


COUNTERS = (*_counts(Tally()), "bytes_written")
"""What `ShardMaker.make` counts."""
