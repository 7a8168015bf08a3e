"""Arrow schemas of the kinds of datasets.

No column is nullable. The metadata of a field has its ``description``, and the ``shape`` of vectors of several dimensions.
"""

import json
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.features import FeatureSpec

_BATCH_BYTES = 4 << 20
_TEXT_ROW_BYTES = 512  # Rough size of a row without vectors.
_MIN_GROUP_ROWS = 64
_MAX_GROUP_BYTES = 32 << 20

REGIONS = 36
"""Most regions of an image (Anderson et al. 2018, the fixed set)."""

KEY_COLUMNS: dict[str, tuple[str, ...]] = {
    "captions": ("image_id", "language", "portion", "index"),
    "encoded": ("image_id", "language", "portion", "index"),
    "vocabulary": ("id",),
    "features": ("image_id",),
    "regions": ("image_id",),
    "embeddings": ("image_id", "language", "portion", "index"),
    "word-vectors": ("language", "id"),
    "token-features": ("image_id", "language", "portion", "index"),
}
"""Key columns of each kind. Rows of a shard are sorted by key, and keys are unique. Kinds without ``image_id`` have one shard."""

FAILURE_REASONS = {
    "empty_caption": "the caption holds no text",
    "unreadable": "the file cannot be opened or read",
    "empty": "the file has no bytes",
    "not_an_image": "the bytes are no image of a supported format",
    "truncated": "the image ends too early",
    "too_large": "the image has more pixels than the limit (a decompression bomb?)",
    "unsupported": "the image is of a type without a defined conversion to 8-bit RGB, or without a decoder on that machine",
    "decode_error": "the image is damaged",
    "crashed": "the image crashes the decoder",
    "not_finite": "a value of the feature is infinite or no number in the type that is stored",
}
"""The closed list of reasons for a failure, with their meanings."""


def _field(name: str, dtype: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, dtype, nullable=False, metadata={"description": description})


_LABEL = pa.dictionary(pa.int32(), pa.string())

_CAPTION_KEY = [
    _field("image_id", pa.string(), "stable key of the image; for Flickr-derived sets the file name without extension"),
    _field("language", _LABEL, "language of the caption, a BCP 47 tag"),
    _field("portion", _LABEL, "collection: 'translation' (same meaning in every language) or 'comparable'"),
    _field("index", pa.int16(), "number of the caption among those of this image, language and portion, from 0"),
    _field("split", _LABEL, "split as named by the source"),
]

CAPTIONS = pa.schema(
    [
        *_CAPTION_KEY,
        _field("text", pa.string(), "the caption as read from the source"),
        _field("tokens", pa.list_(_field("item", pa.string(), "one token")), "the caption after the text recipe"),
    ]
)

ENCODED = pa.schema(
    [
        *_CAPTION_KEY,
        _field(
            "token_ids",
            pa.list_(_field("item", pa.int32(), "id in the vocabulary")),
            "<start>, the ids of the tokens, <end>; ids of the vocabulary named in the manifest",
        ),
        _field("length", pa.int32(), "number of ids in token_ids, <start> and <end> included"),
    ]
)

VOCABULARY = pa.schema(
    [
        _field("id", pa.int32(), "id of the token; 0 <pad>, 1 <start>, 2 <end>, 3 <unk>"),
        _field("token", pa.string(), "the token"),
        _field("count", pa.int64(), "occurrences in the counted captions, all languages together; 0 for specials"),
        _field("counts", pa.map_(pa.string(), pa.int64()), "occurrences by language; languages without any left out"),
    ]
)

FAILURES = pa.schema(
    [
        _field("key", pa.string(), "image id, or for a caption image id, language, portion and index, joined by '/'"),
        _field("uri", pa.string(), "where the input came from, as the source names it"),
        _field("stage", pa.string(), "what was being done: 'read', 'decode', 'extract' or 'prepare'"),
        _field("reason", pa.string(), "one of: " + ", ".join(FAILURE_REASONS)),
        _field("message", pa.string(), "what went wrong, for people"),
    ]
)


def _vector(name: str, dtype: str, shape: tuple[int, ...], description: str) -> pa.Field:
    """Return a field of vectors, with its shape if that has several dimensions."""
    field = _field(name, pa.list_(_field("item", pa.type_for_alias(dtype), "one value"), prod(shape)), description)
    return field if len(shape) == 1 else field.with_metadata({**field.metadata, "shape": json.dumps(shape)})


def _features(spec: FeatureSpec) -> list[pa.Field]:
    """One row per image, the feature flattened in C order."""
    shape = "x".join(map(str, spec.shape))
    description = f"{spec.name}, shape {shape}, {spec.dtype}. {spec.source}".strip()
    return [_CAPTION_KEY[0], _vector("feature", spec.dtype, spec.shape, description)]


def _embeddings(spec: FeatureSpec) -> list[pa.Field]:
    """One row per caption, its vector in the space shared with images."""
    return [*_CAPTION_KEY, _vector("embedding", spec.dtype, spec.shape, f"{spec.name}, {spec.dtype}. {spec.source}".strip())]


def _regions(spec: FeatureSpec) -> list[pa.Field]:
    """One row per image, ``spec.shape`` = (R regions, D values)."""
    regions, width = spec.shape
    return [
        _CAPTION_KEY[0],
        _field("width", pa.int32(), "width of the original image, pixels"),
        _field("height", pa.int32(), "height of the original image, pixels"),
        _field("num_regions", pa.int16(), "regions in use; the rows behind them are zero"),
        _vector("boxes", "float32", (regions, 4), f"shape {regions}x4: x1 y1 x2 y2, pixels of the original image"),
        _vector("features", spec.dtype, spec.shape, f"{spec.name}, shape {regions}x{width}. {spec.source}".strip()),
        _vector("class_ids", "int16", (regions,), "class of each region; 0 is background"),
        _vector("class_scores", "float32", (regions,), "score of that class"),
        _vector("attribute_ids", "int16", (regions,), "attribute of each region"),
        _vector("attribute_scores", "float32", (regions,), "score of that attribute"),
    ]


def _word_vectors(spec: FeatureSpec) -> list[pa.Field]:
    """One row per language and token that has a vector."""
    return [
        _field("language", _LABEL, "language of the file that the vector comes from, a BCP 47 tag"),
        _field("id", pa.int32(), "id of the token in the vocabulary named in the manifest"),
        _field("token", pa.string(), "the token, as the vocabulary has it"),
        _vector("vector", spec.dtype, spec.shape, f"{spec.name}, {spec.dtype}. {spec.source}".strip()),
    ]


def _token_features(spec: FeatureSpec) -> list[pa.Field]:
    """One row per caption, a vector for each of its tokens, ``spec.shape`` = (D,)."""
    value = pa.list_(_field("item", pa.type_for_alias(spec.dtype), "one value"))
    description = f"{spec.name}, shape [length]x{spec.width}, {spec.dtype}. {spec.source}".strip()
    length = _field("length", pa.int32(), "number of vectors: <start>, the tokens, <end>")
    return [*_CAPTION_KEY, length, _field("vectors", value, description)]


_FIXED = {"captions": CAPTIONS, "encoded": ENCODED, "vocabulary": VOCABULARY}
_OF_FEATURES = {
    "features": _features,
    "regions": _regions,
    "embeddings": _embeddings,
    "word-vectors": _word_vectors,
    "token-features": _token_features,
}


def schema_of(kind: str, spec: FeatureSpec | None = None) -> pa.Schema:
    """Return the Arrow schema of a kind, one of ``KEY_COLUMNS``.

    Raises:
        ValueError: the kind is unknown, or has vectors and no spec is given.
    """
    if kind in _FIXED:
        return _FIXED[kind]
    if kind not in KEY_COLUMNS:
        raise ValueError(f"kind {kind!r} is unknown, expected one of {', '.join(KEY_COLUMNS)}")
    if spec is None:
        raise ValueError(f"kind {kind!r} needs a FeatureSpec")
    return pa.schema(_OF_FEATURES[kind](spec))


def belongs_to_images(kind: str) -> bool:
    """Return whether rows of a kind have an image id, which determines their shard."""
    return KEY_COLUMNS[kind][0] == "image_id"


def holds_vectors(schema: pa.Schema) -> bool:
    """Return whether rows have vectors, which are stored uncompressed."""
    return any(is_vector(field.type) for field in schema)


def is_vector(dtype: pa.DataType) -> bool:
    """Return whether a column of this type has vectors, one or several per row."""
    return pa.types.is_fixed_size_list(dtype) or (pa.types.is_list(dtype) and pa.types.is_floating(dtype.value_type))


def numpy_type(dtype: pa.DataType) -> np.dtype:
    """Return the numpy dtype of a column's values or vectors."""
    return pa.array([], dtype.value_type if pa.types.is_fixed_size_list(dtype) else dtype).to_numpy(zero_copy_only=False).dtype


def table_of_arrays(image_ids: Sequence[str], arrays: Mapping[str, np.ndarray], schema: pa.Schema) -> pa.Table:
    """Build rows from image ids and an array ``[N, ...]`` per column, in stored types."""
    columns = [pa.array(image_ids, pa.string())]
    for field in list(schema)[1:]:
        with np.errstate(over="ignore"):  # Overflow becomes inf, which `count_nonfinite` counts.
            flat = pa.array(np.ascontiguousarray(arrays[field.name], numpy_type(field.type)).reshape(-1))
        is_list = pa.types.is_fixed_size_list(field.type)
        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=field.type) if is_list else flat)
    return pa.Table.from_arrays(columns, schema=schema)


def count_nonfinite(rows: pa.Table) -> np.ndarray:
    """Count inf and NaN in the fixed-size vectors of each row, int64 ``[N]``."""
    counts = np.zeros(rows.num_rows, np.int64)
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if pa.types.is_fixed_size_list(field.type) and pa.types.is_floating(field.type.value_type):
            values = pc.list_flatten(column).to_numpy().reshape(rows.num_rows, -1)
            counts += values.shape[1] - np.isfinite(values).sum(axis=1)
    return counts


def vector_bytes(schema: pa.Schema) -> int:
    """Return the bytes of the fixed-size vectors of one row."""
    vectors = (field.type for field in schema if pa.types.is_fixed_size_list(field.type))
    return sum(vector.list_size * vector.value_type.bit_width // 8 for vector in vectors)


def batch_rows(schema: pa.Schema) -> int:
    """Return the rows in about four MiB; 64 for a variable number of vectors per row."""
    if holds_vectors(schema) and not vector_bytes(schema):
        return _MIN_GROUP_ROWS
    return max(1, _BATCH_BYTES // (vector_bytes(schema) or _TEXT_ROW_BYTES))


def group_rows(schema: pa.Schema) -> int:
    """Return the rows of a row group: about four MiB, or 64 rows in at most 32 MiB."""
    size = vector_bytes(schema)
    least = min(_MIN_GROUP_ROWS, _MAX_GROUP_BYTES // size) if size else _MIN_GROUP_ROWS
    return max(least, batch_rows(schema))
