"""The columns of Parquet files that hold images and their ids."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.inputs.images.row_groups import read_metadata
from schemas.errors import InputError
from schemas.storage.folder import Folder

_BYTES_COLUMNS = ("bytes", "image", "image_bytes", "jpg")
_ID_COLUMNS = ("image_id", "id", "key", "__key__")


def read_paths(table: pq.ParquetFile, column: str) -> list[str | None]:
    """Return the path of each row of a file; None for a row, or a whole file, without any."""
    struct, _, field = column.partition(".")
    if table.schema_arrow.field(struct).type.get_field_index(field) < 0:
        return [None] * table.metadata.num_rows
    values = table.read(columns=[column]).column(0)
    return pc.struct_field(values, field).cast(pa.string()).to_pylist()


def read_column(folder: Folder, name: str, version: str, group: int) -> pa.ChunkedArray:
    """Return the images of a row group, null for a row without one.

    Raises:
        pa.ArrowException: the file is broken, or has no such column.
        OSError: it cannot be read.
    """
    with folder.open(name) as file:
        table = pq.ParquetFile(file, metadata=read_metadata(folder, name, version))
        column = bytes_column(table.schema_arrow)
        if column is None:
            raise pa.ArrowInvalid("no image bytes")
        values = table.read_row_group(group, columns=[column]).column(0)
    return pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values


def bytes_column(schema: pa.Schema) -> str | None:
    """Return the column with the images, in Parquet's notation; None if there is none."""
    for name in (name for name in _BYTES_COLUMNS if schema.names.count(name) == 1):
        kind = schema.field(name).type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return name
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return f"{name}.bytes"
    return None


def ids_column(schema: pa.Schema, location: str) -> str:
    """Return the column with the image ids, in Parquet's notation.

    Raises:
        InputError: there is none, or none of images.
    """
    images = bytes_column(schema)
    if images is None:
        raise InputError(
            f"{location!r} has no column of image bytes; its columns are {', '.join(map(repr, schema.names))}. Name a binary "
            f"column one of {', '.join(map(repr, _BYTES_COLUMNS))}"
        )
    for name in (name for name in _ID_COLUMNS if schema.names.count(name) == 1):
        return name
    struct = images.removesuffix(".bytes")
    if struct != images:
        return f"{struct}.path"
    raise InputError(
        f"{location!r} has no column of image ids; its columns are {', '.join(map(repr, schema.names))}. Name one of them "
        f"{', '.join(map(repr, _ID_COLUMNS[:-1]))} or {_ID_COLUMNS[-1]!r}"
    )
