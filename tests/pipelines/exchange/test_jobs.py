import re

import pytest

from pipelines.exchange.importing import import_format
from pipelines.exchange.jobs import ExportJob, ImportJob
from schemas.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "my name"}, "--name is 'my name'"),
        ({"shards": 0}, "--shards is 0"),
        ({"sources": ()}, "expected one or more files to import"),
        ({"id_rule": "other"}, "--id-rule is 'other', expected one of 'name', 'path', 'exact'"),
        ({"repeats": 0}, "--repeats is 0, expected 1 or more"),
        ({"max_regions": 0}, "--max-regions is 0"),
        ({"format": "csv"}, "--format is 'csv', expected one of 'npy', 'tsv', 'hdf5', 'webdataset'"),
        ({"format": "tsv", "ids": ("a",)}, "--ids is for npy and hdf5, these files are tsv"),
        ({"format": "webdataset", "karpathy": "a"}, "--karpathy is for npy and tsv and hdf5, these files are webdataset"),
        ({"format": "hdf5", "sources": ("x.h5", "y.h5")}, "import one HDF5 file at a time, with at most one list of ids"),
        ({"format": "hdf5", "ids": ("a", "b")}, "import one HDF5 file at a time, with at most one list of ids"),
        ({"format": "npy", "sizes": ("a",)}, "--sizes is for regions"),
        ({"karpathy": "d.json", "karpathy_key": "id"}, "--karpathy-key is 'id', expected one of 'imgid', 'cocoid', 'sentid'"),
        ({"karpathy_key": "cocoid"}, "give the file with --karpathy"),
        ({"captions": "c", "id_rule": "name"}, "--captions is for one vector per caption"),
        ({"captions": "c", "format": "tsv"}, "--captions is for npy, these files are tsv"),
        ({"space": "a b"}, "--space is 'a b', expected letters"),
    ],
)
def test_import_job_refuses_invalid_options(options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        ImportJob(**{"sources": ("none.npy",), "output": "out", "name": "toy", **options})


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("scan", {}, "give their dataset with --captions"),
        ("scan", {"captions": "c", "text": "raw"}, "--text is 'raw', expected one of 'text', 'tokens'"),
        ("scan", {"captions": "c", "captions_per_image": -1}, "--captions-per-image is -1"),
        ("scan", {"captions": "c", "split_names": {"val": "a/b"}}, "--split-names calls 'val' 'a/b', expected a part of a"),
        ("tsv", {"columns": "all"}, "--columns is 'all', expected one of 'bottom-up', 'lxmert'"),
        ("webdataset", {"language": "de"}, "--language, --portion and --splits choose captions"),
        ("webdataset", {"l2": True}, "--l2 is for scan and mulisera and npy, not for webdataset"),
        ("npy", {"lists": ("a", "b")}, "npy takes one list for the order of the rows, found 2"),
        ("mulisera", {}, "give the lists with --lists"),
        ("zip", {}, "--format is 'zip', expected one of 'scan', 'mulisera', 'tsv', 'webdataset', 'npy'"),
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
