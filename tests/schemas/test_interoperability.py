"""Datasets read by other people's tools, which know nothing of us: every kind, by its folder and by a glob of its shards."""

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from schemas.writing.dataset_writer import commit
from schemas.writing.validation import validate
from tests.schemas.conftest import KINDS, make_toy, plain


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


@pytest.fixture(scope="module", params=[1, 16])
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
    """Rows in the order of their keys, as of several shards any may be read first; counts as dictionaries."""
    keys = [name for name in ("image_id", "language", "portion", "index", "id") if rows and name in rows[0]]
    rows = [{**row, "counts": dict_of(row["counts"])} if "counts" in row else row for row in plain(rows)]
    return sorted(rows, key=lambda row: tuple(row[name] for name in keys))


def dict_of(counts):
    """A map as a dictionary; polars before version 2 has a list of dictionaries with key and value."""
    return dict(counts if isinstance(counts, dict) else [tuple(p.values()) if isinstance(p, dict) else p for p in counts])


def rows_of_duckdb(source):
    relation = duckdb.sql(f"select * from {source}")
    rows = [[list(value) if isinstance(value, tuple) else value for value in row] for row in relation.fetchall()]
    return [dict(zip(relation.columns, row, strict=True)) for row in rows]


READERS = {
    "pyarrow's dataset": lambda path: pa.dataset.dataset(path).to_table().to_pylist(),
    "pyarrow's table": lambda path: pq.read_table(path).to_pylist(),
    "pandas": lambda path: pd.read_parquet(path).to_dict("records"),
    "duckdb's pattern of a tree": lambda path: rows_of_duckdb(f"'{path}/**/*.parquet'"),
    "duckdb's folder": lambda path: rows_of_duckdb(f"read_parquet('{path}')"),
    "polars": lambda path: (
        pl.read_parquet(path / "**/*.parquet").with_columns(pl.col(pl.Categorical).cast(pl.String)).to_dicts()
    ),
}
QUICK = ("pandas", "polars")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.cluster) for name in READERS])
def test_folder_is_read_by_other_tools(full, name, kind):
    rows = READERS[name](full[kind].path)
    assert list(rows[0]) == full[kind].schema.names
    assert in_order(rows) == in_order(full[kind].rows)


@pytest.mark.parametrize("folder", [False, pytest.param(True, marks=pytest.mark.cluster)])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vocabulary"])
def test_huggingface_reads_a_dataset(full, huggingface, kind, folder):
    loaded = huggingface(full[kind], folder=folder)
    assert loaded.column_names == full[kind].schema.names
    assert in_order(loaded.to_list()) == in_order(full[kind].rows)
