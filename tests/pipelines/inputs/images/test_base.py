"""Images of one id, in every kind of collection: the message names both, and its advice keeps them apart."""

from __future__ import annotations

import io
import re
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.images import CopiedImages, ImageSource, open_images
from schemas.errors import InputError
from schemas.storage.folder import Folder

PATHS = "make ids of whole paths with --id-rule path"


def _files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def _tar(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    return path.parent


def _structs(path: Path, *names: str | None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array([{"bytes": b"x", "path": name} for name in names], kind)}), path)
    return path.parent


def _keys(path: Path, *keys: str | int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"key": list(keys), "jpg": [b"x"] * len(keys)}), path)
    return path.parent


def _table(path: Path, *rows: str) -> Path:
    path.write_text("\n".join(["image_id,uri", *rows]))
    return path


def _check(images: ImageSource) -> None:
    images.check_ids(sorted(images.refs()))


CASES = [
    (lambda f: _files(f, "x/a.jpg", "y/a.jpg"), "files, 'x/a.jpg' and 'y/a.jpg': rename one, choose", True),
    (lambda f: _files(f, "a.jpg", "x/a.png"), "files, 'a.jpg' and 'x/a.png': rename one, choose", True),
    (lambda f: _files(f, "a.jpg", "a.png"), "files, 'a.jpg' and 'a.png': rename one, or choose the files", False),
    (lambda f: _tar(f / "t.tar", "x/a.jpg", "y/a.jpg"), f"files, 't.tar/x/a.jpg' and 't.tar/y/a.jpg': {PATHS}", True),
    (lambda f: _tar(f / "t.tar", "a.jpg", "a.png"), "files, 't.tar/a.jpg' and 't.tar/a.png': rename one and pack", False),
    (lambda f: _tar(f / "t.tar", "a.jpg", "a.jpg"), "'t.tar/a.jpg': the tar holds the member twice; unpack it", False),
    (lambda f: _tar(f / "t.tar", "a.jpg", "./a.jpg"), "'t.tar/a.jpg': the tar holds the member twice; unpack it", False),
    (
        lambda f: _tar(f / "t.tar", "a.jpg") and _tar(f / "u.tar", "a.jpg"),
        "files, 't.tar/a.jpg' and 'u.tar/a.jpg': rename one and pack it again, or unpack each tar to a folder of its own",
        False,
    ),
    (lambda f: _structs(f / "p.parquet", "x/a.jpg", "y/a.jpg"), f"rows, 'p.parquet/0' and 'p.parquet/1': {PATHS}", True),
    (lambda f: _structs(f / "p.parquet", "a.jpg", "b.jpg", "a.jpg"), "'p.parquet/0' and 'p.parquet/2': remove one", False),
    (
        lambda f: _structs(f / "x/p.parquet", None).parent if _structs(f / "y/p.parquet", None) else f,
        f"image id 'p-000000' belongs to two rows, 'x/p.parquet/0' and 'y/p.parquet/0': {PATHS}",
        True,
    ),
    (lambda f: _keys(f / "p.parquet", "a", "a"), "rows, 'p.parquet/0' and 'p.parquet/1': remove one of them", False),
    (
        lambda f: _keys(f / "p.parquet", "1") and _keys(f / "q.parquet", 1),
        "image id '1' belongs to two rows, 'p.parquet/0' and 'q.parquet/0': remove one of them, or give each row an id",
        False,
    ),
    (lambda f: _table(f / "t.csv", "a,x.jpg", "a,y.jpg"), "files, 'x.jpg' and 'y.jpg': remove one, or give each an id", False),
    (lambda f: _table(f / "t.csv", "a,http://h/x", "a,http://h/x"), "'http://h/x' and 'http://h/x': remove one", False),
]


@pytest.mark.parametrize(("make", "message", "paths_help"), CASES)
def test_two_images_of_one_id_are_refused_and_the_option_is_named_where_it_helps(tmp_path, make, message, paths_help):
    location = make(tmp_path)
    images = open_images(location)
    with pytest.raises(InputError, match=re.escape(message)) as refusal:
        _check(images)
    assert re.search(PATHS, str(refusal.value)) or not paths_help
    with pytest.raises(InputError, match=re.escape(message)):
        _check(CopiedImages(images, Folder(str(tmp_path)), {}))
    by_path = open_images(location, id_rule="path")
    if paths_help:
        _check(by_path)
        assert len({ref.image_id for ref in by_path.refs()}) == len(list(by_path.refs()))
    else:
        with pytest.raises(InputError, match="belongs to two") as refusal:
            _check(by_path)
        assert PATHS not in str(refusal.value)


def test_tars_unpacked_as_advised_keep_images_apart(tmp_path):
    for name in ("t", "u"):
        _tar(tmp_path / f"{name}.tar", "a.jpg")
        with tarfile.open(tmp_path / f"{name}.tar") as tar:
            tar.extractall(tmp_path / "unpacked" / name, filter="data")
    images = open_images(tmp_path / "unpacked", id_rule="path")
    _check(images)
    assert sorted(ref.image_id for ref in images.refs()) == ["t/a", "u/a"]


def test_case_unicode_forms_and_spaces_keep_images_apart(tmp_path):
    names = ["a", "A", "\u00e9", "e\u0301", " a", "a ", "a.b", "\u212b", "\u00c5"]
    for location in (
        _files(tmp_path / "f", *(f"{name}.jpg" for name in names)),
        _tar(tmp_path / "t/t.tar", *(f"{n}.jpg" for n in names)),
    ):
        images = open_images(location)
        _check(images)
        assert {ref.image_id for ref in images.refs()} == set(names)
