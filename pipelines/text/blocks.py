"""Captions in blocks: the plain functions under the transforms of ``pipelines.text.captions``.

A block is an Arrow table of some thousand captions. Blocks, not captions, are the elements of the pipeline: passing an
element costs Beam more than tokenizing a caption does. Only raw text is shuffled; tokens are made where they are written.
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
"""Columns of a block as read. ``position`` orders captions as the source does: number of the part, then of the caption."""

_KEY = KEY_COLUMNS["captions"]
_PART = 1 << 40
_IPC = pa.ipc.IpcWriteOptions(compression="lz4")  # A third of the bytes through Beam's data channel, and in its memory.


_shard_of = lru_cache(maxsize=1 << 16)(shard_of)  # An image has captions in several files.


def to_ipc(table: pa.Table) -> bytes:
    """A table as bytes of an Arrow stream, to pass between workers."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=_IPC) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes) -> pa.Table:
    """The table that ``to_ipc`` wrote."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_all()


def blocks_of(captions: Iterable[RawCaption], part: int) -> Iterator[pa.Table]:
    """Gathers captions into blocks.

    Args:
        captions: in the order of the source.
        part: number of the part of the source that they come from.
    """
    rest = iter(captions)
    start = part * _PART
    while rows := list(islice(rest, BLOCK_ROWS)):
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)]
        columns.append(range(start, start + len(rows)))
        start += len(rows)
        yield pa.table(dict(zip(BLOCK.names, columns, strict=True)), schema=BLOCK)


def block_forms(block: pa.Table, recipe: Recipe, splits: frozenset[str]) -> dict[str, Counter[str]]:
    """Counts of word forms (tenths) by language, over the captions of the training splits."""
    forms: dict[str, Counter[str]] = {}
    rows = zip(block["language"].to_pylist(), block["split"].to_pylist(), block["text"].to_pylist(), strict=True)
    for language, split, text in rows:
        if split in splits:
            counter = forms.setdefault(language, Counter())
            for form, weight in count_forms(prepare(text, language, recipe)):
                counter[form] += weight
    return forms


def split_by_shard(block: pa.Table, shards: int, finished: frozenset[int]) -> Iterator[tuple[int, pa.Table]]:
    """Cuts a block by the shard of the image; rows of shards that an earlier run finished are left out."""
    numbers = np.fromiter((_shard_of(image_id, shards) for image_id in block["image_id"].to_pylist()), np.int64)
    order = np.argsort(numbers, kind="stable")
    by_shard = block.take(order)
    found, starts = np.unique(numbers[order], return_index=True)
    for number, start, end in zip(found.tolist(), starts, [*starts[1:], len(numbers)], strict=True):
        if number not in finished:
            yield number, by_shard.slice(start, end - start)


def sort_captions(blocks: Iterable[pa.Table]) -> pa.Table:
    """All captions of one shard, sorted by key.

    Captions without an index of their own (-1) are numbered in the order of the source among those of the same image,
    language and portion.

    Raises:
        InputError: a key occurs twice.
    """
    table = pa.concat_tables([BLOCK.empty_table(), *blocks])
    if table.num_rows == 0:
        return table
    table = table.sort_by([(name, "ascending") for name in (*_KEY, "position")]).combine_chunks()
    index = _number(table)
    table = table.set_column(table.schema.get_field_index("index"), "index", pa.array(index, pa.int16()))
    _refuse_duplicates(table)
    return table


def tokenize_captions(
    table: pa.Table, recipe: Recipe, models: Mapping[str, TruecaseModel] | None = None
) -> tuple[pa.Table, list[dict[str, str]]]:
    """Adds the tokens.

    Args:
        table: captions with the columns of a block.
        recipe: the steps.
        models: truecasers by language, for a recipe that truecases.

    Returns:
        The captions with the column ``tokens`` in the same order, and a failure for each one that holds no token.

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
    """Tokenized captions, in order, as rows of kind ``captions``."""
    columns = pa.schema([*BLOCK, pa.field("tokens", pa.list_(pa.string()))])
    # One chunk before the cast: each chunk would get a dictionary of its own.
    table = pa.concat_tables([columns.empty_table(), *tables]).combine_chunks()
    return table.select(CAPTIONS.names).cast(CAPTIONS)


def _require_models(languages: set[str], models: Mapping[str, TruecaseModel]) -> Mapping[str, TruecaseModel]:
    missing = languages - set(models)
    if missing:
        raise InputError(
            f"no truecaser for language {min(missing)!r}: there are models for {', '.join(sorted(models)) or 'no language'}. "
            "The source has no captions of that language in the training split; give a model with --truecaser, or name "
            "the split to learn from with --train-splits"
        )
    return models


def _new_groups(table: pa.Table, columns: Iterable[str]) -> np.ndarray:
    """True where a row of a sorted table differs from the one before in any of the columns."""
    new = np.zeros(table.num_rows, bool)
    new[0] = True
    for name in columns:
        values = table[name].combine_chunks().dictionary_encode().indices.to_numpy()
        new[1:] |= values[1:] != values[:-1]
    return new


def _number(table: pa.Table) -> np.ndarray:
    given = table["index"].to_numpy()
    if 0 < np.count_nonzero(given < 0) < len(given):
        raise InputError("some captions have an index and some have none: give all of them one, or none")
    starts = np.flatnonzero(_new_groups(table, _KEY[:3]))
    running = np.arange(table.num_rows) - np.repeat(starts, np.diff([*starts, table.num_rows]))
    if running.max() > np.iinfo(np.int16).max:
        row = table.slice(int(running.argmax()), 1).to_pylist()[0]
        raise InputError(f"image {row['image_id']!r} has more than 32,767 captions in language {row['language']!r}")
    return np.where(given < 0, running, given)


def _refuse_duplicates(table: pa.Table) -> None:
    again = np.flatnonzero(~_new_groups(table, _KEY))
    if len(again):
        first, second = table.slice(int(again[0]) - 1, 2).to_pylist()
        raise InputError(
            f"caption key {str(_key(first))!r} (image_id/language/portion/index) occurs twice: {first['text']!r} in split "
            f"{first['split']!r} and {second['text']!r} in split {second['split']!r}. Remove one of them, or leave the index "
            "out so that captions are numbered in their order"
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
    """Counts of captions and tokens by portion, split and language, and of images by split, of rows of kind ``captions``."""
    if rows.num_rows == 0:
        return {}
    kinds = rows.select(["portion", "split", "language", "image_id"]).append_column(
        "tokens", pc.list_value_length(rows["tokens"])
    )
    counted = kinds.group_by(["portion", "split", "language"]).aggregate([("tokens", "count"), ("tokens", "sum")])
    images = kinds.group_by("split").aggregate([("image_id", "count_distinct")])
    return {
        "captions": {
            f"{row['portion']}/{row['split']}/{row['language']}": {"captions": row["tokens_count"], "tokens": row["tokens_sum"]}
            for row in counted.to_pylist()
        },
        "images": {row["split"]: row["image_id_count_distinct"] for row in images.to_pylist()},
    }
