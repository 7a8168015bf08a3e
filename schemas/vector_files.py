"""Reader of text files of word vectors: GloVe, word2vec and fastText.

Each line has a word and its values with spaces between them; word2vec and fastText begin with the number of
words and the width. A file is streamed once, and only requested words take memory. Words that are not UTF-8
(fastText) or contain spaces (GloVe) are skipped.
"""

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from tokenize import TokenError
from typing import Any, BinaryIO, cast

import numpy as np

from schemas.errors import DatasetError, InputError
from schemas.storage.folder import file_at
from schemas.storage.locations import absolute_location, check_location
from schemas.text import HEAD, decode_line, mark_length, read_line

HEADER = re.compile(rb"\s*(\d{1,18})\s+(\d{1,18})\s*")
"""First line of word2vec's and fastText's files: number of words, width."""

NPY_ERRORS = (OSError, ValueError, EOFError, TypeError, SyntaxError, TokenError, OverflowError, MemoryError)
"""Errors of numpy for corrupt npy files; false counts raise the last two."""

_CHUNK = 1 << 20
_REPORT_LINES = 10_000


class FileDigest(io.RawIOBase):
    """A stream that counts and hashes the bytes read through it."""

    def __init__(self, source: Any) -> None:
        self.bytes = 0
        self._source = source
        self._digest = hashlib.sha256()

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.bytes += len(data)
        return len(data)

    def sha256(self) -> str:
        """Read the stream to its end, and return its SHA-256, hexadecimal."""
        while self.read(_CHUNK):
            pass
        return self._digest.hexdigest()


@dataclass(frozen=True)
class VectorFile:
    """Content of a file of word vectors, with size and digest of the stored file.

    Attributes:
        vectors: float64 ``[E]`` by requested word.
        width: E.
        words: number of words in the file.
    """

    vectors: Mapping[str, np.ndarray]
    width: int
    words: int
    bytes: int
    sha256: str


def read_vector_file(
    location: str, wanted: Collection[str], *, expected: str, on_progress: Callable[[int], object] = lambda words: None
) -> VectorFile:
    """Read the vectors of words; the first of duplicates counts.

    ``expected`` is the advice in messages, a sentence. ``on_progress`` receives the number of words read since its last call.

    Raises:
        InputError: the file cannot be read, is cut off, is not UTF-8, has no word vectors, or a line is too long.
    """
    reader = _Lines(location, {word.encode() for word in wanted}, expected)
    with open_user_file(location, expected) as (file, digest):
        line_number = 0
        while line := read_line(file, line_number + 1, location):
            line_number += 1
            reader.read(line_number, line)
            if line_number % _REPORT_LINES == 0:
                on_progress(_REPORT_LINES)
        on_progress(line_number % _REPORT_LINES)
        reader.finish()
        sha256 = digest.sha256()
    return VectorFile(
        vectors={word.decode(): vector for word, vector in reader.vectors.items()},
        width=reader.width,
        words=reader.words,
        bytes=digest.bytes,
        sha256=sha256,
    )


class _Lines:
    """Parser of the lines of a file."""

    def __init__(self, location: str, wanted: Collection[bytes], expected: str) -> None:
        self.vectors: dict[bytes, np.ndarray] = {}
        self.width = self.words = 0
        self._location, self._wanted, self._expected = location, wanted, expected
        self._announced = 0  # Number of words in the header.
        self._last = b"\n"
        self._invalid: tuple[int, bytes] | None = None  # First line that is not UTF-8.
        self._is_utf8 = False  # A word is valid UTF-8 beyond ASCII.

    def read(self, line_number: int, line: bytes) -> None:
        """Parse a line; raise an `InputError` if it is not a word and its values."""
        if line_number == 1:
            line = line[mark_length(line[:HEAD], self._location) :]
            if header := HEADER.fullmatch(line):
                self._announced, self.width = int(header[1]), int(header[2])
                return
        word = next(iter(line.split(None, 1)), b"")
        if not word:
            return
        self._last = line
        # A few words may be invalid; a file in another encoding has no valid words beyond ASCII.
        if not self._is_utf8 and not word.isascii():
            try:
                word.decode()
                self._is_utf8 = True
            except UnicodeDecodeError:
                self._invalid = self._invalid or (line_number, line)
        # Fast path for words that are not requested: count spaces without splitting.
        if self.words and word not in self._wanted and line.rstrip().count(b" ") >= self.width:
            self.words += 1
            return
        values = line.split()[1:]
        if not self.words:
            if len(values) != (self.width or len(values)) or len(values) < 2 or _floats(values) is None:
                raise self._not_a_vector(line_number, line)
            self.width = len(values)
        if len(values) < self.width:
            raise self._not_a_vector(line_number, line)
        self.words += 1
        if len(values) == self.width and word in self._wanted and word not in self.vectors:
            vector = _floats(values)
            if vector is None:
                raise self._not_a_vector(line_number, line)
            self.vectors[word] = vector

    def finish(self) -> None:
        """Raise an `InputError` if the file has no words, is cut off or is not UTF-8."""
        if not self.words:
            raise InputError(
                f"{self._location!r} holds no word vectors: expected a word and its numbers on each line, found nothing"
            )
        if self.words < self._announced:
            place = "" if self._last.endswith(b"\n") else "in the middle of a line "
            raise InputError(
                f"{self._location!r} is cut off: its first line announces {self._announced:,} words, and it ends {place}after "
                f"{self.words:,}: fetch it again, or correct the number if words were removed on purpose"
            )
        if self._invalid is not None and not self._is_utf8:
            decode_line(self._invalid[1], self._invalid[0], self._location)

    def _not_a_vector(self, line_number: int, line: bytes) -> InputError:
        start = line[:40].decode("utf-8", "replace").rstrip("\r\n")
        count = f"{self.width} " if self.width else ""
        return InputError(
            f"{self._location!r}, line {line_number}: expected a word and its {count}numbers with spaces "
            f"between them, as in GloVe's files and fastText's .vec, found {start!r}. {self._expected}"
        )


def _floats(values: Sequence[bytes]) -> np.ndarray | None:
    try:
        vector = np.array([float(value) for value in values])
    except ValueError:
        return None
    return vector if np.isfinite(vector).all() else None


@contextmanager
def open_user_file(location: str, expected: str) -> Iterator[tuple[BinaryIO, FileDigest]]:
    """Open a user's file for sequential reading; names in ``.gz`` are decompressed.

    Yields the content, and the digest of the stored file. Messages end with ``expected``.

    Raises:
        InputError: the file does not exist, or cannot be read.
    """
    check_location(location)
    folder, name = file_at(absolute_location(location))
    try:
        with folder.open(name, is_mapped=False) as raw:
            digest = FileDigest(raw)
            file = io.BufferedReader(digest, _CHUNK)
            yield cast("BinaryIO", gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file), digest
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(
            f"{location!r} is not a whole gzip file ({error}): fetch it again, or name it without '.gz'"
        ) from error
    except FileNotFoundError as error:
        raise InputError(f"there is no file {location!r}: {expected}") from error
    except IsADirectoryError as error:
        raise InputError(f"{location!r} is a folder: {expected}") from error
    except DatasetError as error:
        raise InputError(str(error)) from error
