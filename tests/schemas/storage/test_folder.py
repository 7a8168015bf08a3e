import errno
import os
import pickle
import re
from pathlib import Path

import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import FileInfo, Folder, file_at
from schemas.storage.locations import is_remote, local_path, plain_location
from schemas.storage.storage_errors import (
    create_folder,
)
from schemas.writing.locks import lock_folder
from schemas.writing.output_state import OutputState
from schemas.writing.validation import validate
from tests.schemas.conftest import make_toy
from tests.stores import MemoryBucket


@pytest.fixture
def bucket(monkeypatch):
    """A bucket in memory, behind every address: keys and contents."""
    bucket = MemoryBucket()
    monkeypatch.setattr("schemas.storage.folder.open_bucket", lambda address: bucket)
    return bucket.objects


@pytest.fixture(params=["disk", "store"])
def anywhere(request, folder):
    """A folder on a disk, or in a bucket."""
    return Folder("gs://bucket/data") if request.param == "store" and request.getfixturevalue("bucket") == {} else folder


READS = (Folder.open, Folder.read, lambda folder, name: folder.open(name, is_mapped=False))


def test_folder_means_the_same_to_a_process_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sent = [pickle.dumps(Folder(location)) for location in ("a/../b", "/c", "gs://bucket/d", "s3://bucket/e?region=x")]
    monkeypatch.chdir("/")
    locations = [pickle.loads(data).location for data in sent]
    assert pickle.loads(sent[0]).local_path == tmp_path / "b"
    assert locations == [str(tmp_path / "b"), "/c", "gs://bucket/d", "s3://bucket/e?region=x"]


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("file:///data/a%20b/%C3%BC%25.jpg", "/data/a b/ü%.jpg"),
        ("FILE://LocalHost/data", "/data"),
        ("file:///%ff", os.fsdecode(b"/\xff")),
        ("~", "/home/me"),
        ("~/a", "/home/me/a"),
        ("~root/a", f"{Path('~root').expanduser()}/a"),
        ("/data/a%20b", "/data/a%20b"),
        ("s3://bucket/~/a%20b", "s3://bucket/~/a%20b"),
    ],
)
def test_plain_location(monkeypatch, location, path):
    monkeypatch.setenv("HOME", "/home/me")
    assert plain_location(location) == Folder(location).location == path
    assert plain_location(path) == path
    assert is_remote(location) is (not Folder(location).is_local) is location.startswith(("gs:", "s3:"))
    if not is_remote(location):
        assert str(local_path(location)) == path


@pytest.mark.parametrize(
    ("location", "fault"),
    [
        *((location, "such as file:///data/photos") for location in ("file://server/data", "file://", "file:///a%00b")),
        *(("\udcff/a", "it is not UTF-8"), ("a/\0", "it holds a NUL"), ("", "it is empty"), ("s3://", "it names no bucket")),
    ],
)
def test_file_at_an_impossible_location_is_refused(location, fault):
    with pytest.raises(UsageError, match=f"cannot (use|understand) the location .*: .*{fault}"):
        file_at(location)


@pytest.mark.parametrize(
    ("location", "folder", "name"),
    [
        ("s3://bucket/a b/c.png", "s3://bucket/a b", "c.png"),
        ("s3://bucket/a/c.png?region=eu-west-1", "s3://bucket/a?region=eu-west-1", "c.png"),
        ("a/c.png", "a", "c.png"),
    ],
)
def test_file_at_is_a_folder_and_a_name(location, folder, name):
    assert file_at(location) == (Folder(folder), name)


def test_children_are_the_files_directly_in_a_folder(anywhere):
    assert anywhere.children() == []
    for name in ("b", "a", "deep/z", "deep/er/y"):
        anywhere.put(name, b"x")
    assert anywhere.children() == ["a", "b", "deep/"]
    assert anywhere.children("deep") == ["er/", "z"]
    assert anywhere.children("nothing") == []


@pytest.mark.parametrize("read", READS)
def test_pipes_and_devices_are_refused_without_blocking(folder, read):
    folder.put("file", b"x")
    os.mkfifo(folder.local_path / "pipe")
    (folder.local_path / "link").symlink_to("pipe")
    (folder.local_path / "zero").symlink_to("/dev/zero")
    assert folder.children() == ["file", "link", "pipe", "zero"]
    for name, kind in (("pipe", "a named pipe"), ("link", "a named pipe"), ("zero", "a device")):
        with pytest.raises(DatasetError, match=rf"{name}': it is {kind}, expected a file") as caught:
            read(folder, name)
        assert isinstance(caught.value.__cause__, OSError)


def test_stream_is_read_as_it_is_stored(anywhere):
    anywhere.put("a.gz", b"not compressed")
    with anywhere.open("a.gz", is_mapped=False) as file:
        assert (file.read(3), file.read()) == (b"not", b" compressed")
    assert anywhere.read("a.gz") == b"not compressed"


def sizes(folder: Folder) -> dict[str, int]:
    return {entry.name: entry.size for entry in folder.list()}


def test_files_of_a_folder(anywhere):
    folder = anywhere
    assert folder.names() == []
    assert folder.stat("a") is None
    folder.put("b", b"two")
    folder.put("a/nested/ä", b"")
    assert folder.names() == ["a/nested/ä", "b"]
    assert sizes(folder) == {"a/nested/ä": 0, "b": 3}
    assert [folder.stat(name) and folder.stat(name).size for name in ("b", "a/nested/ä", "a", "c")] == [3, 0, None, None]
    assert (folder.read("b"), folder.read("a/nested/ä")) == (b"two", b"")
    folder.put("b", b"three")
    assert folder.read("b") == b"three"
    folder.delete("b")
    folder.delete("b")
    assert folder.names() == ["a/nested/ä"]
    assert folder.path_of("b") == f"{folder.location}/b"


def test_links_are_files_and_never_followed_into_folders(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(b"1234")
    folder.put("own", b"x")
    (folder.local_path / "to-file").symlink_to(tmp_path / "elsewhere" / "file")
    (folder.local_path / "to-folder").symlink_to(tmp_path / "elsewhere")
    (folder.local_path / "to-nothing").symlink_to(tmp_path / "nowhere")
    assert sizes(folder) == {"own": 1, "to-file": 4, "to-nothing": -1}
    links: list[str] = []
    assert len(list(folder.list(links.append))) == 3
    assert links == ["to-folder"]


def test_replace_publishes_complete_files_only(folder):
    with folder.replace("name") as file:
        file.write(b"half")
        file.flush()
        (temporary,) = folder.names()
        assert re.fullmatch(r"\.name\.tmp-\d+", temporary)
        with folder.replace("name") as other:  # By another attempt, in any process.
            other.write(b"other")
        assert folder.read("name") == b"other"
    assert folder.names() == ["name"]
    assert folder.read("name") == b"half"


@pytest.mark.parametrize(
    ("error", "raised", "match"),
    [
        (ZeroDivisionError("in the middle"), ZeroDivisionError, "in the middle"),
        (OSError(errno.ENOSPC, "No space left on device"), DatasetError, r"cannot use '.*/data/\w+': the disk is full"),
    ],
)
def test_replace_failure_keeps_the_old_file(folder, error, raised, match):
    folder.put("kept", b"old")

    for name in ("kept", "fresh"):
        with pytest.raises(raised, match=match), folder.replace(name):
            raise error
    assert folder.names() == ["kept"]
    assert folder.read("kept") == b"old"


@pytest.mark.parametrize("read", READS)
def test_missing_files_are_not_found(anywhere, read):
    with pytest.raises(FileNotFoundError, match=r"nothing|^$"):
        read(anywhere, "nothing")


@pytest.mark.parametrize(
    ("name", "code", "advice"),
    [
        ("file/data", None, "a part of the path is a file, not a folder"),
        *(("denied", code, "permission denied: check who owns the folder") for code in (errno.EACCES, errno.EPERM)),
        ("full", errno.ENOSPC, r"the disk is full: .* run the same command again \(train with --resume\)"),
        ("broken", errno.EIO, r"OSError: .*Input/output error.*: check the disk"),
    ],
)
def test_create_folder_failure_names_folder_and_advice(tmp_path, monkeypatch, name, code, advice):
    (tmp_path / "file").write_bytes(b"")
    if code is not None:

        def fail(path, *args, **kwargs):
            raise OSError(code, os.strerror(code), str(path))

        monkeypatch.setattr(os, "mkdir", fail)
    with pytest.raises(DatasetError, match=rf"^cannot use '{tmp_path / name}': {advice}"):
        create_folder(tmp_path / name)


def test_kind_of_folder_file_nothing_and_pipe(folder):
    assert folder.kind() == "nothing"
    folder.put("a", b"1")
    os.mkfifo(folder.local_path / "pipe")
    assert (folder.kind(), Folder(folder.path_of("a")).kind()) == ("folder", "file")
    with pytest.raises(DatasetError, match="pipe': it is a named pipe, expected a file"):
        Folder(folder.path_of("pipe")).kind()


def test_stat_has_size_time_and_inode_of_a_file(folder):
    folder.put("deep/a", b"123")
    status = (folder.local_path / "deep/a").stat()
    time = status.st_mtime_ns
    assert folder.stat("deep/a") == FileInfo("deep/a", 3, str(time), f"3 {time} {status.st_ino}")
    assert folder.stat("deep") is None
    assert list(folder.list()) == [FileInfo("deep/a", 3, str(time))]


def test_object_store_holds_whole_files_only(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = Folder("gs://bucket/data/")
    with folder.replace("a/b.txt") as file:
        file.write(b"hello")
        assert folder.names() == []
    assert folder.read("a/b.txt") == b"hello"
    with pytest.raises(ZeroDivisionError), folder.replace("c.txt") as file:
        file.write(b"half" * (1 // 0))
    assert folder.names() == ["a/b.txt"]
    assert list(tmp_path.iterdir()) == []  # The local temporary files are gone.


def test_dataset_in_an_object_store(bucket, toys):
    toy = toys["features"]
    remote = make_toy("gs://bucket/features", "features", toy.rows, spec=toy.spec, failures=toy.failures)
    with lock_folder(remote.output.folder):
        assert OutputState(remote.output).committed_manifest() is None
        manifest = remote.write()
    assert validate("gs://bucket/features") == []
    assert OutputState(remote.output).committed_manifest() == manifest == open_dataset(toy.path).manifest
    assert open_dataset("gs://bucket/features").numpy().tobytes() == open_dataset(toy.path).numpy().tobytes()
    assert set(remote.output.folder.names()) == set(open_dataset(toy.path).folder.names())
