"""Encoded captions as flat arrays: one read of the shards, no Python object for a caption.

Letters in shapes: ``N`` captions, ``I`` images, ``T`` tokens of all captions, ``R`` chosen rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError

__all__ = ["Captions", "labels_of", "read_captions"]

_LABELS = ("split", "language", "portion")


@dataclass(frozen=True)
class Captions:
    """Captions of one split, sorted by image id, language, portion and index, whatever the number of shards.

    Attributes:
        token_ids: int32 ``[T]``, all captions one after the other, ``<start>`` and ``<end>`` included.
        offsets: int64 ``[N + 1]``; caption n has ``token_ids[offsets[n]:offsets[n + 1]]``.
        images: int32 ``[N]``, position in ``image_ids``.
        languages: int8 ``[N]``, position in ``language_names``.
        portions: int8 ``[N]``, position in ``portion_names``.
        indices: int16 ``[N]``, number of the caption among those of its image, language and portion.
        image_ids: ``[I]``, ascending.
        language_names: in the order that was asked for.
        portion_names: in the order that was asked for.
        split: the split.
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

    def __len__(self) -> int:
        return len(self.images)

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 ``[N]``: number of token ids, ``<start>`` and ``<end>`` included."""
        return np.diff(self.offsets)

    def rows_of(self, language: str) -> np.ndarray:
        """int64: the rows of a language, ascending; none for a language that is not in ``language_names``."""
        if language not in self.language_names:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.languages == self.language_names.index(language))

    def select(self, rows: np.ndarray) -> Captions:
        """The captions of some rows, in that order; ``image_ids`` and names stay as they are.

        Args:
            rows: integers ``[R]``, or bool ``[N]``.
        """
        rows = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        # Token t of the result lies as far from the beginning of its caption as in the source.
        sources = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return replace(
            self,
            token_ids=self.token_ids[sources],
            offsets=offsets,
            images=self.images[rows],
            languages=self.languages[rows],
            portions=self.portions[rows],
            indices=self.indices[rows],
        )

    def compact(self) -> Captions:
        """The same captions; ``image_ids`` are only those of images that have a caption."""
        present, images = np.unique(self.images, return_inverse=True)
        return replace(self, images=images.astype(np.int32), image_ids=tuple(self.image_ids[n] for n in present.tolist()))


def read_captions(
    dataset: Dataset,
    *,
    split: str,
    languages: Sequence[str] | None = None,
    portions: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> Captions:
    """Reads the captions of a split.

    Args:
        dataset: of kind ``encoded``.
        split: the split.
        languages: which languages; all of the split when not given.
        portions: which portions, or by language which (its keys are then the languages); all when not given.

    Raises:
        DatasetError: the dataset is of another kind, or has no such captions; the message lists what it has.
        UsageError: languages and the keys of ``portions`` differ, or a language or portion is named twice.
    """
    if dataset.kind != "encoded":
        raise DatasetError(
            f"{dataset.folder.location!r} holds {dataset.kind}, expected encoded captions: run 'imagepivot encode' on them "
            "and give its output"
        )
    wanted = _Wanted(split, _chosen(dataset, split, languages, portions))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = list(pool.map(lambda number: _read_shard(dataset, number, wanted), range(dataset.num_shards)))
    captions = _joined(parts, wanted)
    _check_all_found(captions, wanted, dataset)
    return captions


def labels_of(dataset: Dataset) -> dict[tuple[str, str, str], int]:
    """Number of captions by split, language and portion, of those that occur together. Reads these columns only."""
    counts: dict[tuple[str, str, str], int] = {}
    for table in dataset.shards(_LABELS):
        strings = pa.table({name: table[name].cast(pa.string()) for name in _LABELS})
        for row in strings.group_by(list(_LABELS)).aggregate([([], "count_all")]).to_pylist():
            key = (row["split"], row["language"], row["portion"])
            counts[key] = counts.get(key, 0) + row["count_all"]
    return counts


@dataclass(frozen=True)
class _Wanted:
    """What to read: a split, and by language its portions."""

    split: str
    portions: Mapping[str, tuple[str, ...]]

    @property
    def language_names(self) -> tuple[str, ...]:
        return tuple(self.portions)

    @property
    def portion_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(portion for portions in self.portions.values() for portion in portions))

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Positions of the languages and of their portions."""
        return [
            (number, self.portion_names.index(portion))
            for number, portions in enumerate(self.portions.values())
            for portion in portions
        ]


def _chosen(
    dataset: Dataset,
    split: str,
    languages: Sequence[str] | None,
    portions: Sequence[str] | Mapping[str, Sequence[str]] | None,
) -> dict[str, tuple[str, ...]]:
    """By language its portions; what was not said is looked up in the dataset."""
    _check_distinct("languages", languages or ())
    for names in portions.values() if isinstance(portions, Mapping) else [portions or ()]:
        _check_distinct("portions", names)
    if isinstance(portions, Mapping):
        if languages is not None and set(languages) != set(portions):
            raise UsageError(f"languages are {', '.join(languages)}, but portions are given for {', '.join(portions)}")
        chosen = {language: tuple(portions[language]) for language in languages or portions}
    elif languages is not None and portions is not None:
        chosen = {language: tuple(portions) for language in languages}
    else:
        chosen = {} if languages is None else dict.fromkeys(languages, ())
        for found, language, portion in sorted(labels_of(dataset)):
            if found == split and (languages is None or language in chosen) and (portions is None or portion in portions):
                chosen[language] = (*chosen.get(language, ()), portion)
    if not chosen:
        raise DatasetError(_nothing(dataset, f"split {split!r}" + "".join(f", portion {name!r}" for name in portions or ())))
    for language, names in chosen.items():
        if not names:
            raise DatasetError(_nothing(dataset, f"split {split!r}, language {language!r}"))
    return chosen


def _check_distinct(what: str, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        raise UsageError(f"{what} are {', '.join(names)}: name each once")


@dataclass(frozen=True)
class _Part:
    """The wanted captions of one shard; columns as of `Captions`, with the shard's own ``image_ids``."""

    image_ids: np.ndarray
    images: np.ndarray
    languages: np.ndarray
    portions: np.ndarray
    indices: np.ndarray
    lengths: np.ndarray
    token_ids: np.ndarray


def _read_shard(dataset: Dataset, number: int, wanted: _Wanted) -> _Part:
    table = dataset.shard(number, ["image_id", *_LABELS, "index", "token_ids"])
    languages = _codes(table["language"], wanted.language_names)
    portions = _codes(table["portion"], wanted.portion_names)
    keep = np.zeros(table.num_rows, bool)
    for language, portion in wanted.pairs:
        keep |= (languages == language) & (portions == portion)
    keep &= _codes(table["split"], (wanted.split,)) == 0
    mask = pa.array(keep)
    images = _whole(table["image_id"].filter(mask)).dictionary_encode()
    tokens = _whole(table["token_ids"].filter(mask))
    return _Part(
        image_ids=np.array(images.dictionary.to_pylist(), object),
        images=images.indices.to_numpy(),
        languages=languages[keep],
        portions=portions[keep],
        indices=table["index"].to_numpy()[keep],
        lengths=np.diff(tokens.offsets.to_numpy()).astype(np.int64),
        token_ids=tokens.flatten().to_numpy(),
    )


def _codes(labels: pa.ChunkedArray, names: Sequence[str]) -> np.ndarray:
    """int8: position of each label in ``names``, -1 for others. Row groups may have dictionaries of their own."""
    found = [np.zeros(0, np.int8)]
    for chunk in labels.chunks:
        positions = pc.fill_null(pc.index_in(chunk.dictionary, pa.array(names, chunk.dictionary.type)), -1).to_numpy()
        found.append(positions.astype(np.int8)[chunk.indices.to_numpy()])
    return np.concatenate(found)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)


def _joined(parts: Sequence[_Part], wanted: _Wanted) -> Captions:
    """Puts the shards together, sorted: an image's captions lie in one shard, and there in the order of their keys."""
    names = np.concatenate([part.image_ids for part in parts])
    order = np.argsort(names, kind="stable")
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    starts = np.cumsum([0, *(len(part.image_ids) for part in parts)])
    images = np.concatenate([rank[start + part.images] for start, part in zip(starts, parts, strict=False)])
    lengths = np.concatenate([part.lengths for part in parts])
    captions = Captions(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        images=images,
        languages=np.concatenate([part.languages for part in parts]),
        portions=np.concatenate([part.portions for part in parts]),
        indices=np.concatenate([part.indices for part in parts]),
        image_ids=tuple(names[order].tolist()),
        language_names=wanted.language_names,
        portion_names=wanted.portion_names,
        split=wanted.split,
    )
    return captions.select(np.argsort(images, kind="stable"))


def _check_all_found(captions: Captions, wanted: _Wanted, dataset: Dataset) -> None:
    for language, portion in wanted.pairs:
        if not np.any((captions.languages == language) & (captions.portions == portion)):
            names = f"language {captions.language_names[language]!r}, portion {captions.portion_names[portion]!r}"
            raise DatasetError(_nothing(dataset, f"split {wanted.split!r}, {names}"))


def _nothing(dataset: Dataset, what: str) -> str:
    there = "; ".join(_listing(labels_of(dataset))) or "nothing"
    return f"{dataset.folder.location!r} has no captions of {what}. It has: {there}"


def _listing(contents: Mapping[tuple[str, str, str], int]) -> Iterator[str]:
    for split in sorted({key[0] for key in contents}):
        yield f"{split}: " + ", ".join(
            f"{language} {portion} {count:,}"
            for (other, language, portion), count in sorted(contents.items())
            if other == split
        )
