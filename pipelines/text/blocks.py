"""Blocks of captions: the plain functions behind the transforms of ``pipelines.text.captions``.

A block is an Arrow table of a few thousand captions. The elements of the pipeline are blocks, not captions, because passing an
element costs Beam more than tokenizing a caption. Only raw text is shuffled; each shard is tokenized by the worker that
writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions import RawCaption
from pipelines.text.moses import Recipe, prepare
from pipelines.text.truecasing import TruecaseModel, count_forms, truecase
from schemas.errors import InputError
from schemas.keys import CaptionKey, shard_of
from schemas.kinds import CAPTIONS, KEY_COLUMNS

__all__ = [
    "BLOCK",
    "block_forms",
    "blocks_of",
    "caption_rows",
    "caption_statistics",
    "from_ipc",
    "sort_captions",
    "split_by_shard",
    "to_ipc",
    "tokenize_captions",
]

BLOCK_ROWS = 8000

BLOCK = pa.schema(
    [
        ("image_id", pa.string()),
        ("language", pa.string()),
        ("portion", pa.string()),
        ("index", pa.int16()),
        ("split", pa.string()),
        ("text", pa.string()),
        ("position", pa.int64()),
    ]
)
"""Columns of a block as read. ``position`` keeps the order of the source: first the number of the part, then of the caption."""

_KEY = KEY_COLUMNS["captions"]
_PART = 1 << 40
_IPC = pa.ipc.IpcWriteOptions(compression="lz4")  # A third of the bytes through Beam's data channel, and in its memory.


_shard_of = lru_cache(maxsize=1 << 16)(shard_of)  # An image has captions in several files.


def to_ipc(table: pa.Table) -> bytes:
    """Return a table as the bytes of an Arrow stream, to pass it between workers."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes) -> pa.Table:
    """Return the table whose bytes `to_ipc` made."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def blocks_of(captions: Iterable[RawCaption], part: int) -> Iterator[pa.Table]:
    """Gather captions into blocks.

    Args:
        captions: captions in the order of the source.
        part: number of the part of the source that holds them.

    Yields:
        Tables with the columns `BLOCK` and at most 8,000 rows.
    """
    remaining = iter(captions)
    start = part * _PART
    while rows := list(islice(remaining, BLOCK_ROWS)):
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        columns.append(range(start, start + len(rows)))
        start += len(rows)
        yield pa.table(dict(zip(BLOCK.names, columns, strict=True)), schema=BLOCK)


def block_forms(block: pa.Table, recipe: Recipe, splits: frozenset[str]) -> dict[str, Counter[str]]:
    """Count word forms by language, in tenths, over the captions of the training splits."""
    forms: dict[str, Counter[str]] = {}
    rows = zip(block["language"].to_pylist(), block["split"].to_pylist(), block["text"].to_pylist(), strict=True)
    for language, split, text in rows:
        if split in splits:
            counter = forms.setdefault(language, Counter())
            for form, weight in count_forms(prepare(text, language, recipe)):
                counter[form] += weight
    return forms


def split_by_shard(block: pa.Table, shards: int, finished: frozenset[int]) -> Iterator[tuple[int, pa.Table]]:
    """Split a block by the shard of the image, leaving out the rows of shards that an earlier run finished."""
    shard_of_row = np.fromiter((_shard_of(image_id, shards) for image_id in block["image_id"].to_pylist()), np.int64)
    order = np.argsort(shard_of_row, kind="stable")
    by_shard = block.take(order)
    numbers, starts = np.unique(shard_of_row[order], return_index=True)
    for number, start, end in zip(numbers.tolist(), starts, [*starts[1:], len(shard_of_row)], strict=True):
        if number not in finished:
            yield number, by_shard.slice(start, end - start)


def sort_captions(blocks: Iterable[pa.Table]) -> pa.Table:
    """Return all captions of one shard, sorted by key.

    Captions whose source gives no index (-1) are numbered, in the order of the source, among the captions of the same image,
    language and portion.

    Raises:
        InputError: a key occurs twice, only some captions have an index, or an image has more captions than an int16 can number.
    """
    table = pa.concat_tables([BLOCK.empty_table(), *blocks])
    if table.num_rows == 0:
        return table
    table = table.sort_by([(name, "ascending") for name in (*_KEY, "position")]).combine_chunks()
    index = _numbered_index(table)
    table = table.set_column(table.schema.get_field_index("index"), "index", pa.array(index, pa.int16()))
    _refuse_duplicates(table)
    return table


def tokenize_captions(
    table: pa.Table, recipe: Recipe, models: Mapping[str, TruecaseModel] | None = None
) -> tuple[pa.Table, list[dict[str, str]]]:
    """Tokenize captions.

    Args:
        table: captions with the columns of a block.
        recipe: the steps from text to tokens.
        models: truecasers by language, for a recipe that truecases.

    Returns:
        The captions that hold a token, in the same order and with the column ``tokens``, and one failure for each of the others.

    Raises:
        InputError: a language has no truecaser.
    """
    texts, languages = table["text"].to_pylist(), table["language"].to_pylist()
    lines = [prepare(text, language, recipe) for text, language in zip(texts, languages, strict=True)]
    if recipe.truecase:
        models = _require_models(set(languages), models or {})
        lines = [truecase(tokens, models[language]) for tokens, language in zip(lines, languages, strict=True)]
    table = table.append_column("tokens", pa.array(lines, pa.list_(pa.string())))
    empty = pc.equal(pc.list_value_length(table["tokens"]), 0)
    failures = [_empty_caption(row) for row in table.filter(empty).to_pylist()]
    return table.filter(pc.invert(empty)), failures


def caption_rows(tables: Iterable[pa.Table]) -> pa.Table:
    """Return tokenized captions, which are in order, as rows of kind ``captions``."""
    columns = pa.schema([*BLOCK, pa.field("tokens", pa.list_(pa.string()))])
    # Combined before the cast, which would otherwise give each chunk a dictionary of its own.
    table = pa.concat_tables([columns.empty_table(), *tables]).combine_chunks()
    return table.select(CAPTIONS.names).cast(CAPTIONS)


def _require_models(languages: set[str], models: Mapping[str, TruecaseModel]) -> Mapping[str, TruecaseModel]:
    missing = languages - set(models)
    if missing:
        raise InputError(
            f"no truecaser for language {min(missing)!r}: there are models for {', '.join(sorted(models)) or 'no language'}. "
            "The source has no captions in that language in the training split; give a model with --truecaser, or name "
            "the split to learn from with --train-splits"
        )
    return models


def _new_groups(table: pa.Table, columns: Iterable[str]) -> np.ndarray:
    """Return a mask [rows] that is True where a row of a sorted table differs from the previous one in any of the columns."""
    is_new = np.zeros(table.num_rows, bool)
    is_new[0] = True
    for name in columns:
        values = table[name].combine_chunks().dictionary_encode().indices.to_numpy()
        is_new[1:] |= values[1:] != values[:-1]
    return is_new


def _numbered_index(table: pa.Table) -> np.ndarray:
    """Return the index of each caption: the given one, or its number among the captions of its group."""
    given = table["index"].to_numpy()
    if 0 < np.count_nonzero(given < 0) < len(given):
        raise InputError("some captions have an index and some have none: give every caption an index, or none of them")
    starts = np.flatnonzero(_new_groups(table, _KEY[:3]))
    numbers = np.arange(table.num_rows) - np.repeat(starts, np.diff([*starts, table.num_rows]))
    if numbers.max() > np.iinfo(np.int16).max:
        row = table.slice(int(numbers.argmax()), 1).to_pylist()[0]
        raise InputError(
            f"image {row['image_id']!r} has more than 32,768 captions of portion {row['portion']!r} in language "
            f"{row['language']!r}: an index is a 16-bit integer. Remove some of them"
        )
    return np.where(given < 0, numbers, given)


def _refuse_duplicates(table: pa.Table) -> None:
    duplicates = np.flatnonzero(~_new_groups(table, _KEY))
    if len(duplicates):
        first, second = table.slice(int(duplicates[0]) - 1, 2).to_pylist()
        raise InputError(
            f"caption key {str(_key(first))!r} (image_id/language/portion/index) occurs twice: {first['text']!r} in split "
            f"{first['split']!r} and {second['text']!r} in split {second['split']!r}. Remove one of them, or leave out the "
            "index so that captions are numbered in their order"
        )


def _key(row: Mapping[str, Any]) -> CaptionKey:
    return CaptionKey(*(row[name] for name in _KEY))


def _empty_caption(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "key": str(_key(row)),
        "uri": "",
        "stage": "prepare",
        "reason": "empty_caption",
        "message": f"the caption {row['text']!r} of split {row['split']!r} holds no token",
    }


def caption_statistics(rows: pa.Table) -> dict[str, Any]:
    """Count captions and tokens by portion, split and language, and images by split.

    Args:
        rows: rows of kind ``captions``.
    """
    if rows.num_rows == 0:
        return {}
    groups = rows.select(["portion", "split", "language", "image_id"]).append_column(
        "tokens", pc.list_value_length(rows["tokens"])
    )
    captions = groups.group_by(["portion", "split", "language"]).aggregate([("tokens", "count"), ("tokens", "sum")])
    images = groups.group_by("split").aggregate([("image_id", "count_distinct")])
    return {
        "captions": {
            f"{row['portion']}/{row['split']}/{row['language']}": {"captions": row["tokens_count"], "tokens": row["tokens_sum"]}
            for row in captions.to_pylist()
        },
        "images": {row["split"]: row["image_id_count_distinct"] for row in images.to_pylist()},
    }
