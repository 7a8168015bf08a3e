"""Captions made at random or of given tokens, and the steps from blocks to the rows of a shard in one call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa

from pipelines.inputs.captions.base import RawCaption, tables_of
from pipelines.running.spill_files import to_ipc
from pipelines.text.caption_shards import BLOCK_SCHEMA, blocks_of
from pipelines.text.merge_sort import SortedRun, merge_runs, number_captions, partition_captions, row_key
from schemas.kinds import CAPTIONS


def caption(image_id="a", language="en", portion="translation", index=-1, split="train", text="x") -> RawCaption:
    return RawCaption(image_id, language, portion, index, split, text)


def block(*captions: RawCaption, part: int = 0) -> pa.Table:
    (table,) = blocks_of(tables_of(captions), part)
    return table


def random_captions(seed: int, count: int = 300) -> list[RawCaption]:
    generator = random.Random(seed)
    return [
        caption(
            image_id=f"img{generator.randrange(20)}",
            language=generator.choice(["en", "de"]),
            portion=generator.choice(["comparable", "translation"]),
            split=generator.choice(["train", "val"]),
            text=" ".join(generator.choices(["The", "the", "Dog", "dog", "runs", "."], k=generator.randrange(1, 8))),
        )
        for _ in range(count)
    ]


def write_table(path: Path, captions: Iterable[RawCaption]) -> Path:
    """Write captions as a TSV without a column of indices."""
    names = [name for name in RawCaption._fields if name != "index"]
    rows = [names, *([str(getattr(caption, name)) for name in names] for caption in captions)]
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenized(*captions: list[str]) -> pa.Table:
    """Return rows of kind ``captions`` with these tokens, in English and German by turns."""
    languages = itertools.cycle(("en", "de"))
    keys = [(f"img{n:03d}", language, "translation", n) for n, language in zip(range(len(captions)), languages, strict=False)]
    rows = [(*key, "train", " ".join(tokens), tokens) for key, tokens in zip(keys, captions, strict=True)]
    plain = pa.schema([pa.field(f.name, pa.string() if pa.types.is_dictionary(f.type) else f.type) for f in CAPTIONS])
    return pa.Table.from_pylist([dict(zip(plain.names, row, strict=True)) for row in rows], schema=plain).cast(CAPTIONS)


def sort_captions(blocks: Iterable[pa.Table]) -> pa.Table:
    """Return all rows of blocks as those of a single shard; each block is sorted by itself."""
    return pa.concat_tables([BLOCK_SCHEMA.empty_table(), *number_captions(merge_runs(runs_of(blocks)))])


def runs_of(blocks: Iterable[pa.Table]) -> list[SortedRun]:
    return [(row_key(rows), to_ipc(rows)) for block in blocks for _, rows in partition_captions(block, 1)]
