"""Decoder of users' text files: UTF-8 with lines that end in LF or CR LF.

A byte order mark at the start of a file is dropped, and CR LF counts as LF. Neither becomes part of a token,
an id, a header or a name. Other line ends (a lone CR of old Macs, U+2028) are text, and so is a later U+FEFF.
"""

import codecs
from pathlib import Path
from typing import BinaryIO

from schemas.errors import DatasetError, InputError
from schemas.reads import record_read
from schemas.storage.locations import check_regular

HEAD = 4
"""Number of bytes that `mark_length` needs."""

MARK = "\ufeff"
"""Byte order mark."""

MAX_LINE = 64 << 20
"""Maximum bytes of a line, since a small gzip file may hold a line of gigabytes."""

LONE_CR = "if lines end in CR alone, as on old Macs, convert the file: tr '\\r' '\\n' < OLD > NEW"
"""Advice for an unexpected CR."""

# UTF-32 comes first: its little-endian mark begins with that of UTF-16. Name of the encoding, and iconv's name of it.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32", "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16 (little endian)", "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16 (big endian)", "UTF-16"),
)


def mark_length(head: bytes, location: str) -> int:
    """Return the length of a byte order mark, 3 or 0, from the first `HEAD` bytes.

    Raises:
        InputError: the file is UTF-16 or UTF-32, by its mark or by a zero in the first two bytes.
    """
    if head.startswith(codecs.BOM_UTF8):
        return len(codecs.BOM_UTF8)
    for mark, encoding, name in _MARKS:
        if head.startswith(mark):
            raise _other_encoding(location, encoding, name)
    if len(head) > 1 and (head[0] == 0) != (head[1] == 0):
        order, endian = ("BE", "big") if head[0] == 0 else ("LE", "little")
        raise _other_encoding(location, f"UTF-16 ({endian} endian, without a mark)", f"UTF-16{order}")
    return 0


def read_line(stream: BinaryIO, line_number: int, location: str, head: bytes = b"") -> bytes:
    """Read the remainder of a line with its end; empty at the end of the stream.

    ``line_number`` is that of the first line in ``head``, the bytes before; it is only for the message.

    Raises:
        InputError: it exceeds `MAX_LINE`.
    """
    line = stream.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        number = line_number + head.count(b"\n")
        raise InputError(f"{location!r}, line {number}: more than {MAX_LINE >> 20} MiB, expected line ends: {LONE_CR}")
    return line


def decode_line(line: bytes, line_number: int, location: str) -> str:
    """Decode a line without its LF or CR LF; ``line_number`` counts from 1.

    Raises:
        InputError: the line is not UTF-8.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(line[: error.start].decode("utf-8")) + 1
        place = f"line {line_number}, column {column} (byte {error.start + 1} of the line)"
        zipped = line_number == 1 and line.startswith(b"\x1f\x8b")
        raise not_utf8(location, place=place, byte=line[error.start], zipped=zipped) from error
    if text.endswith("\n"):
        return text[:-2] if text.endswith("\r\n") else text[:-1]
    return text


def decode_text(data: bytes, location: str) -> str:
    r"""Return the text of a whole file, its lines ending in ``\n``.

    Raises:
        InputError: it is not UTF-8.
    """
    lines = data[mark_length(data[:HEAD], location) :].split(b"\n")
    ended = [decode_line(line + b"\n", line_number, location) for line_number, line in enumerate(lines[:-1], start=1)]
    return "\n".join([*ended, decode_line(lines[-1], len(lines), location)])


def read_text(path: Path) -> str:
    r"""Read a local text file, its lines ending in ``\n``.

    Raises:
        InputError: the file cannot be read, or is not UTF-8.
    """
    record_read(str(path))
    try:
        check_regular(path)
        data = path.read_bytes()
    except DatasetError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read ({error.strerror}): check the path") from error
    return decode_text(data, str(path))


def not_utf8(location: str, *, place: str, byte: int, zipped: bool) -> InputError:
    """Return the error about a byte that is not UTF-8; a gzip file gets other advice."""
    if zipped:
        advice = "it is compressed with gzip: give it a name that ends in '.gz'"
    else:
        advice = "convert the file to UTF-8: iconv -f LATIN1 -t UTF-8 OLD > NEW (name the encoding it has in place of LATIN1)"
    return InputError(f"{location!r} is not UTF-8: {place} is the byte 0x{byte:02x}; {advice}")


def _other_encoding(location: str, encoding: str, name: str) -> InputError:
    return InputError(f"{location!r} is {encoding}, expected UTF-8: convert the file: iconv -f {name} -t UTF-8 OLD > NEW")
