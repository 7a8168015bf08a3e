"""Jobs that compute each shard from the same shard of inputs, without a shuffle.

Local workers write them (`write_missing`), or Beam distributes them (`pipelines.running.transforms.WriteShards`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from pipelines.running.process_pool import Map
from schemas.writing.dataset_writer import write_shards
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter

Share: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls its argument once per process, and returns that result in all threads (`apache_beam.utils.shared.Shared.acquire`)."""


class ShardWork(Protocol):
    """Writer of shards in a worker; picklable before ``set_up``."""

    def set_up(self, share: Share) -> None:
        """Load the state for all shards; ``share`` loads the part that threads share."""

    def write(self, shard: int, writer: ShardWriter) -> None:
        """Write the rows and statistics of a shard."""


def write_missing(output: OutputDataset, work: ShardWork, finished: frozenset[int], run: Map) -> None:
    """Write the unfinished shards with local workers."""
    for _ in run(_ShardWriting(output, work), output.missing(finished)):
        pass


class _ShardWriting:
    """Writes one shard after another, and sets up the work before the first."""

    def __init__(self, output: OutputDataset, work: ShardWork) -> None:
        self._output = output
        self._work = work
        self._is_set_up = False

    def __call__(self, shard: int) -> None:
        if not self._is_set_up:
            self._work.set_up(lambda load: load())
            self._is_set_up = True
        write_shards(self._output, [shard], self._work.write)
