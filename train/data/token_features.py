"""Precomputed token vectors of captions, in place of word embeddings.

Shapes: ``N`` captions, ``M`` stored vectors, ``W`` width of a vector.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

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
_MAX_EXAMPLES = 5


def check_token_features(model: ModelConfig, location: str) -> None:
    """Check that token features are given if, and only if, a model needs them.

    Raises:
        UsageError: they are missing, or the model does not use them.
    """
    if model.token_width and not location:
        raise UsageError(
            "model.word_vectors is 'precomputed', but token features are missing: give --token-features "
            "FOLDER, a dataset that imagepivot text-features writes for the captions"
        )
    if location and not model.token_width:
        raise UsageError(
            f"--token-features {location!r} is given, but model.word_vectors is not 'precomputed', so that "
            "the model would not use them: leave it out, or train with --set model.word_vectors=precomputed"
        )


def open_token_features(location: str, encoded: Dataset, *, width: int) -> Dataset:
    """Open the token features of encoded captions, without reading them.

    Raises:
        DatasetError: the dataset is missing, of another kind, or of other captions.
        UsageError: its vectors have another width.
    """
    dataset = open_dataset(location, kind="token-features")
    captions, expected = (source.manifest.input_fingerprint("captions") or "none" for source in (dataset, encoded))
    if captions != expected:
        raise DatasetError(
            f"{location!r} belongs to other captions (fingerprint {captions[:12]}...) than {encoded.folder.location!r} "
            f"({expected[:12]}...), with other tokens: write both from the same captions"
        )
    dataset_width = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature.width
    if dataset_width != width:
        raise UsageError(
            f"model.word_dim is {width}, but the vectors in {location!r} have width {dataset_width}: give "
            f"--set model.word_dim={dataset_width}, or vectors of the other width"
        )
    return dataset


def token_fingerprints(dataset: Dataset) -> dict[str, str]:
    """Return the fingerprints of token features and of their model."""
    parameters = TokenFeaturesParameters.from_json(dataset.manifest.parameters)
    model = parameters.model_fingerprint or sha256_of_json(parameters.feature.to_json())
    return {"token_features": dataset.fingerprint, "token_model": model}


def with_token_features(captions: Captions, dataset: Dataset, *, memory_map: str | os.PathLike[str] | None = None) -> Captions:
    """Add the token vectors of a dataset from `open_token_features` to captions.

    ``memory_map`` is a folder for a memory-mapped copy of the whole dataset, as in `train.data.features.read_features`.

    Raises:
        DatasetError: the dataset lacks captions, has other tokens, or vectors that are not finite.
        UsageError: the vectors are too large for memory without ``memory_map``.
    """
    index = _Index.of(dataset.table([*_KEY, "length"]))
    rows = index.rows_of(pa.array(captions.ids(), pa.string()), captions.lengths, dataset)
    spec = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature
    copied = rows if memory_map is None else np.arange(len(index.lengths))
    lengths, starts = index.lengths[copied], np.full(len(index.lengths), -1)
    starts[copied] = np.cumsum(lengths) - lengths

    def fill(copy: np.ndarray) -> None:
        for row, vectors in _caption_vectors(dataset, index):
            if starts[row] >= 0:
                copy[starts[row] : starts[row] + len(vectors)] = vectors
            if row % 4096 == 0:
                release(copy)

    shape = int(lengths.sum()), spec.width
    if memory_map is None:
        size = shape[0] * spec.width * np.dtype(spec.dtype).itemsize
        check_memory(size, len(captions), "name a folder on a fast disk with --memory-map", of="captions")
        stored = np.empty(shape, spec.dtype)
        fill(stored)
    else:
        identity = [dataset.fingerprint, [shard.sha256 for shard in dataset.manifest.shards]]
        stored = mapped_array(memory_map, identity, shape, spec.dtype, fill)
    return replace(captions, vectors=TokenVectors(stored, starts[rows]))


def shard_token_vectors(dataset: Dataset, shard: int, captions: pa.Table) -> TokenVectors:
    """Return the token vectors of a shard of encoded captions.

    Both datasets have the same captions in each shard.

    Raises:
        DatasetError: captions are missing, or have other tokens.
    """
    table = dataset.shard(shard)
    index = _Index.of(table)
    rows = index.rows_of(_text_keys([captions[name] for name in _KEY]), captions["length"].to_numpy(), dataset)
    values: Any = dataset.values(table["vectors"], "vectors")
    width = TokenFeaturesParameters.from_json(dataset.manifest.parameters).feature.width
    stored = np.concatenate([np.zeros((0, width), np.float32), *values])
    return TokenVectors(stored, (np.cumsum(index.lengths) - index.lengths)[rows])


@dataclass(frozen=True)
class _Index:
    """Keys of the captions of a dataset, and numbers of vectors, int64 ``[N]``."""

    keys: pa.ChunkedArray
    lengths: np.ndarray

    @classmethod
    def of(cls, table: pa.Table) -> Self:
        return cls(_text_keys([table[name] for name in _KEY]), table["length"].to_numpy().astype(np.int64))

    def rows_of(self, keys: pa.Array | pa.ChunkedArray, lengths: np.ndarray, dataset: Dataset) -> np.ndarray:
        """Return the row of each key, int64 ``[N]``, and check the numbers of vectors."""
        indices = pc.index_in(keys, self.keys.combine_chunks())
        location = dataset.folder.location
        if indices.null_count:
            missing = keys.filter(indices.is_null()).slice(0, _MAX_EXAMPLES).to_pylist()
            failed = f" ({dataset.manifest.failed:,} captions failed there)" if dataset.manifest.failed else ""
            raise DatasetError(
                f"{location!r} lacks {indices.null_count:,} of {len(keys):,} captions: "
                f"{', '.join(missing)}{', ...' if indices.null_count > _MAX_EXAMPLES else ''}{failed}. "
                "Write it for the captions that were encoded"
            )
        rows: np.ndarray = indices.to_numpy().astype(np.int64)
        different = np.flatnonzero(self.lengths[rows] != lengths)
        if len(different):
            first = int(different[0])
            raise DatasetError(
                f"{location!r} has {self.lengths[rows[first]]} vectors of the caption {keys[first].as_py()}, which has "
                f"{lengths[first]} token ids: write it again with the same maximum length"
            )
        return rows


def _text_keys(columns: Sequence[pa.Array | pa.ChunkedArray]) -> pa.Array | pa.ChunkedArray:
    """Join the columns of a key: ``image/language/portion/index``."""
    return pc.binary_join_element_wise(*(column.cast(pa.string()) for column in columns), "/")


def _caption_vectors(dataset: Dataset, index: _Index) -> Iterator[tuple[int, np.ndarray]]:
    """Yield row index and vectors of each caption."""
    row = 0
    for batch in dataset.batches(["vectors"], batch_size=256):
        values: Any = dataset.values(pa.chunked_array([batch.column(0)]), "vectors")
        for vectors in values:
            if len(vectors) != index.lengths[row]:
                raise DatasetError(
                    f"{dataset.folder.location!r} is damaged: run 'imagepivot validate' on it, and write it again"
                )
            if not np.isfinite(vectors).all():
                raise DatasetError(
                    f"{dataset.folder.location!r} has a NaN or infinite vector of "
                    f"{index.keys[row].as_py()}: run 'imagepivot validate' on it, and write it again"
                )
            yield row, vectors
            row += 1
