"""Jobs that compute each shard from the same shard of inputs, without a shuffle.

One process writes all shards in turn (`write_missing`), or Beam distributes them (`pipelines.running.transforms.WriteShards`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

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


def write_missing(output: OutputDataset, work: ShardWork, finished: frozenset[int]) -> None:
    """Write the unfinished shards in this process."""
    work.set_up(lambda load: load())
    write_shards(output, output.missing(finished), work.write)
