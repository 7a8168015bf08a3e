import re

import pytest

from pipelines.exchange.importing import import_format
from pipelines.exchange.jobs import ExportJob, ImportJob
from schemas.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id_rule": "other"}, "--id-rule is 'other', expected one of 'name', 'path', 'exact'"),
        ({"format": "csv"}, "--format is 'csv', expected one of 'npy', 'tsv', 'hdf5', 'webdataset'"),
        ({"format": "tsv", "ids": ("a",)}, "--ids is for npy and hdf5, these files are tsv"),
        ({"format": "hdf5", "sources": ("x.h5", "y.h5")}, "import one HDF5 file at a time, with at most one list of ids"),
        ({"karpathy_key": "cocoid"}, "give the file with --karpathy"),
        ({"captions": "c", "id_rule": "name"}, "--captions is for one vector per caption"),
    ],
)
def test_import_job_refuses_invalid_options(options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        ImportJob(**{"sources": ("none.npy",), "output": "out", "name": "toy", **options})


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("scan", {}, "give their dataset with --captions"),
        ("scan", {"captions": "c", "split_names": {"val": "a/b"}}, "--split-names calls 'val' 'a/b', expected a part of a"),
        ("webdataset", {"language": "de"}, "--language, --portion and --splits choose captions"),
        ("webdataset", {"l2": True}, "--l2 is for scan and mulisera and npy, not for webdataset"),
        ("npy", {"lists": ("a", "b")}, "npy takes one list for the order of the rows, found 2"),
    ],
)
def test_export_job_refuses_invalid_options(layout, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        ExportJob("features", "out", layout, **options)


def test_format_is_known_by_the_extension_or_the_file_of_a_folder(tmp_path):
    names = ("a.npy", "B.TSV", "c.h5", "d.hdf5", "e.tar")
    assert [import_format(name) for name in names] == ["npy", "tsv", "hdf5", "hdf5", "webdataset"]
    (tmp_path / "data.mdb").write_bytes(b"")
    unsupported = {"a.npz": "npz archives", "b.lmdb/": "LMDB", "c/data.mdb": "LMDB", str(tmp_path): "LMDB"}
    for location, kind in unsupported.items():
        with pytest.raises(UsageError, match=f"import does not support {kind} yet"):
            import_format(location)
    with pytest.raises(UsageError, match=r"cannot tell the format of 'x\.bin' from its name: give --format npy, tsv, hdf5"):
        import_format("x.bin")
