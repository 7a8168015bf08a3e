"""Rows of datasets of every kind in a pipeline, with a shuffle, so that each crosses the coder of its schema."""

from collections.abc import Sequence

import apache_beam as beam
import numpy as np
import pytest

from pipelines.datasets.transforms import ReadDataset
from tests.beam import RUNNER, SEEN, see
from tests.schemas.conftest import KINDS, plain, toys  # noqa: F401 -- fixture


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()


def as_plain(value):
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_kind_equal_the_dataset(name, toys):  # noqa: F811
    toy = toys[name]
    with beam.Pipeline(runner=RUNNER) as pipeline:
        rows = pipeline | ReadDataset(toy.path)
        types = dict(rows.element_type._fields)
        _ = rows | beam.Reshuffle() | beam.Map(see)
    keys = [field.name for field in toy.schema]
    assert list(types) == keys
    expected = [{key: dict(row[key]) if key == "counts" else row[key] for key in keys} for row in plain(toy.rows)]
    found = [{key: as_plain(getattr(row, key)) for key in keys} for row in SEEN]
    assert sorted(found, key=str) == sorted(expected, key=str)


@pytest.mark.slow
def test_choice_of_columns(toys):  # noqa: F811
    with beam.Pipeline(runner=RUNNER) as pipeline:
        rows = pipeline | ReadDataset(toys["regions"].path, columns=["num_regions", "image_id"])
        _ = rows | beam.Map(see)
    assert rows.element_type._fields == (("num_regions", np.int16), ("image_id", str))
    assert {(row.num_regions, row.image_id) for row in SEEN} == {
        (row["num_regions"], row["image_id"]) for row in toys["regions"].rows
    }
