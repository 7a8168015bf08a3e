"""Blocks of captions to shards: reading, tokenizing, writing and counting, without Beam.

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

from pipelines.inputs.captions import CAPTION_COLUMNS, CaptionSource, Part, Selection
from pipelines.running.meter import Meter
from pipelines.running.spill_files import read_place
from pipelines.text.merge_sort import Piece, key_of, make_pieces, merge, number_captions, on_disk, read_piece
from pipelines.text.moses import Recipe, prepare
from pipelines.text.token_counts import sum_by_key
from pipelines.text.truecasing import TruecaseModel, count_forms, parse_truecaser, truecase
from schemas.errors import InputError
from schemas.kinds import CAPTIONS
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard

BLOCK = CAPTION_COLUMNS.append(pa.field("position", pa.int64()))
"""Columns of a block as read. ``position`` keeps the order of the source: first the number of the part, then of the caption."""

LIBRARIES = ("apache-beam", "sacremoses")
"""Distributions whose versions the manifest of captions states."""

_PART = 1 << 40
_REPORT_ROWS = 2000


def blocks_of(tables: Iterable[pa.Table], part: int) -> Iterator[pa.Table]:
    """Yield the captions of a numbered part, in the order of `CaptionSource.tables`, as blocks, which have the columns `BLOCK`."""
    start = part * _PART
    for table in tables:
        position = pa.array(np.arange(start, start + table.num_rows))
        start += table.num_rows
        yield table.append_column(BLOCK.field("position"), position)


def read_pieces(
    parts: Iterable[tuple[int, Part]],
    source: CaptionSource,
    selection: Selection,
    shards: int,
    *,
    left_out: frozenset[int],
    folder: str | None,
) -> Iterator[tuple[int, Piece]]:
    """Read numbered parts of a source, and yield the index of a shard and a sorted piece of it, as `make_pieces` makes them."""
    blocks = (block for number, part in parts for block in blocks_of(source.tables(part, selection), number))
    yield from make_pieces(blocks, shards, left_out=left_out, folder=folder)


def write_caption_shard(
    shard: int,
    pieces: Iterable[Piece | None],
    models: Mapping[str, str],
    *,
    output: OutputDataset,
    recipe: Recipe,
    advice: str,
    meter: Meter,
) -> int:
    """Merge, number, tokenize and write the captions of a shard.

    Args:
        shard: index of the shard, which is returned.
        pieces: its pieces, in any order; None is none.
        models: texts of truecasers by language, for a recipe that truecases.
        output: the dataset.
        recipe: the steps from text to tokens.
        advice: what to do about a key that occurs twice.
        meter: counts captions.
    """
    truecasers = {language: parse_truecaser(text) for language, text in models.items()}
    statistics = CaptionStatistics()
    with on_disk(piece for piece in pieces if piece) as places, open_shard(output, shard) as writer:
        for captions in number_captions(merge(places, read_place), advice):
            tables = []
            for start in range(0, captions.num_rows, _REPORT_ROWS):
                tokenized, failures = tokenize_captions(captions.slice(start, _REPORT_ROWS), recipe, truecasers)
                tables.append(tokenized)
                writer.add_failures(failures)
                meter.add(captions=tokenized.num_rows + len(failures), failed=len(failures))
            rows = caption_rows(tables)
            statistics.add(rows)
            writer.write(rows)
        writer.statistics = statistics.to_json()
    meter.flush()
    return shard


def learn_truecasers(pieces: Iterable[Piece], recipe: Recipe, splits: Iterable[str]) -> dict[str, str]:
    """Return the text of a truecaser for each language, learned from the captions of some splits."""
    forms = (pair for piece in pieces for pair in block_forms(read_piece(piece), recipe, frozenset(splits)).items())
    return {language: TruecaseModel.from_counts(counts).to_text() for language, counts in sum_by_key(forms).items()}


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
    """Tokenize the captions of a block; a recipe that truecases needs truecasers by language.

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
        self._last: set[tuple[str, str]] = set()  # The last image with each of its splits, which are counted.

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
        grouped_images = rows.group_by(["image_id", "split"], use_threads=False).aggregate([])
        images = list(zip(*(grouped_images[name].to_pylist() for name in ("image_id", "split")), strict=True))
        self._images.update(image[1] for image in images if image not in self._last)
        last = rows["image_id"][-1].as_py()
        self._last = {image for image in (*images, *self._last) if image[0] == last}

    def to_json(self) -> dict[str, Any]:
        """Return the counts as the footer of the shard has them; nothing if there were no rows."""
        if not self._captions:
            return {}
        captions = {group: dict(counter) for group, counter in self._captions.items()}
        return {"captions": captions, "images": dict(self._images)}
