"""Writers of shards in worker processes.

Local workers call them (`pipelines.running.process_pool`), or Beam does (`pipelines.running.transforms.WriteShards`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

from schemas.writing.output import OutputDataset

Share: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Calls its argument once per process, and returns that result in all threads (`apache_beam.utils.shared.Shared.acquire`)."""


class ShardWorker(ABC):
    """Writer of shards in a worker process; picklable before `set_up`."""

    output: OutputDataset
    _is_set_up = False

    @abstractmethod
    def set_up(self, share: Share) -> None:
        """Load the state for all shards; ``share`` loads the part that threads share."""

    @abstractmethod
    def write(self, shard: Any) -> int:
        """Write a shard, given its index, or index and inputs; return its index."""

    def __call__(self, shard: Any) -> int:
        """Write a shard in a local worker, which is set up before its first."""
        if not self._is_set_up:
            self.set_up(lambda load: load())
            self._is_set_up = True
        return self.write(shard)
