"""Input files, local or in a store: lines of text, items of JSON, checksums.

Everything streams, in constant memory. An `InputError` (missing, truncated, not UTF-8, not JSON) names the file and the place.
"""

import codecs
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal, cast

import ijson
import numpy as np
import pyarrow as pa

from schemas.errors import DatasetError, InputError
from schemas.storage.folder import Folder
from schemas.storage.locations import absolute_location, check_location, is_remote
from schemas.storage.storage_errors import storage_errors
from schemas.text import HEAD, MAX_LINE, decode_line, mark_length, not_utf8, read_line
from schemas.vector_files import FileDigest

KARPATHY_FORM = "a 'dataset_*.json' of Karpathy's splits"
"""Description of such a file in messages."""

_CHUNK = 1 << 18
_REMOTE_CHUNK = 16 << 20  # Bytes per request, which an object store answers after as long as several MB take.
_HEX2 = rb"[0-9a-fA-F]{2}"
# JSON escapes: anything but \u, a surrogate pair, a lone surrogate.
_ESCAPE = re.compile(rb"\\[^u]|\\u[dD][89abAB]" + _HEX2 + rb"\\u[dD][c-fC-F]" + _HEX2 + rb"|(?P<half>\\u[dD][89a-fA-F])")
_LONGEST_ESCAPE = 12
_LONG_DIGITS = 19
_LONG_NUMBER = re.compile(rb"[:\[,\s-][0-9]{%d}" % _LONG_DIGITS)
# The memory of ijson's C parser grows with the square of the depth.
_MAX_DEPTH = 100
_NO_MARKS = bytes(set(range(256)) - set(b'"[]{}'))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # As int8: 1 and -1.
# Messages of ijson's C parser and of its Python parser.
_NOT_A_NUMBER = re.compile(r"(?s)lexical error.*[:\[,]\s*-?(NaN|Infinity)|symbol '[-NI]'")
_MORE = 1 << 12


def locate(path: str | os.PathLike[str]) -> str:
    """Return a path as an absolute local path, for all workers, or a URL unchanged."""
    check_location(os.fspath(path))
    text = absolute_location(path)
    return text.rstrip("/") if is_remote(text) else text


def kind_of(location: str) -> Literal["file", "folder", "nothing"]:
    """Return the kind of a location: ``file``, ``folder`` or ``nothing``.

    Raises:
        InputError: it is a pipe, a socket or a device.
    """
    with input_errors(location):
        return Folder(location).kind()


def check_order(name: str, source: str, output: str) -> None:
    """Check that a local source and output are not swapped.

    Raises:
        InputError: the output exists, while the source, which is no pattern, does not.
    """
    if is_remote(source) or is_remote(output) or re.search(r"[*?\[]", source):
        return
    if Folder(source).kind() == "nothing" and Folder(output).kind() != "nothing":
        raise InputError(f"{name} {source!r} does not exist, but OUTPUT {output!r} does: check the path, or give {name} first")


def list_files(folder: Folder, below: str = "") -> list[str]:
    """Return the sorted names of files directly in a folder; empty if it is missing."""
    with input_errors(folder.path_of(below)):
        return [name for name in folder.children(below) if not name.endswith("/")]


@contextmanager
def open_input(folder: Folder, name: str, *, decompress: bool = True) -> Iterator[BinaryIO]:
    """Open a file for streaming; a ``.gz`` is decompressed, if `decompress`.

    Raises:
        InputError: the file is missing, cannot be read, or is not a complete gzip file.
    """
    location = folder.path_of(name)
    with input_errors(location):
        try:
            with folder.open(name, is_mapped=False) as raw:
                stored = io.BufferedReader(raw, _CHUNK if folder.is_local else _REMOTE_CHUNK)
                if decompress and name.endswith(".gz"):
                    with gzip.GzipFile(fileobj=stored) as unzipped:
                        yield cast("BinaryIO", io.BufferedReader(unzipped, _CHUNK))
                else:
                    yield cast("BinaryIO", stored)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{location!r} is not a whole gzip file ({error}): it was probably cut short while it was "
                "copied, or is not compressed at all; fetch it again, or name it without '.gz'"
            ) from error


@contextmanager
def _open_at(folder: Folder, name: str, start: int) -> Iterator[BinaryIO]:
    """Open a file for streaming from the byte before `start`."""
    with input_errors(folder.path_of(name)), open_seekable(folder, name) as file:
        file.seek(start - 1)
        yield cast("BinaryIO", io.BufferedReader(file, _CHUNK))


def open_seekable(folder: Folder, name: str) -> pa.NativeFile:
    """Open a file for random access.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    with input_errors(folder.path_of(name)):
        return folder.open(name)


@contextmanager
def input_errors(location: str) -> Iterator[None]:
    """Convert errors of the system or the store to an `InputError` with advice."""
    try:
        with storage_errors(location):
            yield
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: check the path, or fetch the file again") from error
    except DatasetError as error:
        if isinstance(error.__cause__, PermissionError) and not is_remote(location):
            raise InputError(
                f"{location!r} cannot be read: permission denied; give this user (or the workers) permission to read it"
            ) from error
        raise InputError(str(error)) from error


def read_lines(folder: Folder, name: str, *, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, plain or ``.gz``, without line ends.

    A byte order mark at the start of the file is dropped, see `schemas.text`. With `start` and `stop` only the lines that begin in
    this range of bytes are read, not of a ``.gz``. Errors then count lines from `start`.

    Raises:
        InputError: the file is missing, cut short or not UTF-8, or a line is too long.
    """
    location = folder.path_of(name)
    with _open_at(folder, name, start) if start else open_input(folder, name) as stream:
        position = start - 1 + len(read_line(stream, 0, location)) if start else _skip_mark(stream, location)
        line_number = 1
        while chunk := stream.read(_CHUNK if stop is None else max(0, min(_CHUNK, stop - position))):
            if not chunk.endswith(b"\n"):
                chunk += read_line(stream, line_number, location, chunk)
            position += len(chunk)
            try:  # A chunk at a time is three times as fast as a line.
                lines = chunk.decode("utf-8").replace("\r\n", "\n").split("\n")
            except UnicodeDecodeError:
                yield from (decode_line(line + b"\n", n, location) for n, line in enumerate(chunk.split(b"\n"), line_number))
                raise
            line_number += len(lines) - 1
            yield from lines if lines[-1] else lines[:-1]


def count_lines(folder: Folder, name: str) -> int:
    """Return the number of lines that `read_lines` yields."""
    return sum(1 for _ in read_lines(folder, name))


def iter_json(folder: Folder, name: str, *, prefix: str, form: str) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each item of a list in JSON, plain or ``.gz``.

    The prefix is the path of the items in ijson's notation, e.g. ``images.item``. ``form`` is what the file should be.

    Raises:
        InputError: the file is missing, cut short, not UTF-8, not JSON, or nested too deeply, or has no items.
    """
    location, key = folder.path_of(name), prefix.removesuffix(".item")
    places = f"{location!r}, {key.removesuffix('s')} number "
    # The C parser replaces lone surrogates by "?" and refuses whole numbers beyond 64 bits; the Python parser is far slower.
    parser = ijson.get_backend("python") if _scan_json(folder, name) else ijson
    done = 0
    with open_input(folder, name) as stream:
        _skip_mark(stream, location)
        try:
            for done, item in enumerate(parser.items(stream, prefix, use_float=True), start=1):
                yield f"{places}{done}", item
        except ijson.JSONError as error:
            detail = error.args[0] if error.args else ""
            if isinstance(detail, bytes):
                detail = detail.decode("utf-8", "replace")
            advice = "Was it cut short? Fetch or write the file again"
            if "trailing garbage" in str(detail) or "Additional data" in str(detail):
                advice = (
                    "It holds more than one document: if these are JSON lines, name the file '.jsonl' and read it as a table"
                )
            if _NOT_A_NUMBER.search(str(detail)):
                advice = "NaN and Infinity are not JSON, although Python's json writes them: write null in their place"
            raise InputError(
                f"{location!r} is not well-formed JSON: {' '.join(str(detail).split())!r} after {done} items of {key!r}. {advice}"
            ) from error
    if not done:
        raise InputError(f"{location!r} has no {key!r} at its top level: is it {form}? If so, fetch it again")


def inventory(folder: Folder, names: Iterable[str]) -> list[dict[str, Any]]:
    """Return name, size in bytes and SHA-256 of each file, sorted by name."""
    rows = []
    for name in sorted(set(names)):
        with open_input(folder, name, decompress=False) as stream:
            digest = FileDigest(stream)
            sha256 = digest.sha256()
        rows.append({"name": name, "bytes": digest.bytes, "sha256": sha256})
    return rows


def _skip_mark(stream: BinaryIO, location: str) -> int:
    """Skip the byte order mark at the start of a stream, and return its length.

    Raises:
        InputError: the file is UTF-16 or UTF-32.
    """
    # The first peek fills the buffer: gzip and pyarrow return fewer bytes only at the end of a file.
    head = cast("io.BufferedReader", stream).peek(HEAD)[:HEAD]
    return len(stream.read(mark_length(head, location)))


def _scan_json(folder: Folder, name: str) -> bool:
    """Check a JSON file; return whether it needs the Python parser.

    These are files with an escaped lone surrogate, or with a whole number that may exceed 64 bits.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_special, lines, first, tail = False, 1, b"", b""
    depth, in_string, unquoted = 0, False, 0
    with open_input(folder, name) as stream:
        start = _skip_mark(stream, folder.path_of(name))
        while True:
            chunk = stream.read(_CHUNK)
            while b"\\" in chunk[-_LONGEST_ESCAPE:] and (more := stream.read(_MORE)):  # Do not split an escape.
                chunk += more
            first = first or chunk[:2]
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n")
                place = f"line {line}, byte {start - pending + error.start + 1} of the file"
                zipped = first == b"\x1f\x8b"
                raise not_utf8(folder.path_of(name), place=place, byte=error.object[error.start], zipped=zipped) from error
            if b"\\ud" in chunk or b"\\uD" in chunk:
                is_special = is_special or any(match["half"] for match in _ESCAPE.finditer(chunk))
            is_special = is_special or _LONG_NUMBER.search(tail + chunk) is not None
            tail = chunk[-_LONG_DIGITS:]
            marks = chunk.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
            parts = (b'"' * in_string + marks).replace(b'""', b"").split(b'"')  # Every second one is in a string.
            depths = depth + np.frombuffer(b"".join(parts[::2]).translate(_STEPS), np.int8).cumsum()
            if depths.max(initial=0) > _MAX_DEPTH:
                raise InputError(
                    f"{folder.path_of(name)!r} nests more than {_MAX_DEPTH} lists and objects after line {lines}: fetch it again"
                )
            depth, in_string = int(depths[-1]) if len(depths) else depth, len(parts) % 2 == 0
            unquoted = 0 if b'"' in marks else unquoted + len(chunk)
            if unquoted > MAX_LINE:
                raise InputError(
                    f"{folder.path_of(name)!r} has a string of more than {MAX_LINE >> 20} MiB after line {lines}: fetch it again"
                )
            if not chunk:
                return is_special
            start += len(chunk)
            lines += chunk.count(b"\n")
