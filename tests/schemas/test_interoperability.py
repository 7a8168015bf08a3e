"""Datasets read by other people's tools, which know nothing of us: every kind, by its folder and by a glob of its shards."""

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.vocabulary import SPECIALS
from schemas.writing.dataset_writer import commit
from schemas.writing.validation import validate
from tests.schemas.conftest import KINDS, make_toy, plain

VECTORS = [("features", "feature"), ("features16", "feature"), ("regions", "features"), ("regions", "boxes")]


def stacked(toy, column):
    return np.stack([row[column].ravel() for row in toy.rows])


@pytest.fixture(scope="module")
def huggingface(tmp_path_factory):
    """``load_dataset`` of the package ``datasets``, which downloads nothing and writes to a temporary folder."""
    patch = pytest.MonkeyPatch()
    cache = tmp_path_factory.mktemp("huggingface")
    patch.setenv("HF_HOME", str(cache))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.setenv("HF_DATASETS_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()

    def load(toy, *, folder=False, **kwargs):
        source = {"path": str(toy.path)} if folder else {"path": "parquet", "data_files": toy.glob}
        return datasets.load_dataset(**source, split="train", cache_dir=str(cache), **kwargs)

    yield load
    patch.undo()


# --- a whole folder --------------------------------------------------------------------------------------------------

SIDE_FILES = {
    "captions": [f"_truecaser/{language}.model" for language in ("cs", "de", "en", "fr")],
    "features": [],
    "regions": ["_names/classes", "_names/attributes"],
}


FAILURE = {"uri": "n.jpg", "stage": "decode", "reason": "truncated", "message": "Ende"}
FAILURES = [{"key": f"broken-{n}", **FAILURE} for n in range(200)]  # Every shard has some.


@pytest.fixture(scope="module", params=[1, 3, 16])
def full(request, toys, tmp_path_factory):
    """Every kind with all that may lie beside the shards: failures in each of them, records, side files."""
    root = tmp_path_factory.mktemp("full")
    datasets = {}
    for kind in KINDS:
        toy = toys[kind]
        shards = 1 if kind in ("vocabulary", "word-vectors") else request.param
        failed = FAILURES if kind in ("captions", "features", "features16", "regions") else []
        options = {"spec": toy.spec, "parameters": toy.output.parameters, "failures": failed, "shards": shards}
        toy = make_toy(root / kind, toy.kind, toy.rows, **options)
        toy.write()
        if kind in SIDE_FILES:
            for name in SIDE_FILES[kind]:
                toy.output.folder.put(name, b"sky\nman\n")
            commit(toy.output, files=tuple(SIDE_FILES[kind]))
        assert validate(toy.path) == []
        assert len(list((toy.path / ".records").iterdir())) == shards
        assert len(list(toy.path.glob("_failures/*"))) == (shards if failed else 0)
        datasets[kind] = toy
    return datasets


def in_order(rows):
    """Rows in the order of their keys: of several shards any may be read first."""
    keys = [name for name in ("image_id", "language", "portion", "index", "id") if rows and name in rows[0]]
    return sorted(plain(rows), key=lambda row: tuple(row[name] for name in keys))


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS)
def test_pyarrow_reads_a_folder(full, kind):
    toy = full[kind]
    assert pa.dataset.dataset(toy.path).schema.names == toy.schema.names
    assert in_order(pa.dataset.dataset(toy.path).to_table().to_pylist()) == in_order(toy.rows)
    assert in_order(pq.read_table(toy.path).to_pylist()) == in_order(toy.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_pandas_reads_a_folder(full, kind):
    toy = full[kind]
    frame = pd.read_parquet(toy.path)
    assert list(frame.columns) == toy.schema.names
    rows = [
        {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}
        for row in frame.to_dict("records")
    ]
    assert in_order(rows) == in_order(toy.rows)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["'{}/**/*.parquet'", "read_parquet('{}')", "'{}/*.parquet'"])
def test_duckdb_reads_a_folder(full, kind, source):
    toy = full[kind]
    columns = [name for name in toy.schema.names if name != "counts"]
    quoted = ", ".join(f'"{name}"' for name in columns)
    rows = duckdb.sql(f"select {quoted} from {source.format(toy.path)}").fetchall()
    found = [dict(zip(columns, (list(v) if isinstance(v, tuple) else v for v in row), strict=True)) for row in rows]
    assert in_order(found) == in_order([{name: row[name] for name in columns} for row in toy.rows])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_polars_reads_a_folder_by_a_pattern(full, kind):
    toy = full[kind]
    columns = [name for name in toy.schema.names if name != "counts"]
    frame = pl.read_parquet(toy.path / "**/*.parquet").select(columns).with_columns(pl.col(pl.Categorical).cast(pl.String))
    assert in_order(frame.to_dicts()) == in_order([{name: row[name] for name in columns} for row in toy.rows])


def test_polars_takes_no_folder_of_mixed_files(full):
    # Whatever they are called; the page on datasets says so, and gives the pattern instead.
    with pytest.raises(pl.exceptions.PolarsError, match="different file extensions"):
        pl.read_parquet(full["captions"].path)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vocabulary"])
def test_huggingface_reads_a_folder(full, huggingface, kind):
    toy = full[kind]
    loaded = huggingface(toy, folder=True)
    assert loaded.column_names == toy.schema.names
    assert in_order(loaded.to_list()) == in_order(toy.rows)


# --- pyarrow ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "column"), VECTORS)
def test_pyarrow_to_numpy(toys, kind, column):
    toy = toys[kind]
    chunks = pq.read_table(sorted(toy.path.glob("part-*.parquet")))[column].chunks
    array = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1) for chunk in chunks])
    np.testing.assert_array_equal(array, stacked(toy, column))


# --- polars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "column", "dtype"),
    [
        ("features", "feature", pl.Array(pl.Float32, 2048)),
        ("regions", "features", pl.Array(pl.Float32, 36 * 2048)),
        ("regions", "boxes", pl.Array(pl.Float32, 144)),
        ("regions", "class_ids", pl.Array(pl.Int16, 36)),
    ],
)
def test_polars_reads_vectors_as_arrays(toys, kind, column, dtype):
    frame = pl.read_parquet(toys[kind].glob)
    assert frame.schema[column] == dtype
    np.testing.assert_array_equal(frame[column].to_numpy(), stacked(toys[kind], column))


def test_polars_reads_half_precision(toys):
    column = pl.read_parquet(toys["features16"].glob)["feature"]
    assert isinstance(column.dtype, pl.Array)
    assert column.dtype.shape == (4096,)
    np.testing.assert_array_equal(column.to_numpy().astype(np.float16), stacked(toys["features16"], "feature"))


def test_polars_reads_counts_by_language(toys):
    counts = pl.read_parquet(toys["vocabulary"].glob)["counts"].to_list()
    # A map since polars 2, before that a list of pairs.
    found = [pairs if isinstance(pairs, dict) else dict(tuple(pair.values()) for pair in pairs) for pairs in counts]
    assert found == [dict(row["counts"]) for row in toys["vocabulary"].rows]


def test_polars_takes_a_table(toys):
    frame = pl.from_arrow(open_dataset(toys["captions"].path).table())
    assert frame["text"].to_list() == [row["text"] for row in toys["captions"].rows]


# --- DuckDB ----------------------------------------------------------------------------------------------------------


def test_duckdb_reads_counts_by_language(toys):
    toy = toys["vocabulary"]
    found = duckdb.sql(f"select token, counts['en'] from '{toy.glob}' where map_contains(counts, 'en')").fetchall()
    expected = [(row["token"], dict(row["counts"])["en"]) for row in toy.rows if "en" in dict(row["counts"])]
    assert found == expected


# --- HuggingFace -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["captions", "encoded", "features", "features16", "regions"])
def test_huggingface(toys, huggingface, kind):
    toy = toys[kind]
    loaded = huggingface(toy)
    assert loaded.column_names == toy.schema.names
    assert plain(loaded.to_list()) == plain(toy.rows)


@pytest.mark.parametrize(
    ("kind", "column", "shape", "dtype"),
    [
        ("features", "feature", (12, 2048), "float32"),
        ("features16", "feature", (12, 4096), "float16"),
        ("regions", "boxes", (12, 144), "float32"),
        ("regions", "class_ids", (12, 36), "int16"),
    ],
)
def test_huggingface_gives_arrays(toys, huggingface, kind, column, shape, dtype):
    toy = toys[kind]
    array = huggingface(toy, columns=[column]).with_format("numpy", dtype=np.dtype(dtype).type)[:][column]
    assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
    np.testing.assert_array_equal(array, stacked(toy, column))


@pytest.mark.parametrize("folder", [False, True])
def test_huggingface_has_no_maps_and_reads_a_vocabulary_without_them(full, huggingface, folder):
    from datasets import Features, Value

    toy = full["vocabulary"]
    # The columns alone are not enough: without `features` it translates the types of all columns first.
    columns = Features({"id": Value("int32"), "token": Value("string"), "count": Value("int64")})
    loaded = huggingface(toy, folder=folder, features=columns, columns=list(columns))
    assert loaded.column_names == ["id", "token", "count"]
    assert loaded.to_list() == [{name: row[name] for name in ("id", "token", "count")} for row in toy.rows]
    assert tuple(loaded["token"][:4]) == SPECIALS
