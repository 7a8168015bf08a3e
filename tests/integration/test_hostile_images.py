"""Images of strangers that ended a run, or never let it end, given to the command."""

import io
import struct
import tarfile

import pytest
from PIL import Image

from extractors import ExtractorRequest
from schemas.dataset import open_dataset
from tests.integration.test_fuzz import describe, limited, load

OPTIONS = ("--extractor", "resnet50-pool", "--device", "cpu", "--workers", 1)


@pytest.fixture(autouse=True)
def fake_extractor(monkeypatch) -> None:
    monkeypatch.setattr(ExtractorRequest, "describe", describe)
    monkeypatch.setattr(ExtractorRequest, "load", load)


@pytest.mark.slow
def test_jpeg_2000_with_a_box_of_64_bits_is_a_failure_of_the_run(imagepivot, tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(3):
        Image.new("RGB", (40, 40), (number * 50, 0, 0)).save(tmp_path / f"photos/ok{number}.jpg")
    boxes = struct.pack(">I4s4sI4s", 20, b"ftyp", b"jp2 ", 0, b"jp2 ") + struct.pack(">I4sQ", 1, b"xxxx", 2**64 - 1)
    (tmp_path / "photos/bad.jp2").write_bytes(b"\0\0\0\x0cjP  \r\n\x87\n" + boxes + bytes(64))
    done = imagepivot("features", tmp_path / "photos", tmp_path / "out", *OPTIONS, "--max-failures", 1)
    assert "1 decode_error" in done.stderr
    assert open_dataset(tmp_path / "out").manifest.rows == 3


def test_tar_with_a_member_of_negative_size_ends_the_run_with_a_message(imagepivot, tmp_path):
    """The size leads back to the header of the member, which was listed forever."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("a.txt", "b.jpg"):
            archive.addfile(tarfile.TarInfo(name))
    data = bytearray(file.getvalue())
    data[512 + 124 : 512 + 136] = b"\xff" * 10 + b"\xfe\0"  # -512 in base 256.
    data[512 + 148 : 512 + 156] = b" " * 8
    data[512 + 148 : 512 + 156] = b"%06o\0 " % sum(data[512:1024])
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/t.tar").write_bytes(data)
    with limited(60):
        done = imagepivot("features", tmp_path / "tars", tmp_path / "out", *OPTIONS, code=1)
    assert "t.tar' is not a whole tar: at byte" in done.stderr
    assert not (tmp_path / "out/_manifest.json").exists()
