"""`Dataset.take` against full reads: where pages end, how a shard is encoded, and every byte around the values."""

import random
from contextlib import suppress

import numpy as np
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.footers import ShardRows
from tests.builders import write_rows
from tests.schemas.conftest import flip, make_features

VECTOR_KINDS = ["features", "features16", "regions", "embeddings"]
IMAGE_KINDS = [*VECTOR_KINDS, "captions", "encoded", "token-features"]


def check(dataset, rows, image_ids, columns=None):
    """Compare rows of images with plain rows; vectors by value, shape and type."""
    taken = dataset.take(image_ids, columns)
    expected = [row for image_id in image_ids for row in rows if row["image_id"] == image_id]
    assert list(taken) == (dataset.schema.names if columns is None else columns)
    for name, column in taken.items():
        assert len(column) == len(expected)
        for value, row in zip(column, expected, strict=True):
            if isinstance(row[name], np.ndarray):
                assert (value.dtype, value.shape) == (row[name].dtype, row[name].shape)
                np.testing.assert_array_equal(value, row[name])
            else:
                assert value == row[name]


@pytest.fixture
def ordinary_reads(monkeypatch):
    """The columns of row groups that are decoded one by one."""
    decoded, read = [], ShardRows.read

    def noted(self, columns=None, groups=None):
        decoded.extend([] if groups is None else columns or ["all"])
        return read(self, columns, groups)

    monkeypatch.setattr(ShardRows, "read", noted)
    return decoded


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_take_keeps_order_and_repeated_ids(toys, kind, ordinary_reads):
    dataset, rows = open_dataset(toys[kind].path), toys[kind].rows
    image_ids = sorted({row["image_id"] for row in rows})
    for seed in range(5):
        check(dataset, rows, random.Random(seed).choices(image_ids, k=9))
    check(dataset, rows, image_ids[::-1], dataset.schema.names[-1:])
    check(dataset, rows, [])
    assert (ordinary_reads == []) == (kind in VECTOR_KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("width", [1, 3, 7, 1000, 2048, 2050, 300_001])
def test_take_equals_a_full_read_wherever_pages_end(tmp_path, width, dtype, ordinary_reads):
    rng = np.random.default_rng(width)
    rows = [
        {"image_id": f"{number:05d}", "feature": rng.standard_normal(width, np.float32).astype(dtype)}
        for number in range(max(9, min(2_000_000 // width, 3000)))
    ]
    write_rows(tmp_path / "features", "features", rows, FeatureSpec("random", (width,), dtype), shards=2)
    dataset = open_dataset(tmp_path / "features")
    image_ids, full = dataset.image_ids(), dataset.numpy()
    ordinary_reads.clear()
    chosen = rng.integers(0, len(rows), 300)
    taken = dataset.take([image_ids[number] for number in chosen])
    np.testing.assert_array_equal(taken["feature"], full[chosen])
    np.testing.assert_array_equal(dataset.take(image_ids)["feature"], full)
    assert ordinary_reads == []


@pytest.mark.parametrize(
    "encoding",
    [
        {"compression": "zstd"},
        {"compression": "none"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False, "write_page_checksum": True},
        {"compression": "none", "use_dictionary": False, "use_byte_stream_split": ["feature.list.element"]},
    ],
    ids=str,
)
def test_take_from_shards_of_other_encodings(copy_toy, forge, encoding, ordinary_reads):
    toy = copy_toy("features")
    for name in ("part-00000-of-00003.parquet", "part-00002-of-00003.parquet"):
        table = pq.read_table(toy.path / name)
        with pq.ParquetWriter(toy.path / name, table.schema.remove_metadata(), **encoding) as writer:
            writer.write_table(table.replace_schema_metadata(None), row_group_size=2)
        forge.relist(toy, name)
    check(open_dataset(toy.path), toy.rows, [row["image_id"] for row in toy.rows[::-1]])
    assert ordinary_reads == ["feature"] * len(toy.shard(0) + toy.shard(2))


@pytest.mark.slow
def test_take_from_a_damaged_page_is_an_error_or_right(tmp_path):
    toy = make_features(tmp_path / "damaged", FeatureSpec("small", (40,)), image_ids=[f"{n:02d}" for n in range(12)], shards=1)
    toy.write()
    path = toy.path / "part-00000-of-00001.parquet"
    chunk = pq.read_metadata(path).row_group(0).column(1)
    sound, end, refused = path.read_bytes(), chunk.data_page_offset + chunk.total_compressed_size, 0
    for position in range(chunk.data_page_offset, end - 12 * 40 * 4):  # Header and levels; the values are any numbers.
        flip(path, position)
        with suppress(DatasetError):
            refused += 1
            check(open_dataset(toy.path), toy.rows, ["03", "11"])
            refused -= 1
        path.write_bytes(sound)
    assert refused > 9
    flip(path, chunk.data_page_offset + chunk.total_compressed_size + 8)
    with pytest.raises(DatasetError, match="SHA-256 of its footer"):
        open_dataset(toy.path).take(["03"])
