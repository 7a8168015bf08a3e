"""Ranks of single queries: a table, and the file ``ranks.parquet``.

Docs: reference/intervals.md describes the columns.
"""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import and_
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from torch import Tensor

from schemas.errors import DatasetError
from schemas.footers import ShardRows
from schemas.storage.folder import Folder
from train.chance import CUTOFFS, DIRECTIONS, RECALLS
from train.data.captions import Captions
from train.evaluation.metrics import Ranks
from train.evaluation.statistics import MetricIntervals, bootstrap_intervals

RANKS = "ranks.parquet"

SCHEMA = pa.schema(
    [
        *(pa.field(name, pa.string(), nullable=False) for name in ("split", "language", "portion", "direction")),
        pa.field("candidates", pa.string()),
        *(pa.field(name, pa.string(), nullable=False) for name in ("query_id", "image_id")),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("best_wrong", pa.string()),
        pa.field("fold", pa.int16()),
    ]
)


def rank_table(captions: Captions, language: str, ranks: Ranks, fold: int | None = None) -> pa.Table:
    """Return the ranks of a language's images and captions, both directions."""
    rows = captions.rows_of(language)
    image_ids = np.array(captions.image_ids, object)[np.unique(captions.images[rows])]
    texts = captions.ids(rows)
    images = np.array(captions.image_ids, object)[captions.images[rows]]
    directions = (
        (DIRECTIONS[0], image_ids, image_ids, ranks.image_to_text, texts, ranks.best_wrong[0]),
        (DIRECTIONS[1], texts, images, ranks.text_to_image, image_ids, ranks.best_wrong[1]),
    )
    return pa.concat_tables(direction_table(captions, language, *direction, fold=fold) for direction in directions)


def direction_table(
    captions: Captions,
    language: str,
    direction: str,
    query_ids: np.ndarray,
    image_ids: np.ndarray,
    ranks: Tensor,
    item_ids: np.ndarray,
    best_wrong: Tensor,
    *,
    candidates: str | None = None,
    fold: int | None = None,
) -> pa.Table:
    """Return the ranks of one direction; ``best_wrong`` are positions of items or -1."""
    size, wrong = len(query_ids), best_wrong.numpy()
    portions = np.unique(captions.portions[captions.rows_of(language)])
    portion = ",".join(sorted(captions.portion_names[index] for index in portions))
    constant = [captions.split, language, portion, direction, candidates]
    columns = [pa.repeat(pa.scalar(value, pa.string()), size) for value in constant]
    columns += [pa.array(query_ids, pa.string()), pa.array(image_ids, pa.string()), pa.array(ranks.int().numpy())]
    columns.append(pa.array(item_ids, pa.string()).take(pa.array(wrong, mask=wrong < 0)))
    return pa.table([*columns, pa.repeat(pa.scalar(fold, pa.int16()), size)], schema=SCHEMA)


@dataclass(frozen=True, eq=False)
class Queries:
    """Ids and image ids ``[Q]`` of one direction, by id, and ranks ``[S, Q]``."""

    ids: np.ndarray
    images: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, table: pa.Table, **place: str) -> Self:
        """Select the ranks of a place."""
        rows = table.filter(reduce(and_, (pc.field(name) == value for name, value in place.items()))).sort_by("query_id")
        return cls(rows["query_id"].to_numpy(), rows["image_id"].to_numpy(), rows["rank"].to_numpy()[None])

    @cached_property
    def intervals(self) -> MetricIntervals:
        """Confidence intervals of the means over runs."""
        return bootstrap_intervals(self.ranks, self.images)

    def recall(self, measure: str) -> list[float]:
        """Return a recall in percent, of each run."""
        return (100 * (self.ranks <= CUTOFFS[RECALLS.index(measure)]).mean(1)).tolist()


def join_runs(runs: Sequence[Queries | None]) -> Queries | None:
    """Join the ranks of runs; None unless all have ranks of the same queries."""
    known = [run for run in runs if run is not None and len(run.ids)]
    if not known or len(known) < len(runs) or not all(np.array_equal(run.ids, known[0].ids) for run in known):
        return None
    return replace(known[0], ranks=np.concatenate([run.ranks for run in known]))


def write_ranks(folder: Folder, table: pa.Table, metadata: Mapping[str, str] | None = None) -> None:
    """Write ``ranks.parquet``, deterministically.

    Metadata are texts by name, e.g. the step.
    """
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(metadata), buffer, compression="zstd")
    folder.put(RANKS, buffer.getvalue())


def read_ranks(folder: str | os.PathLike[str]) -> pa.Table:
    """Read the ranks that ``evaluate --output`` or ``train`` wrote into a folder.

    >>> ranks = imagepivot.read_ranks("runs/demo")
    >>> ranks.column_names[:4], sorted(set(ranks["direction"].to_pylist()))
    (['split', 'language', 'portion', 'direction'], ['image_to_text', 'text_to_image'])

    Raises:
        DatasetError: the folder holds no ranks, or damaged ones.
    """
    location = Folder(os.fspath(folder))
    source = location.path_of(RANKS)
    try:
        table = ShardRows(pa.BufferReader(location.read(RANKS)), source).read()
    except FileNotFoundError:
        raise DatasetError(
            f"{location.location!r} holds no {RANKS}: give a folder that imagepivot evaluate --output or imagepivot train wrote"
        ) from None
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{source} is damaged ({error}): copy it again, or evaluate the run again") from error
    if not table.schema.equals(SCHEMA):
        raise DatasetError(
            f"{source} has the columns {', '.join(table.column_names)}, expected {', '.join(SCHEMA.names)}: "
            "it was written by another program or version; evaluate the run again"
        )
    return table
