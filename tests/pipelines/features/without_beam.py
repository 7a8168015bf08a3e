"""What ``imagepivot features`` does, without Beam, in processes that end at a chosen write: for thousands of random runs."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from pipelines.features.feature_shards import write_feature_shard
from pipelines.features.inference import LoadedExtractor
from pipelines.inputs.images.listing import Listing
from pipelines.inputs.images.opening import open_images
from schemas.errors import DatasetError
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from tests.fake_extractors import SPEC, ColourExtractor


def plan(
    images: Path, folder: Path, shards: int, policy: ReusePolicy
) -> tuple[OutputDataset, Callable[[frozenset[int]], None]]:
    """Return what a run writes, and the function that writes all shards but the finished ones."""
    source = open_images(images)
    listing = Listing.of(source.refs(), shards)
    parameters = {"feature": SPEC.to_json()}
    output = OutputDataset(
        Folder(str(folder)),
        "features",
        parameters,
        shards=shards,
        listings=listing.shards,
        version_digests=listing.version_digests,
    )

    def make_missing(finished: frozenset[int]) -> None:
        for number in sorted(set(range(shards)) - finished):
            refs = [ref for ref in source.refs() if shard_of(ref.image_id, shards) == number]
            write_feature_shard(output, number, refs, policy, source, LoadedExtractor(ColourExtractor(), 4))

    return output, make_missing


MINUTES = float(os.environ.get("IMAGEPIVOT_FUZZ_MINUTES", "0"))


def check_seeds(check: Callable[[int, Path], object], root: Path, count: int) -> Iterator[object]:
    """Yield what a check in a folder of its own returns for so many seeds, or for fresh ones as long as is asked for."""
    deadline = time.monotonic() + 60 * MINUTES
    first = int(time.time()) * 1000 if MINUTES else 0
    for seed in itertools.count(first):
        if seed >= first + count and time.monotonic() >= deadline:
            return
        yield check(seed, root / str(seed))
        shutil.rmtree(root / str(seed))


def end_before(writes: int) -> None:
    """Let this process end with code 9, without any cleaning up, instead of its next write or deletion after so many."""
    left = iter(range(writes))

    def end_or(operation):
        def act(folder, name, data=None, **conditions):
            # Bytes are written to a temporary file first, whose path is put.
            if not isinstance(data, bytes) and next(left, None) is None:
                os._exit(9)
            return operation(folder, name, *(() if data is None else (data,)), **conditions)

        return act

    Folder.put, Folder.delete = end_or(Folder.put), end_or(Folder.delete)


def fork(action: Callable[[], object], writes: int) -> int:
    """Start an action in a process that ends before one of its next writes; it ends with 1 where it is refused, as it may be."""
    child = os.fork()
    if child:
        return child
    code = 7
    try:
        end_before(writes)
        try:
            action()
            code = 0
        except DatasetError as error:
            # A killed task may leave a new file of failures beside an old shard.
            code = (
                1
                if re.search(
                    "is in use|[Nn]othing was written|has written shards|cannot be committed, .*: run task", str(error)
                )
                else 7
            )
            if code == 7:
                print(error, flush=True)
    except BaseException:  # noqa: BLE001 -- the process ends below, before Python would print it
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
