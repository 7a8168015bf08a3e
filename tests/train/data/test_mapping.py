from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from schemas.errors import DatasetError
from train.data.mapping import mapped_array

SHAPE = (7, 3)


def count(array):
    array[:] = np.arange(array.size).reshape(array.shape)


def never(array):
    raise AssertionError("the file was there")


@pytest.fixture
def path(tmp_path):
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    [path] = (tmp_path / "cache").iterdir()
    return path


def test_a_whole_file_is_used_again(path, tmp_path):
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, never)
    assert isinstance(array, np.memmap)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:100],
        lambda data: data[:-1],
        lambda data: data + b"\x00",
        lambda data: b"PK\x03\x04" + data,
        lambda data: data.replace(b"(7, 3)", b"(3, 7)"),
        lambda data: data.replace(b"<f4", b"<i4"),
        lambda data: data.replace(b"<f4", b"|O8"),
        lambda data: data.replace(b"'fortran_order': False", b"'fortran_order': True "),
        lambda data: data.replace(b"'shape'", b"'shapes"),
        lambda data: data.replace(b"(7, 3)", b"7 +*"),
    ],
)
def test_a_file_of_another_content_is_made_again(path, tmp_path, change):
    before = path.read_bytes()
    path.write_bytes(change(before))
    array = mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)
    assert array.tolist() == np.arange(21).reshape(SHAPE).tolist()
    assert path.read_bytes() == before


def test_a_folder_in_its_place_is_an_error(path, tmp_path):
    path.unlink()
    path.mkdir()
    with pytest.raises(DatasetError, match=r"\.npy': the path is a folder, expected a file"):
        mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, count)


def test_other_content_has_another_file(path, tmp_path):
    for identity, shape, dtype in ((["b"], SHAPE, np.float32), (["a"], (3, 7), np.float32), (["a"], SHAPE, np.float16)):
        mapped_array(tmp_path / "cache", identity, shape, dtype, count)
    assert len(list((tmp_path / "cache").iterdir())) == 4


@pytest.mark.parametrize("supported", [True, False])
def test_a_full_disk_is_an_error_before_a_page_is_written(tmp_path, monkeypatch, supported):
    """A mapped page that finds no space ends the process with a signal."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if supported:
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr("train.data.mapping._BLOCK", bytes(16))
        assert mapped_array(tmp_path / "small", ["a"], (1000, 3), np.float32, count)[999].tolist() == [2997, 2998, 2999]
        return
    with pytest.raises(DatasetError, match="the disk is full: free some space"):
        mapped_array(tmp_path / "cache", ["a"], SHAPE, np.float32, never)
    assert list((tmp_path / "cache").iterdir()) == []
