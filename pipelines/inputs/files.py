"""Files of a source: listing, opening, lines of text, items of JSON, checksums. Local folders, ``gs://`` and ``s3://``.

Everything streams: memory does not grow with the size of a file. What a user can mend (a file that is not there, not UTF-8, cut
short, not JSON) is an `InputError` that names the file and the place in it.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson
from pyarrow import fs

from schemas.errors import DatasetError, InputError
from schemas.storage import filesystem_of, is_remote, storage_errors

__all__ = ["InputFolder", "count_lines", "inventory", "iter_json", "kind_of", "locate", "read_lines", "without_gz"]

_CHUNK = 1 << 18
_HEX2 = rb"[0-9a-fA-F]{2}"
# The escapes of JSON that matter here, each as a whole: anything but \u, a surrogate pair, half of one.
_ESCAPE = re.compile(
    rb"\\[^u]|\\u[dD][89abAB]" + _HEX2 + rb"\\u[dD][c-fC-F]" + _HEX2 + rb"|(?P<half>\\u[dD][89a-fA-F])",
)
_LONGEST_ESCAPE = 12


@dataclass(frozen=True, order=True)
class InputFolder:
    """A local or remote folder; files in it are named relative to it, with ``/`` between the parts.

    Attributes:
        location: absolute local path, or a URI such as ``gs://bucket/captions``.
    """

    location: str

    def where(self, name: str) -> str:
        """Full name of a file, for messages."""
        return f"{self.location.rstrip('/')}/{name}"

    def names(self, below: str = "") -> list[str]:
        """Sorted names of the files directly in this folder, or in the folder `below`; empty when that is not there."""
        filesystem, base = filesystem_of(self.location)
        path = f"{base.rstrip('/')}/{below}" if below else base
        try:
            with _store_errors(self.where(below)):
                entries = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        except PermissionError as error:
            raise _cannot_open(self.where(below), error) from error
        return sorted(entry.base_name for entry in entries if entry.type == fs.FileType.File)

    @contextmanager
    def open(self, name: str, *, decompress: bool = True) -> Iterator[BinaryIO]:
        """Opens a file for streaming; ``.gz`` is decompressed on the way unless `decompress` is false."""
        filesystem, base = filesystem_of(self.location)
        where = self.where(name)
        try:
            with filesystem.open_input_stream(f"{base.rstrip('/')}/{name}", compression=None) as raw:
                stored = io.BufferedReader(raw, _CHUNK)
                if decompress and name.endswith(".gz"):
                    with gzip.GzipFile(fileobj=stored) as unzipped:
                        yield cast("BinaryIO", io.BufferedReader(unzipped, _CHUNK))
                else:
                    yield cast("BinaryIO", stored)
        except (FileNotFoundError, PermissionError) as error:
            raise _cannot_open(where, error) from error
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise InputError(
                f"{where!r} is not a whole gzip file ({error}): it was probably cut short while it was copied, or is not "
                f"compressed at all; fetch it again, or name it without '.gz'"
            ) from error
        except OSError:
            with _store_errors(where):
                raise

    def open_seekable(self, name: str) -> Any:
        """Opens a file for reading here and there, as Arrow wants it for Parquet; a context manager."""
        filesystem, base = filesystem_of(self.location)
        try:
            with _store_errors(self.where(name)):
                return filesystem.open_input_file(f"{base.rstrip('/')}/{name}")
        except (FileNotFoundError, PermissionError) as error:
            raise _cannot_open(self.where(name), error) from error


def kind_of(location: str) -> str:
    """What stands at a location: ``file``, ``folder`` or ``nothing``."""
    filesystem, path = filesystem_of(location)
    kinds = {fs.FileType.File: "file", fs.FileType.Directory: "folder"}
    with _store_errors(location):
        return kinds.get(filesystem.get_file_info([path])[0].type, "nothing")


@contextmanager
def _store_errors(location: str) -> Iterator[None]:
    """What an object store answers, as an error that says what to do; errors of local files pass as they are."""
    if not is_remote(location):
        yield
        return
    try:
        with storage_errors(location):
            yield
    except DatasetError as error:
        raise InputError(str(error)) from error


def locate(path: str | os.PathLike[str]) -> str:
    """A path as an absolute local path (it must mean the same to every worker), or the URI as it stands."""
    text = os.fspath(path)
    if "://" in text:
        return text.rstrip("/")
    # Not `Path.resolve`: messages should show the path that the user knows, not the target of a link.
    return os.path.abspath(Path(text).expanduser())  # noqa: PTH100


def without_gz(name: str) -> str:
    """A file name without a final ``.gz``."""
    return name.removesuffix(".gz")


def read_lines(folder: InputFolder, name: str) -> Iterator[str]:
    """Lines of a UTF-8 text file, plain or ``.gz``, without their LF.

    Only LF ends a line; CR, a byte order mark, U+2028 and the like are text and stay.

    Raises:
        InputError: the file is missing, cut short or not UTF-8.
    """
    with folder.open(name) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                column = len(line[: error.start].decode("utf-8")) + 1
                place = f"line {number}, column {column} (byte {error.start + 1} of the line)"
                zipped = number == 1 and line.startswith(b"\x1f\x8b")
                raise _not_utf8(folder.where(name), place=place, byte=line[error.start], zipped=zipped) from error
            yield text[:-1] if text.endswith("\n") else text


def count_lines(folder: InputFolder, name: str) -> int:
    """Number of lines that `read_lines` gives; a last line without LF counts."""
    lines, last = 0, b"\n"
    with folder.open(name) as stream:
        while chunk := stream.read(_CHUNK):
            lines += chunk.count(b"\n")
            last = chunk[-1:]
    return lines + (last != b"\n")


def iter_json(folder: InputFolder, name: str, *, prefix: str) -> Iterator[Any]:
    """Items of a list inside one JSON document, plain or ``.gz``, one at a time.

    Args:
        folder: the folder of the file.
        name: the file's name in it.
        prefix: which items, in the words of ijson, e.g. ``images.item``.

    Raises:
        InputError: the file is missing, cut short, not UTF-8 or not JSON.
    """
    # The C parser turns half a surrogate pair into "?"; the Python one, far slower, hands it over, so that it can be refused.
    parser = ijson.get_backend("python") if _scan_json(folder, name) else ijson
    done = 0
    with folder.open(name) as stream:
        try:
            for item in parser.items(stream, prefix, use_float=True):
                yield item
                done += 1
        except ijson.JSONError as error:
            detail = error.args[0] if error.args else ""
            if isinstance(detail, bytes):
                detail = detail.decode("utf-8", "replace")
            raise InputError(
                f"{folder.where(name)!r} is not well-formed JSON: {' '.join(str(detail).split())!r} "
                f"after {done} items of {prefix.removesuffix('.item')!r}. Was it cut short? Fetch or write the file again"
            ) from error


def inventory(folder: InputFolder, names: Iterable[str]) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each file as stored, sorted by name: what a fingerprint is made of."""
    rows = []
    for name in sorted(set(names)):
        digest, size = hashlib.sha256(), 0
        with folder.open(name, decompress=False) as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        rows.append({"name": name, "bytes": size, "sha256": digest.hexdigest()})
    return rows


def _cannot_open(where: str, error: OSError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{where!r} is not there: check the path, or fetch the file again")
    return InputError(f"{where!r} may not be read: give this user (or the workers) the right to read it")


def _not_utf8(where: str, *, place: str, byte: int, zipped: bool) -> InputError:
    if zipped:
        advice = "it is compressed with gzip: give it a name that ends in '.gz'"
    else:
        advice = "convert the file to UTF-8: iconv -f LATIN1 -t UTF-8 OLD > NEW (name the encoding it has in place of LATIN1)"
    return InputError(f"{where!r} is not UTF-8: {place} is the byte 0x{byte:02x}; {advice}")


def _scan_json(folder: InputFolder, name: str) -> bool:
    """Checks that a JSON file is UTF-8, and tells whether an escape in it is half a surrogate pair."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    found, start, lines, tail, first = False, 0, 1, b"", b""
    with folder.open(name) as stream:
        while True:
            chunk = stream.read(_CHUNK)
            first = first or chunk[:2]
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line = lines + error.object[: error.start].count(b"\n")
                place = f"line {line}, byte {start - pending + error.start + 1} of the file"
                zipped = first == b"\x1f\x8b"
                raise _not_utf8(folder.where(name), place=place, byte=error.object[error.start], zipped=zipped) from error
            if not found:
                found, tail = _has_half_pair(tail + chunk, final=not chunk)
            if not chunk:
                return found
            start += len(chunk)
            lines += chunk.count(b"\n")


def _has_half_pair(data: bytes, *, final: bool) -> tuple[bool, bytes]:
    """Whether an escape is half a surrogate pair; and the tail to look at again before what follows in the file."""
    limit = len(data) if final else max(len(data) - _LONGEST_ESCAPE, 0)
    end = 0
    for match in _ESCAPE.finditer(data):
        if match.start() >= limit:
            break
        if match["half"]:
            return True, b""
        end = match.end()
    return False, data[max(end, limit) :]
