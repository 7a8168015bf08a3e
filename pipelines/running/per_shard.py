"""Work on the shards of a dataset, each of which follows from the same shard of the inputs.

`schemas.writing.dataset_writer.write_shards` writes them one after the other: all of them in this process, or in each call of
`pipelines.running.transforms.WriteShards` the one that Beam deals out. Nothing is shuffled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from schemas.writing.dataset_writer import write_shards
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter

Share: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Returns what its argument loads, or what it has loaded before for another thread of the process."""


class ShardWork(Protocol):
    """Writes the shards that one worker gets; can be pickled until it is set up."""

    def set_up(self, share: Share) -> None:
        """Load what all shards need; ``share`` loads what threads can use together."""

    def write(self, shard: int, writer: ShardWriter) -> None:
        """Write the rows of a shard, and set its statistics."""


def write_missing(output: OutputDataset, work: ShardWork, finished: frozenset[int]) -> None:
    """Write the shards that are not finished in this process."""
    work.set_up(lambda load: load())
    for _ in write_shards(output, output.missing(finished), work.write):
        pass
