import os
import re

import pytest

from schemas.errors import InputError
from schemas.text import decode_line, decode_text, read_text


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"a\nb\n", "a\nb\n"),
        (b"\xef\xbb\xbfa\r\nb\r\n", "a\nb\n"),
        (b"\xef\xbb\xbf", ""),
        (b"\xef\xbb\xbf\xef\xbb\xbfa\n\xef\xbb\xbfb", "\ufeffa\n\ufeffb"),
        (b"old\rMac\r", "old\rMac\r"),
        (b"a\r\r\nb\n\rc\r", "a\r\nb\n\rc\r"),
        ("\u2028\x85\x0b\x0c\x1c\n".encode(), "\u2028\x85\x0b\x0c\x1c\n"),
    ],
)
def test_marks_and_line_ends_go_and_nothing_else(tmp_path, data, text):
    assert decode_text(data, "here") == text
    (tmp_path / "a.txt").write_bytes(data)
    assert read_text(tmp_path / "a.txt") == text


@pytest.mark.parametrize(
    ("encoding", "name", "option"),
    [
        ("utf-16", "UTF-16 (little endian)", "UTF-16"),
        ("utf-16-le", "UTF-16 (little endian, without a mark)", "UTF-16LE"),
        ("utf-32", "UTF-32", "UTF-32"),
    ],
)
def test_wide_encodings_are_named(encoding, name, option):
    says = re.escape(f"'a.csv' is {name}, expected UTF-8: convert the file: iconv -f {option} -t UTF-8 OLD > NEW")
    with pytest.raises(InputError, match=says):
        decode_text("image_id,text\n1,Größe\n".encode(encoding), "a.csv")


def test_invalid_utf8_is_located():
    with pytest.raises(
        InputError, match=r"'x' is not UTF-8: line 2, column 3 \(byte 4 of the line\) is the byte 0xff; convert"
    ):
        decode_text(b"\xef\xbb\xbfone\r\n\xc3\xa9t\xff\r\n", "x")
    with pytest.raises(InputError, match=r"compressed with gzip: give it a name that ends in '\.gz'"):
        decode_line(b"\x1f\x8b\x08\n", 1, "x")


def test_read_text_unreadable_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none' cannot be read \(No such file or directory\): check the path"):
        read_text(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot be read \(Is a directory\)"):
        read_text(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"pipe': it is a named pipe, expected a file: write its content to a file first"):
        read_text(tmp_path / "pipe")
