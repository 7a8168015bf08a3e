"""``imagepivot diff``: the differences between two datasets of one kind.

Rows are joined by key as two sorted streams, so memory holds a row group of each open shard. Datasets with the same number of
shards are joined shard by shard. With ``A`` and ``B`` shards, an image of shard ``a`` can only be in a shard ``b`` with the same
remainder modulo ``gcd(A, B)``: these shards are merged and joined together.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from pipelines.datasets.inspection import elide, value_rows
from pipelines.jobs import DiffJob
from pipelines.running.meter import Meter
from schemas.console.tables import Cell, Column, Row, Table
from schemas.dataset import Dataset, dicts_of_rows, open_dataset
from schemas.errors import UsageError
from schemas.fingerprints import canonical_json
from schemas.keys import normalization_hint
from schemas.kinds import KEY_COLUMNS, is_vector
from schemas.options import takes_fields
from schemas.writing.output_state import parameter_differences

_SAMPLE_KEYS = 5
_FEATURES = ("feature", "features", "embedding", "vector", "vectors")
_Row: TypeAlias = Mapping[str, Any]


class ParameterDifference(NamedTuple):
    """A differing parameter or input: its dotted path, and its values or None."""

    path: str
    a: Any
    b: Any


@dataclass
class KeySample:
    """A number of rows, and the keys of the first few as text."""

    count: int = 0
    first: tuple[str, ...] = ()

    def add(self, key: tuple[Any, ...]) -> None:
        """Count a row."""
        self.count += 1
        if len(self.first) < _SAMPLE_KEYS:
            self.first = (*self.first, _text(key))


@dataclass
class VectorDifference:
    """The differences of a column of real numbers over common rows.

    Attributes:
        has_cosine: whether the values are features, for which cosines are computed (of each region or token).
        max_difference: largest absolute difference; its key is empty if all values are equal.
        min_cosine: smallest cosine; None without any.
    """

    column: str
    has_cosine: bool
    rows: int = 0
    max_difference: float = 0.0
    max_difference_key: str = ""
    min_cosine: float | None = None
    min_cosine_key: str = ""
    _sum: float = 0.0
    _values: int = 0
    _max_value: float = 0.0
    _cosine_sum: float = 0.0
    _cosines: int = 0

    @property
    def mean(self) -> float:
        """Mean absolute difference over all values."""
        return self._sum / self._values if self._values else 0.0

    @property
    def relative(self) -> float:
        """The largest absolute difference divided by the largest absolute value."""
        return self.max_difference / self._max_value if self._max_value else 0.0

    @property
    def mean_cosine(self) -> float | None:
        """Mean cosine of the vectors; None without any."""
        return self._cosine_sum / self._cosines if self._cosines else None

    def add(self, key: tuple[Any, ...], a: np.ndarray, b: np.ndarray) -> bool:
        """Add arrays ``(vectors, values)`` of one row, and return whether they differ."""
        self._values += a.size
        if not a.size:
            return False
        self._max_value = float(np.maximum(self._max_value, max(np.abs(a).max(), np.abs(b).max())))
        same = np.array_equal(a, b)
        if not same:
            gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
            self.rows += 1
            self._sum += float(gap.sum())
            # NaN counts as the largest difference, and remains so.
            if not math.isnan(self.max_difference) and not float(gap.max()) <= self.max_difference:
                self.max_difference, self.max_difference_key = float(gap.max()), _text(key)
        if self.has_cosine:
            cosines = np.ones(len(a)) if same else _cosines(a.astype(np.float64), b.astype(np.float64))
            self._cosine_sum += float(cosines.sum())
            self._cosines += len(cosines)
            if self.min_cosine is None or float(cosines.min()) < self.min_cosine:
                self.min_cosine, self.min_cosine_key = float(cosines.min()), _text(key)
        return not same


@dataclass(frozen=True)
class DatasetComparison:
    """The differences between datasets A and B.

    Attributes:
        missing_in_a, missing_in_b: keys that only the other dataset has.
        columns: number of rows that differ, by column, for columns without real numbers.
        incomparable: reason why the values could not be compared; empty if they were.
        tolerance: largest absolute difference of real numbers that counts as equal.
    """

    kind: str
    rows_a: int
    rows_b: int
    common: int
    parameters: tuple[ParameterDifference, ...]
    missing_in_a: KeySample
    missing_in_b: KeySample
    differing: KeySample
    columns: Mapping[str, int]
    vectors: tuple[VectorDifference, ...]
    incomparable: str
    tolerance: float

    @property
    def differs(self) -> bool:
        """Whether keys or values differ beyond the tolerance; parameters do not count."""
        return (
            bool(self.incomparable)
            or bool(self.missing_in_a.count or self.missing_in_b.count)
            or any(self.columns.values())
            or not all(column.max_difference <= self.tolerance for column in self.vectors)
        )


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of rows; 1 if both are zero, 0 if one is."""
    norms_a, norms_b = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    product = norms_a * norms_b
    cosines = np.einsum("nd,nd->n", a, b) / np.where(product > 0, product, 1)
    return np.clip(np.where((norms_a == 0) & (norms_b == 0), 1.0, cosines), -1.0, 1.0)


def _text(key: tuple[Any, ...]) -> str:
    return "/".join(map(str, key))


@takes_fields(DiffJob)
def compare_datasets(job: DiffJob, meter: Meter = Meter()) -> DatasetComparison:
    """Compare two datasets of one kind.

    Regions and tokens are compared one by one as far as both sides have them; rows with different numbers are counted.

    Raises:
        UsageError: the datasets are of different kinds.
        DatasetError: a dataset or shard is missing.
    """
    a, b = open_dataset(job.a), open_dataset(job.b)
    if a.kind != b.kind:
        raise UsageError(
            f"{a.folder.location!r} holds {a.kind}, {b.folder.location!r} holds {b.kind}: only datasets of one kind compare"
        )
    incomparable = _shapes_differ(a, b)
    types = {} if incomparable else {field.name: field.type for field in a.schema if field.name not in KEY_COLUMNS[a.kind]}
    vectors = {
        name: VectorDifference(name, name in _FEATURES)
        for name, dtype in types.items()
        if is_vector(dtype) and pa.types.is_floating(dtype.value_type)
    }
    columns = dict.fromkeys((name for name in types if name not in vectors), 0)
    count = {"regions": "num_regions", "token-features": "length"}.get(a.kind)  # Column with the number of vectors in a row.
    only_a, only_b, differing = KeySample(), KeySample(), KeySample()
    common = 0
    for key, row_a, row_b in _joined(a, b, [*KEY_COLUMNS[a.kind], *vectors, *columns]):
        meter.add(rows=1)
        if row_a is None or row_b is None:
            (only_a if row_b is None else only_b).add(key)
            continue
        common += 1
        used = min(row_a[count], row_b[count]) if count else None
        different = [name for name in columns if not _is_equal(row_a[name], row_b[name], used)]
        for name in different:
            columns[name] += 1
        for name, vector in vectors.items():
            # Not `any(...)`, which would stop early: every column must be added.
            if vector.add(key, *(row[name].reshape(len(row[name]) if count else 1, -1)[:used] for row in (row_a, row_b))):
                different.append(name)
        if different:
            differing.add(key)
    return DatasetComparison(
        kind=a.kind,
        rows_a=len(a),
        rows_b=len(b),
        common=common,
        parameters=tuple(_parameters(a, b)),
        missing_in_a=only_b,
        missing_in_b=only_a,
        differing=differing,
        columns=columns,
        vectors=tuple(vectors.values()),
        incomparable=incomparable,
        tolerance=job.tolerance,
    )


def _shapes_differ(a: Dataset, b: Dataset) -> str:
    """Return the reason why features cannot be compared, or an empty string."""
    first = 1 if a.kind == "regions" else 0
    if a.spec is None or b.spec is None or a.spec.shape[first:] == b.spec.shape[first:]:
        return ""
    return f"the features have shapes {list(a.spec.shape)} and {list(b.spec.shape)}"


def _is_equal(a: Any, b: Any, used: int | None) -> bool:
    return np.array_equal(a[:used], b[:used]) if isinstance(a, np.ndarray) else bool(a == b)


def _joined(a: Dataset, b: Dataset, columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], _Row | None, _Row | None]]:
    """Yield all keys in sorted groups, with the row of each side or None."""
    groups = math.gcd(a.num_shards, b.num_shards)
    for group in range(groups):
        shards = [_keyed_rows(side, shard, columns) for side in (a, b) for shard in range(group, side.num_shards, groups)]
        for key, rows in groupby(heapq.merge(*shards, key=itemgetter(0)), key=itemgetter(0)):
            by_side = {side is a: row for _, side, row in rows}
            yield key, by_side.get(True), by_side.get(False)


def _keyed_rows(dataset: Dataset, shard: int, columns: Sequence[str]) -> Iterator[tuple[tuple[Any, ...], Dataset, _Row]]:
    """Yield the rows of a shard with their key, and their dataset."""
    for batch in dataset.shard_batches(shard, columns):
        for row in dicts_of_rows(pa.Table.from_batches([batch]), dataset.spec):
            yield tuple(row[name] for name in KEY_COLUMNS[dataset.kind]), dataset, row


def _parameters(a: Dataset, b: Dataset) -> Iterator[ParameterDifference]:
    left, right = ({**side.manifest.parameters, "inputs": dict(enumerate(side.manifest.inputs))} for side in (a, b))
    for difference in sorted(parameter_differences(left, right), key=itemgetter(0)):
        yield ParameterDifference(*difference)
    if a.num_shards != b.num_shards:
        yield ParameterDifference("shards", a.num_shards, b.num_shards)


def comparison_tables(comparison: DatasetComparison) -> list[Table]:
    """Return a comparison as tables."""
    parameters = [(entry.path, _short(entry.a), _short(entry.b)) for entry in comparison.parameters]
    # A row for each number: columns side by side would be too narrow to read.
    vectors = [row for column in comparison.vectors for row in value_rows({column.column: _vector_numbers(column)})]
    return [
        _rows_table(comparison),
        Table(("", ""), vectors, "values", has_borders=True),
        Table(("", "A", "B"), parameters, "parameters and inputs that differ", has_borders=True),
    ]


def _rows_table(comparison: DatasetComparison) -> Table:
    rows: list[Row] = [("in A", comparison.rows_a), ("in B", comparison.rows_b), ("in both", comparison.common)]
    for label, sample in (
        ("only in A", comparison.missing_in_b),
        ("only in B", comparison.missing_in_a),
        ("in both, with a difference", comparison.differing),
    ):
        rows.append((label, sample.count, ", ".join(sample.first) + (", ..." if sample.count > len(sample.first) else "")))
    if hint := normalization_hint(comparison.missing_in_b.first, comparison.missing_in_a.first):
        rows.append(("", None, Cell(hint, style="yellow")))
    rows += [(f"  {name} differs", count) for name, count in comparison.columns.items() if count]
    if comparison.incomparable:
        rows.append(("values not compared", None, Cell(comparison.incomparable, style="yellow")))
    return Table(("", Column("rows", ","), "the first"), rows, f"{comparison.kind}: rows", has_borders=True)


def _vector_numbers(column: VectorDifference) -> dict[str, str]:
    key = f" ({column.max_difference_key})" if column.max_difference_key else ""
    numbers = {
        "rows that differ": f"{column.rows:,}",
        "largest difference": f"{column.max_difference:.3g}{key}",
        "... divided by the largest value": f"{column.relative:.3g}",
        "mean difference": f"{column.mean:.3g}",
    }
    if column.mean_cosine is not None:
        key = f" ({column.min_cosine_key})" if column.rows else ""
        numbers |= {"mean cosine": f"{column.mean_cosine:.9f}", "smallest cosine": f"{column.min_cosine:.9f}{key}"}
    return numbers


def _short(value: Any) -> str:
    return elide("not set" if value is None else value if isinstance(value, str) else canonical_json(value))
