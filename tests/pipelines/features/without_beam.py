"""What ``imagepivot features`` does, without Beam, in processes that end at a chosen write: for thousands of random runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pipelines.features.feature_shards import write_feature_shard
from pipelines.inputs.images import Listing, open_images
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from tests.fake_extractors import SPEC, ColourExtractor


def plan(images: Path, folder: Path, shards: int, **options) -> tuple[OutputDataset, Callable[[frozenset[int]], None]]:
    """Return what a run writes, and the function that writes all shards but the finished ones."""
    source = open_images(images)
    listing = Listing.of(source.refs(), shards)
    parameters = {"feature": SPEC.to_json()}
    output = OutputDataset(
        Folder(str(folder)), "features", parameters, shards=shards, listings=listing.shards, states=listing.states
    )

    def make_missing(finished: frozenset[int]) -> None:
        for number in sorted(set(range(shards)) - finished):
            refs = [ref for ref in source.refs() if shard_of(ref.image_id, shards) == number]
            how = {"extractor": ColourExtractor(), "batch_size": 4, "threads": 1, **options}
            write_feature_shard(output, number, refs, images=source, **how)

    return output, make_missing


def end_before(writes: int) -> None:
    """Let this process end with code 9, without any cleaning up, instead of its next write or deletion after so many."""
    left = iter(range(writes))

    def end_or(operation):
        def act(*arguments):
            if next(left, None) is None:
                os._exit(9)
            return operation(*arguments)

        return act

    Folder._publish, Folder.delete = end_or(Folder._publish), end_or(Folder.delete)
