"""Encoded captions as flat arrays, and the data regimes of Kádár et al. 2018.

Shapes: ``N`` captions, ``I`` images, ``L`` languages, ``T`` tokens of all captions, ``R`` selected rows, ``P`` pairs.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.parameters import EncodedParameters
from train.data.batches import CaptionBatch, TokenVectors, token_positions

_LABELS = ("split", "language", "portion")
_CONTENT = {"encoded": "token_ids", "embeddings": "embedding"}


@dataclass(frozen=True)
class Captions:
    """Captions, sorted by image id, language, portion and index.

    Attributes:
        token_ids: int32 ``[T]``, concatenated token ids, including ``<start>`` and ``<end>``.
        offsets: int64 ``[N + 1]``; caption n has ``token_ids[offsets[n]:offsets[n + 1]]``.
        images: int32 ``[N]``, position in ``image_ids``.
        languages: int8 ``[N]``, position in ``language_names``.
        portions: int8 ``[N]``, position in ``portion_names``.
        indices: int16 ``[N]``, index of the caption among those of its image, language and portion.
        image_ids: ``[I]``, ascending.
        language_names, portion_names: in the requested order.
        split: the split, or several joined by commas, for messages.
        vectors: precomputed token vectors, or None. Captions that are vectors have one token each.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    images: np.ndarray
    languages: np.ndarray
    portions: np.ndarray
    indices: np.ndarray
    image_ids: tuple[str, ...]
    language_names: tuple[str, ...]
    portion_names: tuple[str, ...]
    split: str
    vectors: TokenVectors | None = None

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of token ids, int64 ``[N]``, including ``<start>`` and ``<end>``."""
        return np.diff(self.offsets)

    def rows_of(self, language: str) -> np.ndarray:
        """Return the rows of a language, int64, ascending; none for an unknown one."""
        if language not in self.language_names:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.languages == self.language_names.index(language))

    def language_of(self, rows: np.ndarray) -> str | None:
        """Return the language of rows; None for several languages."""
        languages = np.unique(self.languages[rows])
        return self.language_names[languages[0]] if len(languages) == 1 else None

    def ids(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the ids ``IMAGE/LANGUAGE/PORTION/INDEX`` of rows."""
        columns = (self.images, self.languages, self.portions, self.indices)
        image_ids, languages, portions = self.image_ids, self.language_names, self.portion_names
        keys = zip(*(column[rows].tolist() for column in columns), strict=True)
        return np.array([f"{image_ids[i]}/{languages[n]}/{portions[p]}/{index}" for i, n, p, index in keys], object)

    def batch(self, rows: np.ndarray) -> CaptionBatch:
        """Return rows as a batch for a model."""
        return CaptionBatch(self.token_ids, self.offsets, rows, self.vectors)

    def select(self, rows: np.ndarray) -> Self:
        """Return some captions; ``image_ids`` and names stay complete.

        Rows are integers ``[R]``, in any order, or bool ``[N]``.
        """
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        return replace(
            self,
            token_ids=self.token_ids[token_positions(self.offsets[rows], lengths)],
            offsets=np.concatenate([[0], np.cumsum(lengths)]),
            images=self.images[rows],
            languages=self.languages[rows],
            portions=self.portions[rows],
            indices=self.indices[rows],
            vectors=None if self.vectors is None else replace(self.vectors, starts=self.vectors.starts[rows]),
        )

    def compact(self) -> Self:
        """Remove the ``image_ids`` of images without captions."""
        present, images = np.unique(self.images, return_inverse=True)
        return replace(self, images=images.astype(np.int32), image_ids=tuple(self.image_ids[n] for n in present.tolist()))


def read_captions(dataset: Dataset, *, split: str | Sequence[str], portions: Mapping[str, Sequence[str]]) -> Captions:
    """Read the captions of one split or several, in some portions by language.

    The dataset is of kind ``encoded``, or ``embeddings``.

    Raises:
        DatasetError: the dataset lacks these captions.
        UsageError: a portion of a language is repeated.
    """
    splits = (split,) if isinstance(split, str) else tuple(split)
    for wanted in portions.values():
        if len(set(wanted)) < len(wanted):
            raise UsageError(f"portions are {', '.join(wanted)}: name each once")
    portion_names = tuple(dict.fromkeys(chain(*portions.values())))
    names = {"split": splits, "language": tuple(portions), "portion": portion_names}
    pairs = [(index, portion_names.index(portion)) for index, wanted in enumerate(portions.values()) for portion in wanted]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tables = list(pool.map(lambda shard: _read_shard(dataset, shard, names, pairs), range(dataset.num_shards)))
    table = pa.concat_tables(tables).unify_dictionaries()
    for index, name in enumerate(splits):
        if len(splits) > 1 and not pc.any(pc.equal(table["split"], index)).as_py():
            raise DatasetError(no_captions(dataset, f"split {name!r} in these languages and portions"))
    captions = _join(table, names)
    if dataset.kind == "encoded":
        check_token_ids(dataset, captions.token_ids, captions.lengths)
    for language, portion in pairs:
        if not np.any((captions.languages == language) & (captions.portions == portion)):
            labels = f"language {captions.language_names[language]!r}, portion {captions.portion_names[portion]!r}"
            raise DatasetError(no_captions(dataset, f"split {captions.split!r}, {labels}"))
    return captions


def labels_of(dataset: Dataset) -> dict[tuple[str, str, str], int]:
    """Count captions by split, language and portion."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for table in dataset.shards(_LABELS):
        strings = pa.table({name: table[name].cast(pa.string()) for name in _LABELS})
        for row in strings.group_by(list(_LABELS)).aggregate([([], "count_all")]).to_pylist():
            counts[row["split"], row["language"], row["portion"]] += row["count_all"]
    return counts


def check_token_ids(dataset: Dataset, token_ids: np.ndarray, lengths: np.ndarray) -> None:
    """Check token ids: one outside the vocabulary would abort the process on a GPU.

    Raises:
        DatasetError: an id is not in the vocabulary, or a caption has no ids.
    """
    size = EncodedParameters.from_json(dataset.manifest.parameters).vocabulary_size or np.iinfo(token_ids.dtype).max
    outside = token_ids[(token_ids < 0) | (token_ids >= size)]
    if len(outside) or not lengths.all():
        defect = f"token id {outside[0]}, expected 0 to {size - 1:,}" if len(outside) else "a caption without token ids"
        raise DatasetError(
            f"{dataset.folder.location!r} is damaged: it holds {defect}. Run 'imagepivot validate' on it, "
            "and copy it again or encode the captions again"
        )


def _read_shard(dataset: Dataset, shard: int, names: Mapping[str, Sequence[str]], pairs: Sequence[tuple[int, int]]) -> pa.Table:
    """Read the selected captions of a shard, with labels as positions in ``names``."""
    table = dataset.shard(shard, ["image_id", *_LABELS, "index", _CONTENT[dataset.kind]])
    codes = {label: _codes(table[label], names[label]) for label in _LABELS}
    keep = np.zeros(table.num_rows, bool)
    for language, portion in pairs:
        keep |= (codes["language"] == language) & (codes["portion"] == portion)
    keep &= codes["split"] >= 0
    table = pa.table({name: codes.get(name, table[name]) for name in table.column_names}).filter(pa.array(keep))
    return table.set_column(0, "image_id", table["image_id"].combine_chunks().dictionary_encode())


def _codes(labels: pa.ChunkedArray, names: Sequence[str]) -> np.ndarray:
    """Return the position of each label in ``names``, int8, -1 for others."""
    codes = labels.unify_dictionaries().combine_chunks()
    positions = pc.fill_null(pc.index_in(codes.dictionary, pa.array(names, codes.dictionary.type)), -1).to_numpy()
    return positions.astype(np.int8)[codes.indices.to_numpy()]


def _join(table: pa.Table, names: Mapping[str, Sequence[str]]) -> Captions:
    """Sort the captions of all shards by image; each image is in one shard."""
    image_ids = table["image_id"].combine_chunks()
    order = pc.array_sort_indices(image_ids.dictionary).to_numpy()
    rank = np.argsort(order).astype(np.int32)
    images = rank[image_ids.indices.to_numpy()]
    content, vectors = table[table.num_columns - 1], None
    values, lengths = pc.list_flatten(content).to_numpy(), pc.list_value_length(content).to_numpy()
    if pa.types.is_fixed_size_list(content.type):
        vectors = TokenVectors(values.reshape(-1, content.type.list_size), np.arange(len(table)))
        values, lengths = np.zeros(len(table), np.int32), np.ones(len(table), np.int64)
    captions = Captions(
        token_ids=values,
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        images=images,
        languages=table["language"].to_numpy(),
        portions=table["portion"].to_numpy(),
        indices=table["index"].to_numpy(),
        image_ids=tuple(image_ids.dictionary.take(pa.array(order)).to_pylist()),
        language_names=tuple(names["language"]),
        portion_names=tuple(names["portion"]),
        split=",".join(names["split"]),
        vectors=vectors,
    )
    return captions.select(np.argsort(images, kind="stable"))


def no_captions(dataset: Dataset, labels: str) -> str:
    """Return the message that no captions have some labels, and the existing labels."""
    by_split: dict[str, list[str]] = {}
    for (split, language, portion), count in sorted(labels_of(dataset).items()):
        by_split.setdefault(split, []).append(f"{language} {portion} {count:,}")
    available = "; ".join(f"{split}: {', '.join(counts)}" for split, counts in by_split.items()) or "nothing"
    return f"{dataset.folder.location!r} has no captions of {labels}. It has: {available}"


@dataclass(frozen=True)
class ByImage:
    """Captions grouped by image and language.

    Attributes:
        rows: int32 ``[N]``, rows of `Captions`, sorted by group.
        starts: int64 ``[I, L]``, position in ``rows`` of the first caption of each group.
        counts: int64 ``[I, L]``, number of captions in each group.
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, captions: Captions) -> Self:
        """Group captions; the order within a group stays."""
        shape = len(captions.image_ids), len(captions.language_names)
        groups = captions.images.astype(np.int64) * shape[1] + captions.languages
        counts = np.bincount(groups, minlength=shape[0] * shape[1])
        rows = np.argsort(groups, kind="stable").astype(np.int32)
        return cls(rows, (np.cumsum(counts) - counts).reshape(shape), counts.reshape(shape))


def caption_pairs(captions: Captions) -> np.ndarray:
    """Return all caption pairs, int32 ``[P, 2]`` (Kádár et al. 2018, section 3).

    A pair is two rows of one image in different languages, in the order of ``language_names``. With five English and five German
    captions an image has 25 pairs; with one French and one Czech caption added it has 46 (section 6.2): 25, 4 times 5, and 1.
    """
    by_image = ByImage.of(captions)
    pairs = [np.zeros((0, 2), np.int32)]
    for a, b in combinations(range(len(captions.language_names)), 2):
        counts = by_image.counts[:, a] * by_image.counts[:, b]  # [I]
        image = np.repeat(np.arange(len(counts)), counts)  # [P]
        index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # [P], from 0 in each image
        row, column = np.divmod(index, by_image.counts[image, b])
        rows = by_image.starts[image, a] + row, by_image.starts[image, b] + column
        pairs.append(by_image.rows[np.stack(rows, axis=1)])
    return np.concatenate(pairs)


def one_caption_per_image(captions: Captions, seed: int) -> Captions:
    """Keep one random caption per image and language (Kádár et al. 2018, section 5.2).

    All captions of an image are equally likely, independently in each language.
    """
    languages = len(captions.language_names)
    groups = captions.images.astype(np.int64) * languages + captions.languages
    # Sorted, so that the sample does not depend on the order of rows.
    order = np.lexsort((captions.indices, captions.portions, groups))
    present, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    keys = np.empty(len(present), np.uint64)
    for index, language in enumerate(captions.language_names):
        in_language = present % languages == index
        keys[in_language] = _random_keys(captions, present[in_language] // languages, seed, f"caption/{language}")
    chosen = order[starts + (keys % counts.astype(np.uint64)).astype(np.int64)]
    return captions.select(np.sort(chosen))


def half_of_images(captions: Captions, seed: int) -> Captions:
    """Keep the captions of a random half of the images, equal for every language.

    The half is rounded down (section 5.3). With one language this is Half Monolingual, with two Bi-overlap.
    """
    return captions.select(_in_half(captions, seed)[captions.images])


def disjoint_halves(captions: Captions, seed: int) -> Captions:
    """Keep a separate half of the images for each of two languages (section 5.3).

    The first language has the half of `half_of_images`. This is Bi-disjoint: no image has captions in both languages.
    """
    return captions.select(_in_half(captions, seed)[captions.images] == (captions.languages == 0))


def _in_half(captions: Captions, seed: int) -> np.ndarray:
    """Return a bool ``[I]`` mask of a random half of the images with captions."""
    present = np.unique(captions.images)
    order = np.argsort(_random_keys(captions, present, seed, "half"), kind="stable")
    half = np.zeros(len(captions.image_ids), bool)
    half[present[order[: len(present) // 2]]] = True
    return half


def _random_keys(captions: Captions, images: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """Return a random uint64 per image, a function of seed, purpose and image id."""
    ids = (captions.image_ids[image] for image in images.tolist())
    digests = (hashlib.blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=8).digest() for name in ids)
    return np.frombuffer(b"".join(digests), "<u8")
