"""Vectors of the tokens of captions, as `imagepivot token-features` makes them, for a model that reads them in place of words.

Letters in shapes: ``N`` captions, ``M`` vectors that are held, ``W`` width of a vector.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.fingerprints import sha256_of_json
from schemas.parameters import TokenFeaturesParameters
from train.config.models import ModelConfig
from train.data.batches import TokenVectors
from train.data.captions import Captions
from train.data.features import check_memory
from train.data.memmap import mapped_array, release

_KEY = ("image_id", "language", "portion", "index")
_NAMED = 5


def check_token_features(model: ModelConfig, location: str) -> None:
    """Check that there are vectors of tokens exactly if a model reads them.

    Raises:
        UsageError: there are none, or the model does not read them.
    """
    if model.token_width and not location:
        raise UsageError(
            "model.word_vectors is 'precomputed', but no vectors of tokens are given: give --token-features FOLDER, a dataset "
            "that imagepivot token-features makes of the captions"
        )
    if location and not model.token_width:
        raise UsageError(
            f"--token-features {location!r} is given, but the model has vectors of words of its own (model.word_vectors is not "
            "'precomputed'), so that it would read none of them: leave it out, or train with --set model.word_vectors=precomputed"
        )


def open_token_features(location: str, encoded: Dataset, *, width: int) -> Dataset:
    """Open the vectors of tokens that belong to encoded captions; reads none of them.

    Raises:
        DatasetError: the dataset is missing, of another kind, or was made of other captions.
        UsageError: its vectors have another width.
    """
    dataset = open_dataset(location, kind="token-features")
    made_of, expected = (source.manifest.input_fingerprint("captions") or "none" for source in (dataset, encoded))
    if made_of != expected:
        raise DatasetError(
            f"{location!r} was made of other captions (fingerprint {made_of[:12]}...) than {encoded.folder.location!r} "
            f"({expected[:12]}...), whose tokens may be others: make both of the same captions"
        )
    found = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature.width
    if found != width:
        raise UsageError(
            f"model.word_dim is {width}, but the vectors in {location!r} have {found} numbers: give --set model.word_dim={found}, "
            "or vectors of the other width"
        )
    return dataset


def token_fingerprints(dataset: Dataset) -> dict[str, str]:
    """Return the fingerprints of vectors of tokens: of the dataset, and of the model that made them, which others may share."""
    parameters = TokenFeaturesParameters.from_json(dataset.manifest.parameters)
    model = parameters.model_fingerprint or sha256_of_json(parameters.feature.to_json())
    return {"token_features": dataset.fingerprint, "token_model": model}


def with_token_features(captions: Captions, dataset: Dataset, *, memory_map: str | os.PathLike[str] | None = None) -> Captions:
    """Return captions with the vectors of their tokens, of a dataset that `open_token_features` has opened.

    With ``memory_map`` they are mapped from a copy of the whole dataset in that folder, as in `train.data.features.read_features`.

    Raises:
        DatasetError: the dataset lacks captions, has them with other tokens, or with vectors that are not finite.
        UsageError: the vectors are too large for memory, and there is no ``memory_map``.
    """
    index = _Index.of(dataset)
    rows = index.rows_of(captions, dataset)
    spec = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature
    ends = np.cumsum(index.lengths)
    if memory_map is not None:

        def fill(copy: np.ndarray) -> None:
            for row, vectors in _vectors(dataset, index):
                copy[ends[row] - len(vectors) : ends[row]] = vectors
                if row % 4096 == 0:
                    release(copy)

        identity = [dataset.fingerprint, [shard.sha256 for shard in dataset.manifest.shards]]
        total = int(index.lengths.sum())
        stored = mapped_array(memory_map, identity, (total, spec.width), spec.dtype, fill)
        return replace(captions, vectors=TokenVectors(stored, ends[rows] - index.lengths[rows]))
    size = int(index.lengths[rows].sum()) * spec.width * np.dtype(spec.dtype).itemsize
    check_memory(size, len(captions), "name a folder on a fast disk with --memory-map", of="captions")
    starts = np.cumsum(captions.lengths) - captions.lengths
    places = np.full(len(index.lengths), -1, np.int64)
    places[rows] = starts
    held = np.empty((int(captions.lengths.sum()), spec.width), spec.dtype)
    for row, vectors in _vectors(dataset, index):
        if places[row] >= 0:
            held[places[row] : places[row] + len(vectors)] = vectors
    return replace(captions, vectors=TokenVectors(held, starts))


def shard_token_vectors(dataset: Dataset, number: int, captions: pa.Table) -> TokenVectors:
    """Return the vectors of a shard of encoded captions; both datasets are made of the same captions, and so in the same shards.

    Raises:
        DatasetError: captions are lacking, or have other tokens.
    """
    table = dataset.shard(number)
    index = _Index(_text_keys([table[name] for name in _KEY]), table["length"].to_numpy().astype(np.int64))
    rows = index.rows_of_keys(_text_keys([captions[name] for name in _KEY]), captions["length"].to_numpy(), dataset)
    values: Any = dataset.values(table["vectors"], "vectors")
    width = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature.width
    stored = np.concatenate([np.zeros((0, width), np.float32), *values])
    return TokenVectors(stored, (np.cumsum(index.lengths) - index.lengths)[rows])


@dataclass(frozen=True)
class _Index:
    """What a dataset holds, row by row: the keys of the captions as one text each, and the number of vectors, int64 ``[N]``."""

    keys: pa.ChunkedArray
    lengths: np.ndarray

    @classmethod
    def of(cls, dataset: Dataset) -> _Index:
        table = dataset.table([*_KEY, "length"])
        return cls(_text_keys([table[name] for name in _KEY]), table["length"].to_numpy().astype(np.int64))

    def rows_of(self, captions: Captions, dataset: Dataset) -> np.ndarray:
        """Return the row of each caption, int64 ``[N]``."""
        wanted = _text_keys(
            [
                pa.array(captions.image_ids, pa.string()).take(pa.array(captions.images)),
                pa.array(captions.language_names, pa.string()).take(pa.array(captions.languages)),
                pa.array(captions.portion_names, pa.string()).take(pa.array(captions.portions)),
                pa.array(captions.indices),
            ]
        )
        return self.rows_of_keys(wanted, captions.lengths, dataset)

    def rows_of_keys(self, wanted: pa.Array | pa.ChunkedArray, lengths: np.ndarray, dataset: Dataset) -> np.ndarray:
        """Return the row of each key, int64 ``[N]``, whose captions have so many token ids."""
        found = pc.index_in(wanted, self.keys.combine_chunks())
        location = dataset.folder.location
        if found.null_count:
            lacking = wanted.filter(found.is_null()).slice(0, _NAMED).to_pylist()
            failed = f" ({dataset.manifest.failed:,} captions failed there)" if dataset.manifest.failed else ""
            raise DatasetError(
                f"{location!r} lacks {found.null_count:,} of {len(wanted):,} captions: "
                f"{', '.join(lacking)}{', ...' if found.null_count > _NAMED else ''}{failed}. Make it of the captions "
                "that were encoded"
            )
        rows: np.ndarray = found.to_numpy().astype(np.int64)
        others = np.flatnonzero(self.lengths[rows] != lengths)
        if len(others):
            first = int(others[0])
            raise DatasetError(
                f"{location!r} has {self.lengths[rows[first]]} vectors of the caption {wanted[first].as_py()}, which has "
                f"{lengths[first]} token ids: one of the two was cut shorter: make it again with the same "
                "greatest length"
            )
        return rows


def _text_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array | pa.ChunkedArray:
    """Join the columns of a key: ``image/language/portion/index``."""
    return pc.binary_join_element_wise(*(column.cast(pa.string()) for column in columns), "/")


def _vectors(dataset: Dataset, index: _Index) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of each row, and its vectors."""
    row = 0
    for batch in dataset.batches(["vectors"], batch_size=256):
        values: Any = dataset.values(pa.chunked_array([batch.column(0)]), "vectors")
        for vectors in values:
            if len(vectors) != index.lengths[row]:
                raise DatasetError(
                    f"{dataset.folder.location!r} is damaged: run 'imagepivot validate' on it, and make it again"
                )
            if not np.isfinite(vectors).all():
                raise DatasetError(
                    f"{dataset.folder.location!r} holds a vector that is not finite, of {index.keys[row].as_py()}: run 'imagepivot "
                    "validate' on it, and make it again"
                )
            yield row, vectors
            row += 1
