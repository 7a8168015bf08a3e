"""Reading, tokenizing, writing and counting of caption shards, without Beam.

A block is an Arrow table of a few thousand captions: passing a caption to another process takes longer than
tokenizing it. Only raw text travels; the worker that writes a shard tokenizes it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.captions.base import CAPTION_COLUMNS, CaptionSource, Part, Selection
from pipelines.running.meter import Meter, failure_counts
from pipelines.running.process_pool import Map
from pipelines.text.merge_sort import SortedRun, key_of, make_sorted_runs, merge_runs, number_captions, read_run, spill_to_disk
from pipelines.text.moses import Recipe, prepare
from pipelines.text.token_counts import sum_by_key
from pipelines.text.truecasing import TruecaseModel, count_forms, parse_truecaser, truecase
from schemas.errors import InputError
from schemas.failures import failure_row
from schemas.kinds import CAPTIONS
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard

BLOCK_SCHEMA = CAPTION_COLUMNS.append(pa.field("position", pa.int64()))
"""Columns of a block as read. ``position`` sorts captions in the order of the source: by part, then by place in the part."""

_READERS = 16
"""Number of groups of parts. The captions of a group are gathered together, so that many small files yield few runs."""

_PART = 1 << 40
_REPORT_ROWS = 2000


def blocks_of(tables: Iterable[pa.Table], part: int) -> Iterator[pa.Table]:
    """Add the column ``position`` to the tables of a part, see `CaptionSource.tables`."""
    start = part * _PART
    for table in tables:
        position = pa.array(np.arange(start, start + table.num_rows))
        start += table.num_rows
        yield table.append_column(BLOCK_SCHEMA.field("position"), position)


def read_sorted_runs(
    parts: Iterable[tuple[int, Part]],
    *,
    source: CaptionSource,
    selection: Selection,
    shards: int,
    skip_shards: frozenset[int],
    folder: str | None = None,
) -> Iterator[tuple[int, SortedRun]]:
    """Read parts of a source and yield pairs (shard index, sorted run)."""
    blocks = (block for index, part in parts for block in blocks_of(source.tables(part, selection), index))
    yield from make_sorted_runs(blocks, shards, skip_shards=skip_shards, folder=folder)


def group_parts(parts: Sequence[Part]) -> list[list[tuple[int, Part]]]:
    """Divide the parts of a source, with their indices, into groups."""
    numbered = list(enumerate(parts))
    return [numbered[start::_READERS] for start in range(min(_READERS, len(numbered)))]


def list_sorted_runs(parts: Iterable[tuple[int, Part]], **arguments: Any) -> list[tuple[int, SortedRun]]:
    """Return what `read_sorted_runs` yields, given the same arguments."""
    return list(read_sorted_runs(parts, **arguments))


def write_caption_shard(
    shard_and_runs: tuple[int, Iterable[SortedRun | None]],
    models: Mapping[str, str],
    *,
    output: OutputDataset,
    recipe: Recipe,
    advice: str,
    meter: Meter,
) -> int:
    """Merge, number, tokenize and write the captions of a shard, and return its index.

    Runs come in any order; None is skipped. ``models`` holds texts of truecasers by language, for a recipe
    that truecases. ``advice`` ends the error for a duplicate key.
    """
    shard, runs = shard_and_runs
    meter.start_shard(shard)
    truecasers = {language: parse_truecaser(text) for language, text in models.items()}
    statistics = CaptionStatistics()
    with spill_to_disk(run for run in runs if run) as spilled, open_shard(output, shard) as writer:
        for captions in number_captions(merge_runs(spilled), advice):
            tables = []
            for start in range(0, captions.num_rows, _REPORT_ROWS):
                tokenized, failures = tokenize_captions(captions.slice(start, _REPORT_ROWS), recipe, truecasers)
                tables.append(tokenized)
                writer.add_failures(failures)
                reasons = Counter(failure["reason"] for failure in failures)
                meter.add(captions=tokenized.num_rows + len(failures), **failure_counts(reasons))
            rows = caption_rows(tables)
            statistics.add(rows)
            writer.write(rows)
        writer.statistics = statistics.to_json()
    meter.finish_shard()
    return shard


def learn_truecasers(shards: Iterable[list[SortedRun]], recipe: Recipe, splits: Iterable[str], run: Map) -> dict[str, str]:
    """Learn a truecaser per language from the runs of all shards, as texts."""
    forms = sum_by_key(run(partial(runs_forms, recipe=recipe, splits=frozenset(splits)), shards))
    return {language: TruecaseModel.from_counts(counts).to_text() for language, counts in forms.items()}


def runs_forms(runs: Iterable[SortedRun], recipe: Recipe, splits: frozenset[str]) -> dict[str, Counter[str]]:
    """Count word forms in the captions of runs, as `block_forms` does."""
    return sum_by_key(block_forms(read_run(run), recipe, splits) for run in runs)


def block_forms(block: pa.Table, recipe: Recipe, splits: frozenset[str]) -> dict[str, Counter[str]]:
    """Count word forms, in tenths, in the captions of some splits, by language."""
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
    """Tokenize the captions of a block.

    A recipe that truecases needs ``models``, truecasers by language.

    Returns:
        The captions with at least one token, in order and with the column ``tokens``, and a failure for each other caption.

    Raises:
        InputError: a language has no truecaser.
    """
    texts, languages = table["text"].to_pylist(), table["language"].to_pylist()
    lines = [prepare(text or "", language, recipe) for text, language in zip(texts, languages, strict=True)]
    if recipe.truecase:
        models = models or {}
        if missing := set(languages) - set(models):
            raise InputError(
                f"no truecaser for language {min(missing)!r}: there are models for {', '.join(sorted(models)) or 'no language'}. "
                "The source has no captions in that language in the training split; give a model with --truecaser, or name "
                "the split to learn from with --train-splits"
            )
        lines = [truecase(tokens, models[language]) for tokens, language in zip(lines, languages, strict=True)]
    table = table.append_column("tokens", pa.array(lines, pa.list_(pa.string())))
    empty = pc.equal(pc.list_value_length(table["tokens"]), 0)
    failures = [_empty_caption(row) for row in table.filter(empty).to_pylist()]
    return table.filter(pc.invert(empty)), failures


def caption_rows(tables: Iterable[pa.Table]) -> pa.Table:
    """Return tokenized captions, in order, as rows of kind ``captions``."""
    columns = pa.schema([*BLOCK_SCHEMA, pa.field("tokens", pa.list_(pa.string()))])
    # Combined before the cast, which would otherwise give each chunk a dictionary of its own.
    table = pa.concat_tables([columns.empty_table(), *tables]).combine_chunks()
    return table.select(CAPTIONS.names).cast(CAPTIONS)


def _empty_caption(row: Mapping[str, Any]) -> dict[str, str]:
    caption = "the missing caption (null)" if row["text"] is None else f"the caption {row['text']!r}"
    return failure_row(str(key_of(row)), "prepare", "empty_caption", f"{caption} of split {row['split']!r} holds no token")


class CaptionStatistics:
    """Counts of captions and tokens by group, and of images by split, in a shard."""

    def __init__(self) -> None:
        self._captions: dict[str, Counter[str]] = {}
        self._images: Counter[str] = Counter()
        self._last: set[tuple[str, str]] = set()  # The last image with each of its splits so far.

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of kind ``captions``, sorted by key."""
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
        """Return the counts for the footer of the shard; empty without rows."""
        if not self._captions:
            return {}
        captions = {group: dict(counter) for group, counter in self._captions.items()}
        return {"captions": captions, "images": dict(self._images)}
