"""Datasets of version 1 of the format: they are read as ever; a run neither mixes with them nor loses them, nor newer ones."""

from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipelines.datasets.inspection import describe
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.footers import Footer, footer_metadata
from schemas.kinds import FAILURES
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output_state import OutputState
from schemas.writing.repair import repair
from schemas.writing.validation import validate
from tests.builders import tree
from tests.schemas.conftest import plain, prepare
from tests.version1 import as_version_1

KINDS = ["captions", "encoded", "vocabulary", "features", "features16", "regions", "embeddings"]
VECTORS = {"features": "feature", "features16": "feature", "regions": "boxes", "embeddings": "embedding"}
SHARD = "part-00001-of-00003.parquet"


@pytest.fixture
def old_toy(copy_toy):
    def copy(name):
        toy = copy_toy(name)
        as_version_1(toy.path)
        return toy

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_version_1_is_read_valid_and_inspected(old_toy, toys, kind):
    toy = old_toy(kind)
    dataset = open_dataset(toy.path, kind=toy.kind)
    assert (dataset.manifest.version, dataset.fingerprint) == (1, toy.output.fingerprint)
    assert dataset.table().to_pylist() == plain(toy.rows)
    assert [row for batch in dataset.batches() for row in batch.to_pylist()] == plain(toy.rows)
    assert sorted(dataset.failures().to_pylist(), key=lambda row: row["key"]) == toy.failures
    assert dataset.failures().schema.equals(FAILURES)
    assert dataset.manifest.failed == len(toy.failures)
    assert dataset.manifest.failure_reasons == Counter(failure["reason"] for failure in toy.failures)
    if kind == "vocabulary":
        assert dataset.vocabulary() == open_dataset(toys[kind].path).vocabulary()
    else:
        expected = [row for row in toy.rows if row["image_id"] == "猫"]
        assert dataset.rows("猫").to_pylist() == plain(expected)
    if column := VECTORS.get(kind):
        np.testing.assert_array_equal(dataset.numpy(column), np.stack([row[column] for row in toy.rows]))
    assert validate(toy.path) == []
    overview, _, _, failures, _ = describe(dataset)
    assert ["fingerprint", toy.output.fingerprint] in overview.values
    (rows,) = (value for name, value in overview.values if name == "rows")
    assert rows.startswith(f"{len(toy.rows)} in {toy.output.shards} shards")
    assert {row[-1] for row in failures.values} == {failure["message"] for failure in toy.failures}


@pytest.mark.parametrize("name", ["part-00000-of-00003.parquet", "failures/{}", "vocabulary.txt"])
def test_damage_is_found(old_toy, name):
    toy = old_toy("vocabulary" if name == "vocabulary.txt" else "features")
    name = name.format(next((toy.path / "failures").iterdir()).name) if "{}" in name else name
    data = bytearray((toy.path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (toy.path / name).write_bytes(data)
    assert any(problem.startswith(f"{name} has SHA-256 ") for problem in validate(toy.path))
    (toy.path / name).unlink()
    assert f"{name} is missing" in validate(toy.path)


@pytest.mark.parametrize("lost", ["nothing", "manifest.json"])
def test_run_does_not_go_on_with_it(old_toy, lost):
    toy = old_toy("features")
    (toy.path / lost).unlink(missing_ok=True)
    before = tree(toy.path)
    with pytest.raises(
        DatasetError,
        match=r"'.*/features' holds this dataset in version 1 of the format, which can be read but not continued: nothing was "
        r"written\. Keep it, or give --overwrite to write it again in version 2",
    ):
        write_dataset(toy.output, toy.fill)
    assert OutputState(toy.output).committed_manifest() is None
    assert OutputState(toy.output).finished_shards() == set()
    assert tree(toy.path) == before


@pytest.mark.parametrize("kind", KINDS)
def test_overwriting_leaves_nothing_of_it(old_toy, toys, kind):
    toy = old_toy(kind)
    old = (toy.path / "manifest.json").read_bytes()
    prepare(toy.output, overwrite=True)
    assert [name for name in tree(toy.path) if name != "vocabulary.txt"] == []
    for number in range(toy.output.shards):
        toy.write_shard(number)
    toy.commit()
    assert tree(toy.path).keys() == tree(toys[kind].path).keys()
    assert validate(toy.path) == []
    assert open_dataset(toy.path).manifest == open_dataset(toys[kind].path).manifest
    # Version 2 is read first; what is left of version 1 is then a file that belongs to nothing.
    (toy.path / "manifest.json").write_bytes(old)
    assert open_dataset(toy.path).manifest.version == 2
    assert validate(toy.path) == ["manifest.json is in the folder but not in the manifest"]


def test_shard_of_a_newer_version_is_not_touched(copy_toy):
    toy = copy_toy("captions")
    (toy.path / "_manifest.json").unlink()
    name = toy.output.name(0)
    stored = pq.read_table(toy.path / name)
    footer = footer_metadata(Footer(toy.kind, toy.output.fingerprint, toy.output.parameters, version=3))
    with pq.ParquetWriter(toy.path / name, stored.schema.remove_metadata()) as writer:
        writer.write_table(stored)
        writer.add_key_value_metadata(footer)
    before = (toy.path / name).read_bytes()
    with pytest.raises(
        DatasetError, match=r"captions' has format version 3, .* up to 2: update imagepivot. Nothing was written"
    ):
        write_dataset(toy.output, toy.fill)
    assert (toy.path / name).read_bytes() == before


def test_repair_leaves_a_whole_dataset_alone_and_refuses_a_damaged_one(old_toy):
    toy = old_toy("captions")
    before = tree(toy.path)
    assert repair(toy.path).missing == ()
    assert before.items() <= tree(toy.path).items()
    (toy.path / SHARD).write_bytes(b"damaged")
    with pytest.raises(DatasetError, match="is damaged and has version 1 of the format, which cannot be continued"):
        repair(toy.path)
