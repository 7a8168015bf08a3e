from __future__ import annotations

import gzip
import hashlib

import pytest

from schemas.errors import InputError
from schemas.vector_files import read_vector_file

LINES = ["the 1 0 0", "dog 0 2 0 ", "at name@example.org 9 9 9", "café 1 1 1", "the 7 7 7", "zwei\xa0drei 1 2 3"]
WANTED = {"the", "dog", "at", "café", "zwei\xa0drei", "nothing", "Dog"}
EXPECTED = {"the": [1, 0, 0], "dog": [0, 2, 0], "café": [1, 1, 1], "zwei\xa0drei": [1, 2, 3]}


def read(path, wanted=WANTED):
    return read_vector_file(str(path), wanted, expected="Give another.")


@pytest.mark.parametrize(("name", "header"), [("a.txt", ""), ("a.vec", "6 3\n"), ("a.vec", "4 3\n"), ("a.vec.gz", "6 3\n")])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_words_are_read_unchanged(tmp_path, name, header, end, mark):
    data = (mark + header + "\n".join(LINES) + "\n").replace("\n", end).encode()
    stored = gzip.compress(data) if name.endswith(".gz") else data
    (tmp_path / name).write_bytes(stored)
    seen = []
    found = read_vector_file(str(tmp_path / name), WANTED, expected="", on_progress=seen.append)
    assert {word: vector.tolist() for word, vector in found.vectors.items()} == EXPECTED
    assert (found.width, found.words, found.bytes) == (3, len(LINES), len(stored))
    assert found.sha256 == hashlib.sha256(stored).hexdigest()
    assert sum(seen) == len(LINES) + bool(header)


def test_last_line_of_a_complete_file_needs_no_line_end(tmp_path):
    (tmp_path / "a.vec").write_text("2 2\na 1 2\nb 3 4")
    assert read(tmp_path / "a.vec", {"b"}).vectors["b"].tolist() == [3, 4]


def test_few_words_not_utf8_are_skipped(tmp_path):
    (tmp_path / "a.vec").write_bytes(b"b\xf6se 1 2\n" + "böse 3 4\n".encode() + b"x\xff 5 6\n")
    assert {word: vector.tolist() for word, vector in read(tmp_path / "a.vec", {"böse"}).vectors.items()} == {"böse": [3, 4]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"the 1 0\nbig 1\n", r"line 2: expected a word and its 2 numbers .*found 'big 1'\. Give another"),
        (b"9 2\nthe 1 0\nbig 1 2.", r"is cut off: its first line announces 9 words, .* in the middle of a line after 2: fetch"),
        (b"30000 2\nthe 1 0\nbig 1 2\n", r"is cut off: its first line announces 30,000 words, and it ends after 2: fetch it"),
        (b"the 1 nan\n", r"line 1: expected a word and its numbers"),
        *((data, "holds no word vectors: expected a word and its numbers on each line") for data in (b"\n\n", b"2 3\n")),
        (b"dog 1 2\nb\xf6se 1 2\ngr\xfcn 1 2\n", r"is not UTF-8: line 2, column 2 .*0xf6; convert the file"),
    ],
)
def test_invalid_lines_are_named(tmp_path, data, message):
    (tmp_path / "a.vec").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.vec")


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "cut.vec.gz").write_bytes(gzip.compress(b"the 1 0\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"cut\.vec\.gz' is not a whole gzip file .*fetch it again"):
        read(tmp_path / "cut.vec.gz")
    with pytest.raises(InputError, match=r"there is no file '.*nothing\.vec': Give another"):
        read(tmp_path / "nothing.vec")
