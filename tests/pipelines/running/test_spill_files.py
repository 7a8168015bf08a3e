"""Folder of spill files: private, and nothing of others is deleted."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from pipelines.running.spill_files import spill_folder
from schemas.errors import DatasetError
from schemas.storage.folder import Folder

OUTPUT = Folder("gs://bucket/captions")


@pytest.fixture
def spill_path(tmp_path, monkeypatch) -> Path:
    """Path of the spill folder for `OUTPUT`, which does not exist."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with spill_folder(OUTPUT) as path:
        pass
    assert list(tmp_path.iterdir()) == []
    return Path(path)


def test_spill_folder_is_private_and_deleted(spill_path):
    umask = os.umask(0)
    try:
        with spill_folder(OUTPUT) as path:
            assert Path(path) == spill_path
            assert stat.S_IMODE(spill_path.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
    assert not spill_path.exists()


def test_spill_folder_deletes_files_of_a_killed_run_and_no_others(spill_path):
    spill_path.mkdir(mode=0o700)
    for name in (".captions-1.tmp-2", ".images-run-1", "0" * 32, "notes.txt"):
        (spill_path / name).write_text("x")
    with spill_folder(OUTPUT):
        assert sorted(path.name for path in spill_path.iterdir()) == [".lock", "notes.txt"]
    assert [path.name for path in spill_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("kind", ["link", "writable", "readable", "file", "foreign"])
def test_spill_folder_of_others_is_refused(spill_path, tmp_path, kind):
    victim = tmp_path / "documents"
    victim.mkdir(mode=0o700)
    (victim / "thesis.tex").write_text("x")
    (victim / ("0" * 32)).write_text("x")
    if kind == "link":
        spill_path.symlink_to(victim)
    elif kind == "file":
        spill_path.write_text("x")
    else:
        spill_path.mkdir()
        spill_path.chmod({"writable": 0o777, "readable": 0o755, "foreign": 0o700}[kind])
    if kind == "foreign":
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(spill_path, 65534, 65534)
    with pytest.raises(DatasetError, match=r"is not a folder of this user alone .*: nothing was written"), spill_folder(OUTPUT):
        pytest.fail("a folder of others is used")
    assert sorted(path.name for path in victim.iterdir()) == ["0" * 32, "thesis.tex"]
