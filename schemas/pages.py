"""Vectors by their offsets in a shard, without decoding its row groups.

A column of a row group is a sequence of pages: header, repetition levels, definition levels and plain values.
Row groups that other tools wrote with other encodings are decoded.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_Pages: TypeAlias = tuple[list[int], list[int]]
"""First value of each page and their number; offset in the file at which value 0 would be, by page."""

_NUMBER = rb"([\x80-\xff]*[\x00-\x7f])"
# Header of a data page in Thrift's compact protocol: two sizes and (values, PLAIN, levels as RLE, empty statistics).
_HEADER = re.compile(rb"\x15\0\x15%b\x15%b\x2c\x15%b\x15\0\x15\x06\x15\x06(?:\x1c\0)?\0\0" % ((_NUMBER,) * 3), re.DOTALL)
_HEADER_BYTES = 64


@dataclass
class PagedShard:
    """Rows of a shard of vectors.

    Attributes:
        table: the columns without vectors.
        read: returns so many bytes of the file from an offset.
        read_group: decodes the values of a column in a row group.
    """

    path: str
    table: pa.Table
    metadata: pq.FileMetaData
    read: Callable[[int, int], bytes | memoryview]
    read_group: Callable[[int, str], np.ndarray]

    def __post_init__(self) -> None:
        metadata = self.metadata
        self._image_ids: list[str] = self.table["image_id"].to_pylist()
        groups = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *groups]).tolist()
        paths = (metadata.schema.column(index).path for index in range(metadata.num_columns))
        self._columns = {path.partition(".")[0]: index for index, path in enumerate(paths)}
        self._pages: dict[tuple[str, int], _Pages | None] = {}

    def rows_of(self, image_id: str) -> range:
        """Return the rows of an image; they are sorted by its id."""
        return range(bisect_left(self._image_ids, image_id), bisect_right(self._image_ids, image_id))

    def vector(self, column: str, row: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Read ``size`` values of a row."""
        group = bisect_right(self._starts, row) - 1
        if self.metadata.schema.column(self._columns[column]).physical_type == "INT32":
            dtype = np.dtype(np.int32)  # Parquet has no shorter integers.
        if (column, group) not in self._pages:
            self._pages[column, group] = self._locate(self._columns[column], group, size, dtype.itemsize)
        begin, parts = (row - self._starts[group]) * size, []
        if (pages := self._pages[column, group]) is None:
            return self.read_group(group, column)[begin : begin + size]
        end, page = begin + size, bisect_right(pages[0], begin) - 1
        while begin < end:  # A page may end within a row.
            stop = min(end, pages[0][page + 1])
            parts.append(self.read(pages[1][page] + begin * dtype.itemsize, (stop - begin) * dtype.itemsize))
            begin, page = stop, page + 1
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype)

    def _locate(self, index: int, group: int, size: int, itemsize: int) -> _Pages | None:
        """Return the pages of a chunk; None if one is encoded otherwise, or damaged."""
        chunk = self.metadata.row_group(group).column(index)
        start, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
        firsts, offsets = [0], []
        while start < end and chunk.compression == "UNCOMPRESSED":
            header = _HEADER.match(self.read(start, _HEADER_BYTES))
            if header is None:
                return None
            length, same_length, count = (_decode_number(number) for number in header.groups())
            values, start = start + header.end(), start + header.end() + length
            for _ in ("repetition levels", "definition levels"):
                values += 4 + int.from_bytes(self.read(values, 4), "little")
            if values + count * itemsize != start or length != same_length:  # Values without null have no other size.
                return None
            offsets.append(values - firsts[-1] * itemsize)
            firsts.append(firsts[-1] + count)
        rows = self._starts[group + 1] - self._starts[group]
        return (firsts, offsets) if start == end and firsts[-1] == rows * size else None


def _decode_number(number: bytes) -> int:
    """Decode an unsigned number in Thrift's variable length and zigzag form."""
    return sum((digit & 127) << 7 * place for place, digit in enumerate(number)) >> 1
