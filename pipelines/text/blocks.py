"""Blocks of captions: the plain functions behind the transforms of ``pipelines.text.captions``.

A block is an Arrow table of a few thousand captions. Workers pass tables on, not captions, because passing an element costs Beam
more than tokenizing a caption. Only raw text travels; each shard is tokenized by the worker that writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions import CAPTION_COLUMNS
from pipelines.text.moses import Recipe, prepare
from pipelines.text.ordering import key_of
from pipelines.text.truecasing import TruecaseModel, count_forms, truecase
from schemas.errors import InputError
from schemas.kinds import CAPTIONS

BLOCK = CAPTION_COLUMNS.append(pa.field("position", pa.int64()))
"""Columns of a block as read. ``position`` keeps the order of the source: first the number of the part, then of the caption."""

_PART = 1 << 40


def blocks_of(tables: Iterable[pa.Table], part: int) -> Iterator[pa.Table]:
    """Turn the captions of a part of a source into blocks.

    Args:
        tables: captions in the order of the source, see `pipelines.inputs.captions.CaptionSource.tables`.
        part: number of the part.

    Yields:
        Tables with the columns `BLOCK`.
    """
    start = part * _PART
    for table in tables:
        position = pa.array(np.arange(start, start + table.num_rows))
        start += table.num_rows
        yield table.append_column(BLOCK.field("position"), position)


def block_forms(block: pa.Table, recipe: Recipe, splits: frozenset[str]) -> dict[str, Counter[str]]:
    """Count word forms by language, in tenths, over the captions of the training splits."""
    forms: dict[str, Counter[str]] = {}
    rows = zip(block["language"].to_pylist(), block["split"].to_pylist(), block["text"].to_pylist(), strict=True)
    for language, split, text in rows:
        if split in splits:
            counter = forms.setdefault(language, Counter())
            for form, weight in count_forms(prepare(text or "", language, recipe)):
                counter[form] += weight
    return forms


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
    lines = [prepare(text or "", language, recipe) for text, language in zip(texts, languages, strict=True)]
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


def _empty_caption(row: Mapping[str, Any]) -> dict[str, str]:
    caption = "the missing caption (null)" if row["text"] is None else f"the caption {row['text']!r}"
    return {
        "key": str(key_of(row)),
        "uri": "",
        "stage": "prepare",
        "reason": "empty_caption",
        "message": f"{caption} of split {row['split']!r} holds no token",
    }


class CaptionStatistics:
    """Counts captions and tokens by portion, split and language, and images by split, over the rows of a shard in their order."""

    def __init__(self) -> None:
        self._captions: dict[str, Counter[str]] = {}
        self._images: Counter[str] = Counter()
        self._last_image = ""
        self._last_splits: set[str] = set()

    def add(self, rows: pa.Table) -> None:
        """Add rows of kind ``captions``, which follow those added before: the captions of an image stand together."""
        if not rows.num_rows:
            return
        groups = rows.select(["portion", "split", "language"]).append_column("tokens", pc.list_value_length(rows["tokens"]))
        grouped = groups.group_by(["portion", "split", "language"], use_threads=False)  # Starting threads takes longer.
        counts = grouped.aggregate([("tokens", "count"), ("tokens", "sum")])
        for row in counts.to_pylist():
            counter = self._captions.setdefault(f"{row['portion']}/{row['split']}/{row['language']}", Counter())
            counter.update(captions=row["tokens_count"], tokens=row["tokens_sum"])
        images = rows.group_by(["image_id", "split"], use_threads=False).aggregate([])
        self._images.update(images["split"].to_pylist())
        counted_before = self._last_splits & _splits_of(images, self._last_image)
        self._images.subtract(counted_before)
        last = rows["image_id"][-1].as_py()
        self._last_splits = _splits_of(images, last) | (self._last_splits if last == self._last_image else set())
        self._last_image = last

    def to_json(self) -> dict[str, Any]:
        """Return the counts as the footer of the shard has them; nothing if there were no rows."""
        if not self._captions:
            return {}
        captions = {group: dict(counter) for group, counter in self._captions.items()}
        return {"captions": captions, "images": dict(self._images)}


def _splits_of(images: pa.Table, image_id: str) -> set[str]:
    return set(images.filter(pc.equal(images["image_id"], image_id))["split"].to_pylist())
