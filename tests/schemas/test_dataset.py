import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from schemas.kinds import FAILURES
from schemas.vocabulary import Vocabulary
from tests.schemas.conftest import KINDS, count_tokens, make_features, make_toy

IMAGE_KINDS = ["captions", "encoded", "features", "features16", "regions", "embeddings"]


def same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert list(a) == list(b)
        for name, value in b.items():
            if isinstance(a[name], np.ndarray):  # Read as an array, not as a flat list.
                assert (a[name].shape, a[name].dtype) == (value.shape, value.dtype)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(np.asarray(a[name], value.dtype).reshape(value.shape), value)
            else:
                assert a[name] == value
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_open_dataset_reads_every_kind(toys, kind):
    toy = toys[kind]
    dataset = open_dataset(toy.path, kind=toy.kind)
    assert (dataset.kind, dataset.fingerprint) == (toy.kind, toy.output.fingerprint)
    assert (len(dataset), dataset.num_shards) == (len(toy.rows), toy.output.shards)
    assert dataset.schema.equals(toy.schema)
    assert dataset.spec == toy.spec
    assert same(dataset.table().to_pylist(), toy.rows)


def test_opening_reads_the_manifest_only(copy_toy):
    toy = copy_toy("features")
    for path in toy.path.glob("part-*"):
        path.unlink()
    assert len(open_dataset(toy.path)) == 12


@pytest.mark.parametrize("kind", KINDS)
def test_by_shard(toys, kind):
    toy = toys[kind]
    dataset = open_dataset(toy.path)
    for number in range(toy.output.shards):
        assert same(dataset.shard(number).to_pylist(), toy.shard(number))
    assert [table.num_rows for table in dataset.shards()] == [len(toy.shard(n)) for n in range(toy.output.shards)]
    column = dataset.schema.names[-1]
    assert dataset.shard(0, [column]).schema.names == [column]
    assert [table.schema.names for table in dataset.shards([column])] == [[column]] * toy.output.shards


@pytest.mark.parametrize("batch_size", [1, 5, 4096])
def test_by_batches(toys, batch_size):
    toy = toys["captions"]
    batches = list(open_dataset(toy.path).batches(batch_size=batch_size))
    assert same([row for batch in batches for row in batch.to_pylist()], toy.rows)
    sizes = [len(toy.shard(number)) for number in range(3)]
    expected = [min(batch_size, size - start) for size in sizes for start in range(0, size, batch_size)]
    assert [batch.num_rows for batch in batches] == expected
    table = open_dataset(toy.path).table(["image_id", "tokens"])
    assert table.to_pylist() == [{"image_id": row["image_id"], "tokens": row["tokens"]} for row in toy.rows]
    (first, *_) = open_dataset(toy.path).batches(["text", "image_id"])
    assert sorted(first.schema.names) == ["image_id", "text"]


# --- by key ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", IMAGE_KINDS)
def test_all_rows_of_an_image(toys, kind):
    toy = toys[kind]
    dataset = open_dataset(toy.path)
    for image_id in {row["image_id"] for row in toy.rows}:
        expected = [row for row in toy.rows if row["image_id"] == image_id]
        assert len(expected) == (4 if kind in ("captions", "encoded", "embeddings") else 1)
        assert same(dataset.rows(image_id).to_pylist(), expected)
        columns = dataset.schema.names[-1:]
        assert same(dataset.rows(image_id, columns).to_pylist(), [{name: row[name] for name in columns} for row in expected])
        if len(expected) == 1:
            assert same([dataset.get(image_id)], expected)


@pytest.mark.parametrize("kind", ["captions", "features"])
def test_unknown_image_is_a_key_error_with_similar_ids(toys, kind):
    dataset = open_dataset(toys[kind].path)
    for method in (dataset.rows, dataset.get, lambda image_id: dataset.take(["image-01", image_id])):
        for image_id, hint in (("", ""), ("IMAGE-00", ""), ("image-0", ": did you mean 'image-0")):
            with pytest.raises(KeyError, match=f"{kind}' has no row of image '{image_id}'{hint}") as caught:
                method(image_id)
            assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.parametrize(
    ("kind", "read", "problem"),
    [
        ("captions", lambda d: open_dataset(d, kind="features"), "expected features: give a folder that imagepivot features"),
        ("captions", lambda d: open_dataset(d).vocabulary(), "'.*/captions' holds captions, expected vocabulary: give"),
        ("captions", lambda d: open_dataset(d).get("猫"), r"image '猫' has 4 rows of kind captions: use rows\(\)"),
        ("vocabulary", lambda d: open_dataset(d).rows("dog"), "holds vocabulary, which have no image ids"),
        ("captions", lambda d: open_dataset(d).numpy("tokens"), r"column 'tokens' holds .*, not vectors: use table\(\)"),
    ],
)
def test_data_of_another_kind_is_refused(toys, kind, read, problem):
    with pytest.raises(DatasetError, match=problem):
        read(toys[kind].path)


# --- as one array ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "column", "shape", "dtype"),
    [
        ("features", "feature", (12, 2048), "float32"),
        ("features16", "feature", (12, 4096), "float16"),
        ("regions", "features", (12, 36, 2048), "float32"),
        ("regions", "boxes", (12, 36, 4), "float32"),
    ],
)
def test_column_as_one_array(toys, kind, column, shape, dtype):
    dataset = open_dataset(toys[kind].path)
    array = dataset.numpy(column)
    assert (array.shape, array.dtype, array.flags.c_contiguous, array.flags.writeable) == (shape, np.dtype(dtype), True, True)
    np.testing.assert_array_equal(array, np.stack([row[column] for row in toys[kind].rows]))
    assert dataset.image_ids() == [row["image_id"] for row in toys[kind].rows]


def test_dataset_without_rows(tmp_path):
    make_features(tmp_path / "none", image_ids=[], shards=2).write()
    dataset = open_dataset(tmp_path / "none")
    assert dataset.numpy().shape == (0, 2048)
    assert dataset.numpy(l2=True).shape == (0, 2048)
    assert (dataset.image_ids(), len(dataset), dataset.table().num_rows) == ([], 0, 0)
    with pytest.raises(KeyError, match="a"):
        dataset.get("a")


@pytest.mark.parametrize(("kind", "column"), [("features", "feature"), ("regions", "features")])
def test_l2_norms_are_one(toys, kind, column):
    found = open_dataset(toys[kind].path).numpy(column, l2=True)
    for row, values in zip(toys[kind].rows, found, strict=True):
        exact = row[column].astype(np.float64)
        lengths = np.sqrt((exact**2).sum(axis=-1, keepdims=True))
        # Regions that are not in use are zero, and stay so.
        expected = np.divide(exact, lengths, out=np.zeros_like(exact), where=lengths > 0)
        np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_l2_norms_of_half_precision_do_not_overflow(tmp_path, scale):
    spec = FeatureSpec(name="half", shape=(4096,), dtype="float16")
    rng = np.random.default_rng(17)
    vectors = (rng.standard_normal((4, 4096)) * scale).astype(np.float16)
    vectors[2] = 0
    rows = [{"image_id": f"{n}", "feature": vector} for n, vector in enumerate(vectors)]
    make_toy(tmp_path / "half", "features", rows, spec=spec, shards=1).write()
    found = open_dataset(tmp_path / "half").numpy(l2=True)
    assert found.dtype == np.float16
    lengths = np.linalg.norm(found.astype(np.float64), axis=1)
    np.testing.assert_allclose(lengths, [1, 1, 0, 1], atol=2e-3)


def test_into_a_memory_map_of_another_type(toys, tmp_path):
    toy = toys["features16"]
    out = np.lib.format.open_memmap(tmp_path / "features.npy", mode="w+", dtype=np.float32, shape=(12, 4096))
    assert open_dataset(toy.path).numpy(out=out) is out
    out.flush()
    expected = np.stack([row["feature"] for row in toy.rows]).astype(np.float32)
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), expected)
    wide = np.empty((12, 4096), np.float64)
    open_dataset(toy.path).numpy(out=wide, l2=True)
    np.testing.assert_allclose(np.linalg.norm(wide, axis=1), 1, rtol=1e-12)


@pytest.mark.parametrize(
    "out",
    [
        np.zeros((11, 2048), np.float32),
        np.zeros((12, 4096), np.float32)[:, ::2],
        np.zeros((12, 2048), np.float32, order="F"),
    ],
)
def test_numpy_out_of_another_layout_is_refused(toys, out):
    # One that is not contiguous would stay empty: its reshape is a copy.
    with pytest.raises(ValueError, match=r"out has shape .*, expected .*\(12, 2048\)"):
        open_dataset(toys["features"].path).numpy(out=out)
    assert not out.any()


# --- the rest --------------------------------------------------------------------------------------------------------


def test_failures(toys):
    found = open_dataset(toys["features"].path).failures()
    assert found.schema.equals(FAILURES)
    assert sorted(found.to_pylist(), key=lambda row: row["key"]) == toys["features"].failures
    assert open_dataset(toys["features"].path).manifest.failed == 3
    assert open_dataset(toys["encoded"].path).failures().equals(FAILURES.empty_table())


def test_vocabulary(toys):
    counts = count_tokens(toys["captions"])
    vocabulary = open_dataset(toys["vocabulary"].path).vocabulary()
    assert vocabulary == Vocabulary.from_counts(counts, min_count=1)
    assert (toys["vocabulary"].path / "_vocabulary.txt").read_text(encoding="utf-8") == vocabulary.to_text()


def test_datasets_are_pickled(toys):
    dataset = open_dataset(toys["features"].path)
    assert dataset.spec is not None
    again = pickle.loads(pickle.dumps(dataset))
    assert again == dataset
    assert repr(again) == f"Dataset({str(toys['features'].path)!r}, kind='features', rows=12, shards=3)"
    np.testing.assert_array_equal(again.numpy(), dataset.numpy())


def test_shard_with_fewer_rows_than_listed_is_no_array(copy_toy, forge):
    # Otherwise the rows that are not there would be whatever lies in memory.
    toy = copy_toy("features")
    path = toy.path / "part-00000-of-00003.parquet"
    table = pq.ParquetFile(path).read()

    def count_as_listed(rows):
        forge.relist(toy, path.name)
        forge.edit_manifest(toy, lambda content: content["shards"][0].update(rows=rows))

    pq.write_table(table.slice(1), path)
    count_as_listed(len(table))
    with pytest.raises(DatasetError, match=rf"{path.name} has {len(table) - 1} rows, the manifest says {len(table)}"):
        open_dataset(toy.path).numpy()
    count_as_listed(len(table) * 1000)
    with pytest.raises(DatasetError, match=rf"{path.name} cannot hold {len(table) * 1000:,} rows in [\d,]+ bytes: copy"):
        open_dataset(toy.path).numpy()
    pq.write_table(pa.concat_tables([table, table]), path)
    count_as_listed(len(table))
    with pytest.raises(DatasetError, match=rf"{path.name} has {2 * len(table)} rows, the manifest says {len(table)}"):
        open_dataset(toy.path).numpy()


# --- by number -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_by_number(toys, kind):
    toy = toys[kind]
    dataset = open_dataset(toy.path)
    assert same(list(dataset), toy.rows)
    assert same([dataset[number] for number in range(len(dataset))], toy.rows)
    assert same([dataset[-1], dataset[np.int64(0)]], [toy.rows[-1], toy.rows[0]])
    for part in (slice(3, 9), slice(None, 2), slice(-4, None), slice(5, 5), slice(8, 2, -2), slice(0, 10**6)):
        assert same(dataset[part], toy.rows[part])
    for number in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[number]
    with pytest.raises(TypeError):
        dataset["image-00"]


def test_features_and_rows_by_number_over_several_row_groups(tmp_path):
    toy = make_features(tmp_path / "many", image_ids=[f"{n:05d}" for n in range(1400)], shards=2)
    toy.write()
    dataset = open_dataset(toy.path)
    assert {pq.read_metadata(path).num_row_groups for path in toy.path.glob("part-*")} == {2}
    np.testing.assert_array_equal(dataset.numpy(), np.stack([row["feature"] for row in toy.rows]))
    chosen = np.random.default_rng(0).integers(0, 1400, 12).tolist()
    assert same([dataset[number] for number in chosen], [toy.rows[number] for number in chosen])
    assert same(dataset[500:720], toy.rows[500:720])
