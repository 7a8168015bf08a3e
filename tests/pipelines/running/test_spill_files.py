"""Folder of spill files: private and temporary for a dataset in a store."""

import os
import stat
import tempfile
from pathlib import Path

from pipelines.running.spill_files import spill_folder
from schemas.storage.folder import Folder


def test_spill_folder_of_a_store_is_private_and_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    umask = os.umask(0)
    try:
        with spill_folder(Folder("gs://bucket/captions")) as path:
            assert stat.S_IMODE(Path(path).stat().st_mode) == 0o700
            (Path(path) / "x").touch()
    finally:
        os.umask(umask)
    assert list(tmp_path.iterdir()) == []


def test_spill_folder_of_a_local_dataset_is_its_own(tmp_path):
    (tmp_path / "x").touch()
    with spill_folder(Folder(str(tmp_path))) as path:
        assert path == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
