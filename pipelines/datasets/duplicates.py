"""``imagepivot duplicates``: groups of nearly equal images and of equal captions.

A group is a connected component of matching pairs.
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from itertools import combinations_with_replacement
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from pipelines.datasets.near_duplicates import Links, PictureDigest, near_pairs, near_pictures, read_digests
from pipelines.jobs import DuplicatesJob
from pipelines.running.meter import Meter
from schemas.console.tables import Row, Table, number_columns
from schemas.dataset import Dataset, open_dataset
from schemas.duplicates import KINDS, Duplicate
from schemas.errors import DatasetError, InputError
from schemas.keys import normalization_hint
from schemas.kinds import KEY_COLUMNS
from schemas.vocabulary import UNK
from schemas.writing.records import read_record

MIN_COSINE = 0.93
"""Default threshold. With EfficientNet-Lite0, different photographs reach 0.60, and drawn scenes 0.92."""

MIN_UNTRAINED_COSINE = 1 - 1e-6
"""Default threshold for untrained networks: equal up to rounding. Different scenes reach 0.9985."""

_Matches: TypeAlias = Iterator[tuple[str, Iterable[Links]]]
_Remark: TypeAlias = Callable[[str], None]
logger = logging.getLogger(__name__)


def find_duplicates(job: DuplicatesJob, meter: Meter = Meter(), on_warning: _Remark = logger.warning) -> list[Duplicate]:
    """Find equal and nearly equal images and captions.

    ``on_warning`` receives sentences about comparisons that the data does not allow.

    Raises:
        DatasetError: a dataset is missing, damaged or of another kind.
        InputError: no picture belongs to the features, or two have the same id.
    """
    features = _open(job.features, "features", "regions")
    captions = _read_captions(_open(job.captions, "captions", "encoded")) if job.captions else None
    rows = [] if captions is None else captions.select([*KEY_COLUMNS["captions"], "split"]).to_pylist()
    splits: dict[str, set[str]] = {}
    for row in rows:
        splits.setdefault(row["image_id"], set()).add(row["split"])
    ids = sorted(features.image_ids())
    images = [{"image_id": image_id, "split": ",".join(sorted(splits.get(image_id, ())))} for image_id in ids]
    duplicates = _group(images, _match_images(job, features, ids, meter, on_warning))
    if captions is not None:
        duplicates += _group(rows, _match_captions(captions), start=len({duplicate.group for duplicate in duplicates}))
    return duplicates


def count_table(duplicates: Sequence[Duplicate]) -> Table:
    """Count groups by pair of splits, and their items there by kind."""
    groups: dict[int, list[Duplicate]] = {}
    for duplicate in duplicates:
        groups.setdefault(duplicate.group, []).append(duplicate)
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for members in groups.values():
        sizes = Counter(member.split for member in members)
        for pair in combinations_with_replacement(sorted(sizes), 2):
            if len(set(pair)) > 1 or sizes[pair[0]] > 1:
                item = f"captions {members[0].language}" if members[0].language else "images"
                count = counts.setdefault((item, *pair), Counter())
                count.update(["groups", *(member.kind for member in members if member.split in pair)])
    names = ("groups", *(kind for kind in KINDS if any(count[kind] for count in counts.values())))
    rows: list[Row] = [(*key, *(count[name] or None for name in names)) for key, count in sorted(counts.items())]
    notes = ["groups with items of both splits, and the numbers of these items by their strongest match"]
    return Table(("", "split", "and split", *number_columns(*names, spec=",")), rows, "duplicates", notes)


def _open(location: str, *kinds: str) -> Dataset:
    dataset = open_dataset(location)
    if dataset.kind not in kinds:
        raise DatasetError(f"{location!r} holds {dataset.kind}, expected {' or '.join(kinds)}: give a folder of these")
    return dataset


def _group(rows: Sequence[Mapping[str, Any]], matches: _Matches, start: int = 0) -> list[Duplicate]:
    """Return the members of groups of several images, numbered from ``start``."""
    labels, kinds, similarities = np.arange(len(rows)), np.full(len(rows), -1), np.zeros(len(rows), np.float32)
    for kind, parts in matches:
        for first, second, values in parts:
            for items in (first, second):
                is_strongest = np.isin(kinds[items], (-1, KINDS.index(kind)))
                np.maximum.at(similarities, items[is_strongest], values[is_strongest])
                kinds[items[is_strongest]] = KINDS.index(kind)
            graph = coo_array((np.ones(len(first), bool), (labels[first], labels[second])), (len(rows), len(rows)))
            labels = connected_components(graph, directed=False)[1][labels]
    groups: dict[int, list[int]] = {}
    for item in np.flatnonzero(kinds >= 0).tolist():
        groups.setdefault(int(labels[item]), []).append(item)
    several = [items for items in groups.values() if len({rows[item]["image_id"] for item in items}) > 1]
    return [
        Duplicate(
            group,
            KINDS[kinds[item]],
            round(float(similarities[item]), 6),
            **{name: str(value) for name, value in rows[item].items()},
        )
        for group, items in enumerate(several, start)
        for item in items
    ]


def _link_equal(keys: Sequence[Hashable]) -> list[Links]:
    """Link each item with the first one of an equal key; None equals no key."""
    first_items: dict[Hashable, int] = {}
    links = [(first_items.setdefault(key, item), item) for item, key in enumerate(keys) if key is not None]
    first, second = np.array([link for link in links if link[0] != link[1]], np.int64).reshape(-1, 2).T
    return [(first, second, np.ones(len(first), np.float32))]


def _match_images(job: DuplicatesJob, features: Dataset, ids: Sequence[str], meter: Meter, on_warning: _Remark) -> _Matches:
    files, warning = _recorded_files(features), ""
    if not job.images:
        if not files:
            warning = f"{job.features!r} keeps no digests of files, and --images is missing: only features are compared"
        yield "bytes", _link_equal([files.get(image_id) for image_id in ids])
    else:
        images = job.reading.open(job.images)
        digests = read_digests(images, ids, meter)
        if missing := [image_id for image_id in ids if image_id not in digests]:
            message = f"{images.location!r} lacks {len(missing):,} of {len(ids):,} images of the features, e.g. {missing[0]!r}"
            if not digests:
                hint = normalization_hint(missing, (ref.image_id for ref in images.refs()))
                raise InputError(f"{message}: {hint or 'give the images that the features are of'}")
            warning = f"{message}: only their features are compared"
        pictures = [digests.get(image_id, PictureDigest(files.get(image_id))) for image_id in ids]
        yield "bytes", _link_equal([picture.file for picture in pictures])
        yield "pixels", _link_equal([picture.pixels for picture in pictures])
        yield "hash", near_pictures(pictures)
    yield "cosine", _near_features(job, features, ids, meter)
    if warning:  # After all errors.
        on_warning(warning)


def _recorded_files(dataset: Dataset) -> dict[str, str]:
    """Return the known SHA-256 of image files, from the records of shards."""
    records = (read_record(dataset.folder, shard.path, whole=True) for shard in dataset.manifest.shards)
    sources = (source for record in records if record for source in record.sources or ())
    return {source.image_id: source.sha256 for source in sources if source.sha256}


def _near_features(job: DuplicatesJob, dataset: Dataset, ids: Sequence[str], meter: Meter) -> Iterator[Links]:
    """Link images with equal features, and with a high cosine of standardized ones.

    Values that are large for all images would hide the others: different images of an untrained network have cosines of 0.999.
    """
    vectors, items = _pool(dataset), np.searchsorted(np.array(ids), np.array(dataset.image_ids()))
    if not (has_values := vectors.any(1)).all():  # Images without regions are not alike.
        vectors, items = vectors[has_values], items[has_values]
    equal = _link_equal([blake2b(vector, digest_size=16).digest() for vector in vectors])
    yield from ((items[first], items[second], ones) for first, second, ones in equal)
    vectors -= vectors.mean(0, dtype=np.float64).astype(np.float32)
    for letters, axis in (("d", 0), ("n", 1)):  # Divide by the deviations of values, then by the norms of vectors.
        lengths = np.sqrt(np.einsum(f"nd,nd->{letters}", vectors, vectors, dtype=np.float64)).astype(np.float32)
        vectors /= np.expand_dims(np.where(lengths > 0, lengths, 1), axis)
    min_cosine = job.min_cosine or (MIN_UNTRAINED_COSINE if dataset.untrained else MIN_COSINE)
    for first, second, cosines in near_pairs(vectors, min_cosine, meter):
        yield items[first], items[second], np.minimum(cosines, 1)


def _pool(dataset: Dataset) -> np.ndarray:
    """Average the crops, cells or regions of each image, float32 ``[N, D]``."""
    assert dataset.spec is not None
    is_regions, done = dataset.kind == "regions", 0
    pooled = np.empty((len(dataset), dataset.spec.shape[-1]), np.float32)
    columns = ["image_id", "features", "num_regions"] if is_regions else ["image_id", "feature"]
    for batch in dataset.batches(columns):
        rows = pooled[done : done + batch.num_rows]
        values = pc.list_flatten(batch[columns[1]]).to_numpy().reshape(len(rows), -1, pooled.shape[1])
        counts = np.maximum(batch["num_regions"].to_numpy(), 1) if is_regions else np.full(len(rows), values.shape[1])
        np.divide(values.sum(1, dtype=np.float32), counts[:, np.newaxis], out=rows)  # Rows after the regions are zero.
        if not np.isfinite(rows).all():
            image_id = batch["image_id"][int(np.argmin(np.isfinite(rows).all(1)))].as_py()
            raise DatasetError(f"{dataset.folder.location!r} has NaN or infinite features of {image_id!r}: extract it again")
        done += len(rows)
    return pooled


def _read_captions(dataset: Dataset) -> pa.Table:
    """Read keys, splits, and texts or token ids, sorted by key."""
    keys = KEY_COLUMNS["captions"]
    table = dataset.table([*keys, "split", "text" if dataset.kind == "captions" else "token_ids"])
    names = [pa.field(field.name, pa.string() if pa.types.is_dictionary(field.type) else field.type) for field in table.schema]
    return table.cast(pa.schema(names)).sort_by([(name, "ascending") for name in keys])


def _match_captions(captions: pa.Table) -> _Matches:
    languages, contents = captions["language"].to_pylist(), captions.columns[-1].to_pylist()
    if captions.column_names[-1] == "text":
        yield "text", _link_equal(list(zip(languages, contents, strict=True)))
        words: list[Hashable] = [fold(text) or None for text in contents]
    else:
        words = [None if UNK in ids else tuple(ids) for ids in contents]
    yield "words", _link_equal([word and (language, word) for language, word in zip(languages, words, strict=True)])


@cache
def _fold_character(character: str) -> str:
    category = unicodedata.category(character)
    return "" if category == "Cf" else " " if category[0] in "PZC" else character


def fold(text: str) -> str:
    """Return the words of a text: NFKC, case folded, without punctuation.

    >>> fold("A man\u2019s  CAF\u00c9!") == fold("a man's cafe\u0301")
    True
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join("".join(map(_fold_character, folded)).split())
