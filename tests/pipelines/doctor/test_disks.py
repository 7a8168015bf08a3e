import errno
import os
import shutil
from types import SimpleNamespace

import pytest

from pipelines.doctor import disks
from pipelines.doctor.disks import (
    check_folder,
    check_locks,
    check_space,
    check_temporary_folder,
    check_writing,
    filesystem_type,
)
from schemas.errors import DatasetError

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /data rw shared:1 - nfs4 server:/export rw
31 30 0:26 / /data/my\\040photos rw - fuse.sshfs anna@host: rw
34 30 0:29 / /data/日本 rw - xfs /dev/vdb rw
32 22 0:27 / /mnt rw - tmpfs tmpfs rw
33 22 0:28 / /mnt rw - lustre 10.0.0.1@tcp:/fs rw
"""


def space(monkeypatch, *, free: int, files: int, all_files: int = 1000):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free, total=10**12))
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_files=all_files, f_favail=files))


@pytest.mark.parametrize(
    ("free", "files", "all_files", "status"),
    [
        (10**11, 10**6, 10**7, "ok"),
        (10**11, 0, 0, "ok"),  # Btrfs makes room for files as they are written.
        (4 * 10**9, 10**6, 10**7, "note"),
        (10**11, 9_999, 10**7, "note"),
        (10**11, 0, 10**7, "problem"),
        (99_999_999, 10**6, 10**7, "problem"),
    ],
)
def test_room_for_bytes_and_for_files(monkeypatch, free, files, all_files, status):
    space(monkeypatch, free=free, files=files, all_files=all_files)
    (finding,) = check_space("machine", "temporary", "/tmp", "free some")
    assert (finding.status, finding.advice) == (status, "" if status == "ok" else "free some")
    assert finding.values == {"folder": "/tmp", "free": free, "total": 10**12, "files": files if all_files else None}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home", "ext4"),
        ("/database", "ext4"),
        ("/data", "nfs4"),
        ("/data/features", "nfs4"),
        ("/data/my photos/x", "fuse.sshfs"),
        ("/data/日本/x", "xfs"),
        ("/mnt/x", "lustre"),  # A later one hides an earlier one.
    ],
)
def test_the_type_of_a_file_system(tmp_path, path, kind):
    (tmp_path / "mounts").write_text(MOUNTS)
    assert filesystem_type(disks.Path(path), tmp_path / "mounts") == kind


def test_a_system_that_does_not_say(tmp_path, monkeypatch):
    assert filesystem_type(tmp_path, tmp_path / "none") == ""
    monkeypatch.setattr("sys.platform", "darwin")
    assert filesystem_type(tmp_path) == ""


@pytest.mark.parametrize(
    ("kind", "words"), [("ext4", "on this machine (ext4)"), ("nfs4", "on a network (nfs4)"), ("", "on this machine")]
)
def test_a_folder_is_looked_at_where_it_would_be_made(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(disks, "filesystem_type", lambda path: kind)
    location = str(tmp_path / "new" / "features")
    found = list(check_folder(location, 1 << 20))
    assert [finding.subject for finding in found] == ["folder", "space", "locks", "writing"]
    assert found[0].found == f"{location!r} is {words}, and made by the run in {str(tmp_path)!r}"
    assert found[0].values["is_network"] == (kind == "nfs4")
    assert [finding.status for finding in found[2:3]] == ["ok"]
    assert found[3].values["bytes"] == 1 << 20
    assert found[3].values["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_as_it_was(tmp_path):
    (tmp_path / "_manifest.json").write_text("{}")
    first, *_ = check_folder(str(tmp_path), 1000)
    assert "made by the run" not in first.found
    assert [path.name for path in tmp_path.iterdir()] == ["_manifest.json"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match="a part of the path is a file, not a folder"):
        list(check_folder(str(tmp_path / "file" / "features"), 1))


@pytest.mark.parametrize("below", ["", "/features"])
def test_a_link_that_leads_nowhere(tmp_path, below):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(DatasetError, match="link' is a link that leads nowhere"):
        list(check_folder(f"{tmp_path}/link{below}", 1))


def test_locks_that_hold_nobody_back(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "lock_file", lambda path: os.open(path, os.O_RDWR | os.O_CREAT))
    (finding,) = check_locks("shared", tmp_path)
    assert (finding.status, finding.values) == ("note", {"holds": False})
    assert "only one command at a time write to 'shared'" in finding.advice
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(disks, "lock_file", refuse)
    (finding,) = check_locks("shared", tmp_path)
    assert (finding.status, finding.found) == ("problem", "files cannot be locked (No locks available)")


def test_a_slow_disk_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(disks, "_write", lambda path, size: size / 1e6)
    (finding,) = check_writing("storage", "writing", str(tmp_path), 8_000_000)
    assert (finding.status, finding.found) == ("note", "1 MB/s, and a small file takes 4.1 ms")


def test_a_full_disk(tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DatasetError, match="the disk is full"):
        list(check_writing("storage", "writing", str(tmp_path), 0))
    assert list(tmp_path.iterdir()) == []


def test_the_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (finding,) = check_temporary_folder()
    assert finding.values["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
