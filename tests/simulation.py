"""Datasets of any size without their content: invented ids, sentences and vectors of one number, through the code of real runs.

What the code does with keys, shards, listings, vocabularies, records, commits and manifests is real; images are neither read nor
computed, and captions are cut at spaces. Each function returns what its phases cost.
"""

import cProfile
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from extractors import ExtractorRequest
from pipelines.features.feature_shards import source_of, statistics_of
from pipelines.features.planning import list_images
from pipelines.features.ref_chunks import RefChunk, chunk_refs, from_chunks
from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.inputs.images.listing import digest_of
from pipelines.jobs import FeaturesJob
from pipelines.text.caption_shards import BLOCK_SCHEMA, CaptionStatistics, blocks_of, caption_rows
from pipelines.text.merge_sort import SortedRun as CaptionPiece
from pipelines.text.merge_sort import make_sorted_runs, merge_runs, number_captions, spill_to_disk
from pipelines.text.token_counts import count_tokens, sum_counters
from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.manifest import MANIFEST_NAME, Manifest
from schemas.parameters import CaptionsParameters, FeaturesParameters
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary
from schemas.writing.dataset_writer import commit
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.shard_writer import open_shard

CAPTIONS_PER_IMAGE = 10
_BLOCK_IMAGES = 800
_SENTENCES, _WORDS, _LENGTH = 20_000, 200_000, 8


class Cost(NamedTuple):
    """Cost of a phase over some images, captions, counts or types.

    Attributes:
        bytes: bytes of the files that it leaves.
        calls: calls of functions, Python's and those of compiled modules.
        passed: bytes that travel between workers in the local runner, whose launcher holds them.
    """

    phase: str
    items: int
    bytes: int
    calls: int
    passed: int


class Costs(list[Cost]):
    """Costs of phases in turn."""

    @contextmanager
    def phase(self, name: str, items: int) -> Iterator[tuple[list[int], list[int]]]:
        """Measure a block, which puts numbers of bytes into two lists: of files, and of what travels."""
        size: list[int] = []
        passed: list[int] = []
        with cProfile.Profile() as profile:
            yield size, passed
        calls = sum(entry.callcount for entry in profile.getstats())
        self.append(Cost(name, items, sum(size), calls, sum(passed)))


@dataclass(frozen=True)
class Images(ImageSource):
    """Images that nobody reads, with names as long as those of Flickr30k."""

    count: int

    @property
    def location(self) -> str:
        """Location of the collection, for messages."""
        return f"{self.count} invented images"

    def refs(self) -> Iterator[ImageRef]:
        """List the images."""
        for number in range(self.count):
            name = f"{number * 7919 % 9_999_999_967:010d}"
            yield ImageRef(name, f"{name}.jpg", 60_000 + number % 40_000, -1, f"{1_600_000_000_000_000_000 + number}")

    def read(self, ref: ImageRef) -> bytes:
        """Refuse to read."""
        raise AssertionError(ref)


def images(count: int, shards: int, folder: Path) -> list[Cost]:
    """List images as the launcher does, and cut the references into pieces as a worker does."""
    costs = Costs()
    job = FeaturesJob(Images(count), str(folder / "features"), ExtractorRequest("resnet50-pool"), shards=shards)
    with costs.phase("launcher: list the images", count) as (size, _):
        listing = list_images(job, keep=True)
        assert listing.cached is not None
        size.append(Path(listing.cached.path).stat().st_size)
    assert listing.count == count
    held: dict[int, list[RefChunk]] = {}
    with costs.phase("worker: deal out references", count) as (size, passed):
        for number, piece in chunk_refs(Images(count).refs(), len(listing.shards), folder=str(folder)):
            held.setdefault(number, []).append(piece)
            size.append(len(piece) if isinstance(piece, bytes) else piece[2])
        passed.append(_bytes_passed(held))
    some = sorted(held)[:: max(1, len(listing.shards) // 4)]
    assert [len(from_chunks(held[number])[0]) for number in some] == [listing.counts[number] for number in some]
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    return costs


def features(count: int, shards: int, folder: Path) -> list[Cost]:
    """Write a dataset of features whose vectors have one number, with records of all images, and look at it again."""
    costs = Costs()
    output = features_output(folder, shards)
    held: dict[int, list[RefChunk]] = {}
    for number, piece in chunk_refs(Images(count).refs(), shards, folder=str(folder)):
        held.setdefault(number, []).append(piece)
    with costs.phase("worker: write shards and records", count) as (size, _):
        for number in range(shards):
            refs = sorted(from_chunks(held.get(number, ()))[0])
            sources = [source_of(ref, "0" * 64) for ref in refs]
            entries = ((one.image_id, one.uri, str(one.bytes), one.version) for one in sources)
            values = pa.FixedSizeListArray.from_arrays(np.zeros(len(refs), np.float32), type=output.schema.field(1).type)
            with open_shard(output, number) as shard:
                shard.write(pa.table([pa.array([ref.image_id for ref in refs]), values], schema=output.schema))
                shard.statistics = statistics_of(sources, images=len(refs), failed=0)
                shard.sources, shard.version_digest = sources, digest_of(entries)
        size.append(_size(output.folder))
    _commit(costs, output, count)
    return costs


def features_output(folder: Path, shards: int) -> OutputDataset:
    """Return the dataset that `features` writes."""
    spec = FeatureSpec("simulated", (1,), "float32", "nothing")
    parameters = FeaturesParameters(feature=spec, extractor={"name": "simulated"}, extractor_fingerprint="0" * 64).to_json()
    return OutputDataset(Folder(str(folder / "features")), "features", parameters, shards=shards)


def captions(count: int, shards: int, folder: Path) -> list[Cost]:
    """Cut captions into pieces, write the shards, count their tokens, and look at the dataset again."""
    costs = Costs()
    parameters = CaptionsParameters(text=None, languages=(), portions=(), splits=(), train_splits=None, source={})
    output = OutputDataset(Folder(str(folder / "captions")), "captions", parameters.to_json(), shards=shards)
    pieces = folder / "pieces"
    pieces.mkdir()
    held: dict[int, list[CaptionPiece]] = {}
    with costs.phase("worker: deal out captions", count) as (size, passed):
        for number, piece in make_sorted_runs(blocks_of(_tables(count), 0), shards, folder=str(pieces)):
            held.setdefault(number, []).append(piece)
        size.append(sum(path.stat().st_size for path in pieces.iterdir()))
        passed.append(_bytes_passed(held))
    with costs.phase("worker: write shards", count) as (size, _):
        for number in range(shards):
            statistics = CaptionStatistics()
            with spill_to_disk(held.get(number, ())) as spilled, open_shard(output, number) as shard:
                for table in number_captions(merge_runs(spilled)):
                    rows = caption_rows([table.append_column("tokens", pc.split_pattern(table["text"], " "))])
                    statistics.add(rows)
                    shard.write(rows)
                shard.statistics = statistics.to_json()
        size.append(_size(output.folder))
    for path in pieces.iterdir():
        path.unlink()
    _commit(costs, output, count)
    dataset = open_dataset(output.folder.location, kind="captions")
    with costs.phase("worker: count tokens, merge", count):
        total = count_tokens(range(shards), dataset)
    assert sum(sum(counter.values()) for counter in total.values()) == count * _LENGTH
    return costs


def vocabulary(types: int, shards: int) -> list[Cost]:
    """Merge the counts of shards, each with a tenth of the types, and build the vocabulary: what grows is the number of types."""
    costs, random = Costs(), np.random.default_rng(0)
    some = types // 10

    def counts() -> Iterator[Counter[str]]:
        for _ in range(shards):
            yield Counter({f"word{number}": 1 for number in random.choice(types, some, replace=False).tolist()})

    with costs.phase("worker: merge counts of shards", shards * some):
        total = sum_counters(counts())
    with costs.phase("worker: build the vocabulary", len(total)):
        built = Vocabulary.from_counts({"en": total}, min_count=1)
    assert sum(total.values()) == shards * some
    assert len(built) == len(total) + 4
    return costs


def _commit(costs: Costs, output: OutputDataset, count: int) -> None:
    """Commit a dataset, and recognise it as a later run does."""
    with costs.phase("last worker: commit", count) as (size, _):
        commit(output)
        size.append(len(output.folder.read(MANIFEST_NAME)))
    with costs.phase("launcher: survey, manifest", count):
        manifest = OutputState(output).committed_manifest()
    assert manifest is not None
    assert manifest.rows == count == Manifest.read(output.folder).rows


def _tables(count: int) -> Iterator[pa.Table]:
    """Yield captions, ten of an image in two languages, in tables as sources give them."""
    random = np.random.default_rng(0)
    words = np.minimum(random.zipf(1.2, (_SENTENCES, _LENGTH)), _WORDS)
    sentences = pa.array([" ".join(f"w{word}" for word in sentence) for sentence in words.tolist()])
    languages = pa.array(["en", "de"] * (CAPTIONS_PER_IMAGE // 2) * _BLOCK_IMAGES)
    schema = pa.schema([field for field in BLOCK_SCHEMA if field.name != "position"])
    for first in range(0, count // CAPTIONS_PER_IMAGE, _BLOCK_IMAGES):
        ids = [f"{number * 7919 % 9_999_999_967:010d}" for number in range(first, min(first + _BLOCK_IMAGES, count // 10))]
        rows = len(ids) * CAPTIONS_PER_IMAGE
        columns = {
            "image_id": pa.array(ids).take(pa.array(np.repeat(np.arange(len(ids)), CAPTIONS_PER_IMAGE))),
            "language": languages.slice(0, rows),
            "portion": pa.repeat("comparable", rows),
            "index": pa.repeat(pa.scalar(-1, pa.int16()), rows),
            "split": pa.repeat("train", rows),
            "text": sentences.take(pa.array(random.integers(0, _SENTENCES, rows))),
        }
        yield pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _bytes_passed(held: Mapping[int, Sequence[object]]) -> int:
    return sum(len(pickle.dumps((number, piece))) for number, pieces in held.items() for piece in pieces)


def _size(folder: Folder) -> int:
    return sum(entry.size for entry in folder.list() if re.match(r"part-|\.records/", entry.name))
