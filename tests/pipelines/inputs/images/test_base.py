from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from extractors.images.formats import FORMATS
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import EXTENSIONS, ImageRef, ImageSource, SkippedFiles, is_image
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.images.staged_images import StagedImages
from schemas.errors import DatasetError, InputError
from tests.pipelines.inputs.reading import write, write_structs, write_tar

PATHS = "make ids of whole paths with --id-rule path"


def _files(folder: Path, *names: str) -> Path:
    for name in names:
        write(folder / name, name)
    return folder


def _tar(path: Path, *names: str) -> Path:
    return write_tar(path, [(name, name.encode()) for name in names]).parent


def _structs(path: Path, *names: str | None) -> Path:
    return write_structs(path, [(b"x", name) for name in names]).parent


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
    (lambda f: _files(f, "a.jpg", "a.png"), "files, 'a.jpg' and 'a.png': rename one, or choose the files", False),
    (lambda f: _tar(f / "t.tar", "x/a.jpg", "y/a.jpg"), f"files, 't.tar/x/a.jpg' and 't.tar/y/a.jpg': {PATHS}", True),
    (lambda f: _tar(f / "t.tar", "a.jpg", "a.jpg"), "'t.tar/a.jpg': the tar holds the member twice; unpack it", False),
    (lambda f: _structs(f / "p.parquet", "x/a.jpg", "y/a.jpg"), f"rows, 'p.parquet/0' and 'p.parquet/1': {PATHS}", True),
    (lambda f: _structs(f / "p.parquet", "a.jpg", "b.jpg", "a.jpg"), "'p.parquet/0' and 'p.parquet/2': remove one", False),
    (lambda f: _structs(f / "x/p.parquet", None) and _structs(f / "y/p.parquet", None).parent, PATHS, True),
    (lambda f: _keys(f / "p.parquet", "1") and _keys(f / "q.parquet", 1), "'p.parquet/0' and 'q.parquet/0': remove one", False),
    (lambda f: _table(f / "t.csv", "a,x.jpg", "a,y.jpg"), "files, 'x.jpg' and 'y.jpg': remove one, or give each an id", False),
]


@pytest.mark.parametrize(("make", "message", "paths_help"), CASES)
def test_check_ids_names_both_images_and_a_helpful_option(tmp_path, make, message, paths_help):
    location = make(tmp_path)
    images = open_images(location)
    with pytest.raises(InputError, match=re.escape(message)) as refusal:
        _check(images)
    assert re.search(PATHS, str(refusal.value)) or not paths_help
    if isinstance(images, ImagesInParquet):
        with pytest.raises(InputError, match=re.escape(message)):
            _check(StagedImages(images.folder, images.pattern, images.ids, staging=images.folder, staged={}))
    by_path = open_images(location, id_rule="path")
    if paths_help:
        _check(by_path)
        assert len({ref.image_id for ref in by_path.refs()}) == len(list(by_path.refs()))
    else:
        with pytest.raises(InputError, match="belongs to two") as refusal:
            _check(by_path)
        assert PATHS not in str(refusal.value)


def skipped(location) -> SkippedFiles:
    source = open_images(location)
    assert source.skipped is None
    assert list(source.refs())
    assert source.skipped is not None
    return source.skipped


def test_extensions_are_those_of_the_formats():
    import pillow_heif

    pillow_heif.register_heif_opener()
    known = Image.registered_extensions()
    assert {extension: known[extension] for extension in EXTENSIONS if known[extension] not in (*FORMATS, "MPO")} == {}
    assert {known[extension] for extension in EXTENSIONS} == {*FORMATS, "MPO"}


def test_documentation_lists_them():
    page = (Path(__file__).parents[4] / "docs" / "reference" / "images.md").read_text(encoding="utf-8")
    (paragraph,) = (text for text in page.split("\n\n") if text.startswith("Image files end in"))
    assert set(re.findall(r"`(\.\w+)`", paragraph)) == EXTENSIONS


@pytest.mark.parametrize("extension", sorted(EXTENSIONS))
def test_images_are_known_by_their_extension_in_any_case(extension):
    assert is_image(f"a/b{extension}")
    assert is_image(f"b{extension.upper()}")
    assert not is_image(f"a/.b{extension}")
    assert not is_image(f"a{extension}/b")


def test_skipped_files_are_counted_and_named(tmp_path):
    names = ("a.jpg", "x/photo.raw", "x/b.psd", "x/c.PSD", "scan", ".hidden.jpg", "z/._a.jpg", "a.tar")
    found = skipped(_files(tmp_path / "images", *names))
    assert dict(found.files) == {".psd": 2, ".raw": 1, "no extension": 1, "hidden": 2, ".tar": 1}
    assert found.warning == "skipped: 7 files (.psd 2, hidden 2, .raw 1, .tar 1, no extension 1), e.g. '.hidden.jpg'"
    assert found.links == 0
    found = skipped(_files(tmp_path / "alone", "a.jpg", "b/c.avif"))
    assert (found, found.warning) == (SkippedFiles(), "")


def test_linked_folders_are_named_and_not_followed(tmp_path):
    images = _files(tmp_path / "images", "a.jpg", "sub/b.jpg")
    _files(tmp_path / "more", "c.jpg")
    (images / "sub" / "more").symlink_to(tmp_path / "more")
    (images / "loop").symlink_to(images)
    source = open_images(images)
    assert sorted(ref.uri for ref in source.refs()) == ["a.jpg", "sub/b.jpg"]
    assert source.skipped.warning == "skipped: 2 linked folders, e.g. 'loop' (links are not followed)"
    (images / "loop").unlink()
    (images / "odd").touch()
    assert skipped(images).warning == (
        "skipped: 1 file (no extension 1), e.g. 'odd'; 1 linked folder, e.g. 'sub/more' (links are not followed)"
    )


def test_folder_without_images_lists_its_files(tmp_path):
    _files(tmp_path / "images", "a.psd", "b.psd", "c.txt", "d")
    message = r"it holds 4 files \(\.psd 2, \.txt 1, no extension 1\), and images are known by"
    with pytest.raises(InputError, match=rf"no images found in '.*images': .*{message}"):
        list(open_images(tmp_path / "images").refs())


# --- archives --------------------------------------------------------------------------------------------------------


def test_members_of_tars_and_files_beside_them_are_counted_too(tmp_path):
    _tar(tmp_path / "a.tar", "1.jpg", "1.json", "1.txt", "2.psd", "d/3", ".4.jpg", "folder.psd/")
    _tar(tmp_path / "b.tar", "5.jpg", "5.json")
    _files(tmp_path, "c.zip", "a_stats.json", "_b.tar")
    found = skipped(tmp_path)
    assert found.files == {".json": 3, ".psd": 1, ".tar": 1, ".txt": 1, ".zip": 1, "hidden": 1, "no extension": 1}
    one = skipped(tmp_path / "a.tar")
    assert one.warning == "skipped: 5 files (.json 1, .psd 1, .txt 1, hidden 1, no extension 1), e.g. 'a.tar/.4.jpg'"


# --- pipes, sockets, devices -----------------------------------------------------------------------------------------


@pytest.fixture
def special(tmp_path, monkeypatch):
    """A folder with a pipe, a socket and an image; nobody writes to the pipe."""
    _files(tmp_path / "images", "a.jpg")
    os.mkfifo(tmp_path / "images" / "pipe.jpg")
    monkeypatch.chdir(tmp_path / "images")  # The path of a socket must be short.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.jpg")
        yield tmp_path / "images"


def test_read_of_special_files_fails(special):
    source = open_images(special)
    assert sorted(ref.image_id for ref in source.refs()) == ["a", "pipe", "socket"]
    for name, kind in (("pipe.jpg", "a named pipe"), ("socket.jpg", "a socket")):
        with pytest.raises(DatasetError, match=f"it is {kind}, expected a file") as caught:
            source.read(ImageRef("x", name))
        assert caught.value.__cause__.strerror == f"{kind}, not a file"
    with pytest.raises(InputError, match=r"pipe\.jpg': it is a named pipe, expected a file"):
        open_images(special / "pipe.jpg")
