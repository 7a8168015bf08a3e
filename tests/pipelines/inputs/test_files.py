from __future__ import annotations

import gzip
import hashlib
import json
import os
import random

import pytest

from pipelines.inputs import files
from pipelines.inputs.files import count_lines, input_errors, inventory, iter_json, kind_of, read_lines
from schemas.errors import InputError
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import StoreError
from tests.pipelines.inputs.reading import write

TEXT = "plain\ncarriage return\r\n\ufeffa\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh\n\n  spaces \t\nlast, without LF"
LONG = "é" * 300_000 + "\nb\n" + "c" * 600_001


def _write(path, data: bytes):
    return Folder(str(write(path, data).parent)), path.name


@pytest.mark.parametrize("name", ["a.en", "a.en.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(
    "text",
    [TEXT, pytest.param(LONG, id="long"), TEXT + "\n", "", "\n", "\r\n", "\n\n", "one", "one\r", "\r", "é\r\nß", "a\r\r\nb"],
)
def test_lines_end_at_lf_and_crlf_only(tmp_path, name, mark, text):
    file = _write(tmp_path / name, (mark + text).encode())
    lines = text.replace("\r\n", "\n").split("\n")
    expected = lines[:-1] if lines[-1] == "" else lines
    assert list(read_lines(*file)) == expected
    assert count_lines(*file) == len(expected)


def test_only_one_mark_at_the_very_start_is_dropped(tmp_path):
    """Even one that is spread over gzip members: `cat a.gz b.gz` is a gzip file."""
    file = _write(tmp_path / "a", "\ufeff\ufeffa\n\ufeffb\n".encode())
    assert list(read_lines(*file)) == ["\ufeffa", "\ufeffb"]
    data = "\ufeffö\r\nb".encode()
    (tmp_path / "a.gz").write_bytes(b"".join(gzip.compress(bytes([byte])) for byte in data))
    assert (list(read_lines(file[0], "a.gz")), count_lines(file[0], "a.gz")) == (["ö", "b"], 2)


def test_read_lines_of_a_pipe_fails_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(InputError, match=r"a\.csv': it is a named pipe, expected a file"):
        list(read_lines(Folder(str(tmp_path)), "a.csv"))
    with pytest.raises(InputError, match=r"a\.csv': it is a named pipe, expected a file"):
        kind_of(str(tmp_path / "a.csv"))
    with pytest.raises(InputError, match=r"'/dev/null': it is a device, expected a file"):
        kind_of("/dev/null")


def test_column_counts_characters_and_byte_counts_bytes(tmp_path):
    with pytest.raises(InputError, match=r"line 1, column 4 \(byte 6 of the line\) is the byte 0xff"):
        list(read_lines(*_write(tmp_path / "a", "ééx".encode() + b"\xff\n")))
    for data in (b"\xed\xa0\x80\n", b"\xc0\x80\n", b"cut \xe2\x82"):  # Surrogates, overlong forms, a part of a character.
        with pytest.raises(InputError, match="is not UTF-8"):
            list(read_lines(*_write(tmp_path / "a", data)))


ZIPPED = gzip.compress("\n".join(map(str, range(10_000))).encode())
MIDDLE = len(ZIPPED) // 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.gz", ZIPPED[:-20], "not a whole gzip file"),
        ("a.gz", ZIPPED[:MIDDLE] + bytes([ZIPPED[MIDDLE] ^ 0xFF]) + ZIPPED[MIDDLE + 1 :], "not a whole gzip file"),
        ("a.gz", ZIPPED[:10] + b"\xff" + ZIPPED[11:], "not a whole gzip file"),
        ("a.gz", b"plain text\n", "not a whole gzip file"),
        ("a.gz", ZIPPED + b"garbage", "not a whole gzip file"),
        ("a.en", ZIPPED, "compressed with gzip"),
    ],
    ids=["cut", "flipped", "no deflate", "not gzip", "garbage behind", "another name"],
)
def test_broken_gzip(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=rf"{name}' is .*{message}"):
        list(read_lines(Folder(str(tmp_path)), name))


@pytest.mark.parametrize(
    ("location", "error", "message"),
    [
        ("/a/b", FileNotFoundError(2, "No such file"), "'/a/b' does not exist: check the path"),
        ("/a/b", PermissionError(13, "Permission denied"), "'/a/b' cannot be read: permission denied; give this user"),
        ("gs://a/b", PermissionError(13, "Permission denied"), "cannot use 'gs://a/b': access denied: check the credentials"),
        ("gs://a/b", StoreError("503", 503, "it is busy"), r"cannot use 'gs://a/b': it is busy \(StoreError: 503\)"),
    ],
)
def test_errors_of_reading_are_input_errors(location, error, message):
    with pytest.raises(InputError, match=message), input_errors(location):
        raise error


def test_inventory_hashes_stored_bytes(tmp_path):
    _write(tmp_path / "b.gz", b"text\n" * 100_000)
    _write(tmp_path / "a", b"")
    rows = inventory(Folder(str(tmp_path)), ["b.gz", "a", "b.gz"])
    stored = (tmp_path / "b.gz").read_bytes()
    assert [row["name"] for row in rows] == ["a", "b.gz"]
    assert rows[1] == {"name": "b.gz", "bytes": len(stored), "sha256": hashlib.sha256(stored).hexdigest()}
    assert rows[0]["sha256"] == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("ascii_", [True, False])
def test_json_items(tmp_path, name, mark, ascii_):
    items = [{"text": "naïve \U0001f600 \\ud800 \u2028 \r\n \x00", "n": 2**40}, [1.5], "x", None]
    text = json.dumps({"other": {"images": [1]}, "images": items, "z": [9]}, ensure_ascii=ascii_, indent=1)
    data = (mark + text.replace("\n", "\r\n")).encode()
    assert [item for _, item in iter_json(*_write(tmp_path / name, data), prefix="images.item", form="a list")] == items


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 13, 64, 1 << 18])
def test_scan_json_finds_lone_surrogates_at_any_chunk_end(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(files, "_CHUNK", chunk)
    rng = random.Random(chunk)
    pieces = [r"\ud83d\ude00", r"\UD83D".lower(), r"\uDE00", r"\\", r"\n", r"\u00e9", "ud83d", "é", "abcdefgh", r"\""]
    halves = 0
    for _ in range(200):
        text = "".join(rng.choices(pieces, weights=[9, 1, 1, 9, 3, 9, 9, 3, 9, 3], k=rng.randint(0, 25)))
        data = f'{{"images": ["{text}"]}}'.encode()
        items = json.loads(data)["images"]
        half = any("\ud800" <= character <= "\udfff" for character in items[0])
        file = _write(tmp_path / "a.json", data)
        assert files._scan_json(*file) == half
        assert [item for _, item in iter_json(*file, prefix="images.item", form="a list")] == items
        halves += half
    assert 20 < halves < 180


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"images": [{"a": "x"},', r"after 1 items of 'images'"),
        (b"", r"after 0 items of 'images'"),
        (b'{"images": [1]} x', r"after [01] items of 'images'"),  # By the version of ijson.
        (b'\xef\xbb\xbf\xef\xbb\xbf{"images": []}', r"after 0 items of 'images'"),
        (b"{'a'}", r"after 0 items of 'images'"),
        (b'{"text": "a"}\n{"text": "b"}\n', "more than one document"),
        (b'{"text": "a\\ud800"}\n{"text": "b"}\n', "more than one document"),
    ],
)
def test_iter_json_of_malformed_json_fails(tmp_path, data, message):
    with pytest.raises(InputError, match=rf"a\.json' is not well-formed JSON: .*{message}"):
        list(iter_json(*_write(tmp_path / "a.json", data), prefix="images.item", form="a list"))


@pytest.mark.parametrize("half", ["", "\\ud800"])
def test_iter_json_reads_large_numbers_and_names_nan(tmp_path, half):
    text = f'{{"text": "{half}", "images": [{{"id": {2**70}, "x": [0.5, -{2**65}]}}]}}'
    write(tmp_path / "a.json", text)
    assert [item for _, item in iter_json(Folder(str(tmp_path)), "a.json", prefix="images.item", form="a list")] == json.loads(
        text
    )["images"]
    for value in ("NaN", "Infinity", "-Infinity"):
        write(tmp_path / "b.json", text.replace("0.5", value).replace(str(2**70), "1").replace(str(2**65), "1"))
        with pytest.raises(InputError, match="NaN and Infinity are not JSON, although Python's json writes them: write null"):
            list(iter_json(Folder(str(tmp_path)), "b.json", prefix="images.item", form="a list"))
    write(tmp_path / "c.json", text.replace("0.5", "9" * 5000))
    with pytest.raises(InputError, match="is not well-formed JSON"):
        list(iter_json(Folder(str(tmp_path)), "c.json", prefix="images.item", form="a list"))


def test_iter_json_of_non_utf8_fails(tmp_path):
    head = json.dumps({"a": "é" * 300_000}, ensure_ascii=False).encode()[:-1]
    file = _write(tmp_path / "a.json", head + b',\n\n"b": "caf\xe9"}')
    with pytest.raises(InputError, match=rf"is not UTF-8: line 3, byte {len(head) + 13} of the file is the byte 0xe9; convert"):
        list(iter_json(*file, prefix="images.item", form="a list"))
    (tmp_path / "b.json").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(InputError, match="compressed with gzip"):
        list(iter_json(Folder(str(tmp_path)), "b.json", prefix="images.item", form="a list"))
