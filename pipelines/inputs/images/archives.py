"""Images in archives: WebDataset's tars, and Parquet files with image bytes.

A hash of its id assigns an image to a shard, so the images of a shard are scattered over all archives.

* tar: listing reads the headers; an image is one range of bytes.
* Parquet: an image costs its row group. Extraction first stages all images (`pipelines.inputs.images.staged_images`), reading each
  row group once. Others read images ``in_reading_order``, so that few row groups are in memory.
"""

import errno
import io
import re
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import PurePosixPath
from tarfile import TarInfo
from threading import Lock
from typing import Any, BinaryIO, ClassVar, Literal, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.inputs.ids import id_of_path
from pipelines.inputs.images.base import EXTENSIONS, ImageRef, SkippedFiles, is_image
from pipelines.inputs.images.folders import FolderSource
from pipelines.inputs.tars import tar_members
from schemas.errors import DatasetError, InputError
from schemas.footers import ShardRows, check_expansion, max_memory, text_bytes
from schemas.keys import check_image_id
from schemas.storage.folder import Folder
from schemas.storage.storage_errors import storage_errors

ArchiveKind = Literal["tar", "parquet"]

_COMPRESSED = re.compile(r"\.(tgz|tbz2?|txz|tzst|tar\.(gz|bz2|xz|zst|lz4?|br|z))$", re.IGNORECASE)
# A request to an object store takes as long as several MB, so small members are read, not skipped.
_REMOTE_BUFFER = 4 << 20
_BYTES_COLUMNS = ("bytes", "image", "image_bytes", "jpg")
_ID_COLUMNS = ("image_id", "id", "key", "__key__")
_READING = Lock()
_BATCH_ROWS = 16  # A dictionary may expand 100 KB to gigabytes, see `schemas.footers.max_memory`.
_ID_ROWS = 4096


def archive_kind(name: str) -> ArchiveKind | None:
    """Return the kind of an archive by its extension; None for another file.

    Raises:
        InputError: it is a compressed tar.
    """
    if _COMPRESSED.search(name):
        raise InputError(
            f"{name!r} is a compressed tar, in which no image can be reached without unpacking all before "
            "it. Decompress it (gunzip, unzstd, ...) to a .tar, or unpack it to a folder"
        )
    suffix = PurePosixPath(name).suffix.lower()
    return cast("ArchiveKind", suffix[1:]) if suffix in (".tar", ".parquet") else None


def archives_in(folder: Folder) -> ArchiveKind | None:
    """Return the kind of a folder's archives; None with an image, or without archives.

    Raises:
        InputError: it contains no image file, but tars and Parquet files, or compressed tars.
    """
    examples: dict[ArchiveKind, str] = {}
    compressed = ""
    for path in (entry.name for entry in folder.list()):
        name = PurePosixPath(path).name
        if name.startswith((".", "_")):
            continue
        if PurePosixPath(path).suffix.lower() in EXTENSIONS:
            return None
        if _COMPRESSED.search(name):
            compressed = path
        elif (kind := archive_kind(name)) is not None:
            examples.setdefault(kind, path)
    if len(examples) > 1:
        first, second = sorted(examples.values())
        raise InputError(f"{folder.location!r} holds both {first!r} and {second!r}: choose with a pattern such as '*.tar'")
    if compressed and "parquet" not in examples:
        archive_kind(folder.path_of(compressed))
    return next(iter(examples), None)


def holds_image_bytes(folder: Folder, name: str) -> bool:
    """Return whether a valid Parquet file has image bytes and no column ``uri``."""
    try:
        with folder.open(name) as file:
            schema = pq.read_schema(file)
    except (pa.ArrowException, OSError):
        return False
    return "uri" not in schema.names and _bytes_column(schema) is not None


@dataclass(frozen=True)
class _Archives(FolderSource):
    """Archives below a folder; ``pattern`` selects archives, not images."""

    _kind: ClassVar[ArchiveKind]

    def _list(self, skipped: SkippedFiles) -> Iterator[ImageRef]:
        """List the images, archive by archive; skipped members of tars are counted, too."""
        for entry in sorted(self._entries(skipped)):
            for ref in self._refs_in(entry.name, skipped):
                yield ref._replace(version=entry.version)

    def _holds_images(self, path: str) -> bool:
        name = PurePosixPath(path).name
        return not name.startswith((".", "_")) and not _COMPRESSED.search(name) and archive_kind(name) == self._kind

    def _open(self, name: str) -> Any:
        try:
            return self.folder.open(name)
        except FileNotFoundError as error:
            raise InputError(f"{self.folder.path_of(name)!r} no longer exists: run the command again") from error

    @abstractmethod
    def _refs_in(self, name: str, skipped: SkippedFiles) -> Iterator[ImageRef]: ...


# --- tar -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagesInTars(_Archives):
    """The images in tar files, such as WebDataset's shards.

    The image id is the member's name without its last extension; with ``ids="path"`` its whole path in the tar. ``uri`` is the
    path of the tar followed by that of the member, ``offset`` the position of the member's bytes in the tar.
    """

    _kind = "tar"

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one member."""
        data = self.folder.read(_parts_of(ref.uri)[0], ref.offset, ref.bytes)
        if len(data) != ref.bytes:
            raise OSError(errno.EIO, "the archive ends before the image does")
        return data

    def advice_apart(self, first: ImageRef, second: ImageRef) -> str:
        """Return the advice for a duplicate member, or for members of the same name."""
        tars, paths = zip(*(_parts_of(ref.uri) for ref in (first, second)), strict=True)
        if first.uri == second.uri:
            return "the tar holds the member twice; unpack it, which keeps the last one, and pack it again"
        if self.ids == "name" and id_of_path(paths[0], "path") != id_of_path(paths[1], "path"):
            return "make ids of whole paths with --id-rule path, or rename one and pack it again"
        if tars[0] != tars[1]:
            return (
                "rename one and pack it again, or unpack each tar to a folder of its own and make ids of "
                "paths with --id-rule path"
            )
        return "rename one and pack it again"

    def _refs_in(self, name: str, skipped: SkippedFiles) -> Iterator[ImageRef]:
        location = self.folder.path_of(name)
        if _parts_of(f"{name}/")[0] != name:
            raise InputError(f"{location!r} is in a folder whose name ends in '.tar': rename the folder")
        with storage_errors(location), self._open(name) as raw:
            file = raw if self.folder.is_local else io.BufferedReader(raw, _REMOTE_BUFFER)
            for member in tar_members(cast("BinaryIO", file), raw.size(), location):
                path = f"{name}/{PurePosixPath(member.name)}"
                if member.isdir():
                    continue
                if is_image(path):
                    _check_member(member, location)
                    image_id = id_of_path(member.name, self.ids)
                    place = f"{location!r}, member {member.name!r}"
                    check_image_id(image_id, place=place, advice="rename it and pack it again")
                    yield ImageRef(image_id, path, member.size, member.offset_data)
                else:
                    skipped.add(path)


# --- Parquet ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImagesInParquet(_Archives):
    """The images in a column of Parquet files.

    The column is named ``bytes``, ``image``, ``image_bytes`` or ``jpg`` and is binary, or a HuggingFace struct with the fields
    ``bytes`` and ``path``. Image ids come from the column ``image_id``, ``id``, ``key`` or ``__key__``, or else from the paths
    in the struct. If a path is null, the id consists of file and row: ``train-00000-of-00002-000123`` for row 123 of
    ``train-00000-of-00002.parquet``, followed by ``_`` if a path in that file has this id. ``offset`` is the row in the file,
    counted from 0, and ``uri`` the path of the file followed by that row.
    """

    _kind = "parquet"
    _unit = "rows"

    def advice_apart(self, first: ImageRef, second: ImageRef) -> str:
        """Return the advice; it names ``--id-rule`` only if the paths differ."""
        if self.ids == "name" and self._path_id(first) != self._path_id(second):
            return "make ids of whole paths with --id-rule path, or give each row an id of its own in a column 'image_id'"
        return "remove one of them, or give each row an id of its own in a column 'image_id'"

    def _path_id(self, ref: ImageRef) -> str:
        """Return the id of an image with ``ids="path"``."""
        refs = replace(self, ids="path")._refs_in(_file_of(ref), SkippedFiles())
        return next(other.image_id for other in refs if other.offset == ref.offset)

    def in_reading_order(self, refs: Sequence[ImageRef]) -> Sequence[ImageRef]:
        """Sort by file and row."""
        return sorted(refs, key=lambda ref: (_file_of(ref), ref.offset))

    def read(self, ref: ImageRef) -> bytes:
        """Return the bytes of one row; the last row groups are cached."""
        with _READING:  # Threads that need the same row group read it once.
            value = next(self.read_group([ref], is_cached=True))
        if value is None:
            raise no_image()
        return value

    def groups(self, refs: Iterable[ImageRef]) -> Iterator[list[ImageRef]]:
        """Split images, in the order of the listing, by row group."""
        for (name, version), rows in groupby(refs, key=lambda ref: (_file_of(ref), ref.version)):
            try:
                starts = first_rows(self.folder, name, version)
            except (pa.ArrowException, OSError, DatasetError):
                starts = ()  # An unreadable file is one group.
            yield from (list(group) for _, group in groupby(rows, key=lambda ref: bisect_right(starts, ref.offset)))

    def read_group(self, refs: Sequence[ImageRef], *, is_cached: bool = False) -> Iterator[bytes | None]:
        """Yield the bytes of images of one row group, None for a null.

        Raises:
            OSError, DatasetError: it cannot be read; a DatasetError has an OSError as its cause.
        """
        name, version = _file_of(refs[0]), refs[0].version
        try:
            starts = first_rows(self.folder, name, version)
            group = bisect_right(starts, refs[0].offset) - 1
            values = (_cached_column if is_cached else read_column)(self.folder, name, version, group)
            yield from (values[ref.offset - starts[group]].as_py() for ref in refs)
        except (pa.ArrowException, IndexError) as error:
            raise OSError(
                errno.EIO, "the Parquet file is broken, or was changed, or a row group is far larger than the file"
            ) from error

    def _refs_in(self, name: str, skipped: SkippedFiles) -> Iterator[ImageRef]:
        location, row = self.folder.path_of(name), 0
        with self._open(name) as file:
            try:
                rows = ShardRows(file, location, check_text=False, pre_buffer=False)
                ids = _ids_column(rows.schema, location)
                if ids not in rows.schema.names:
                    yield from self._refs_by_path(name, _read_paths(file, rows, ids, location))
                    return
                for batch in rows.batches([ids], _ID_ROWS):
                    for value in batch.column(0).to_pylist():
                        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
                            raise InputError(
                                f"{location!r}, row {row + 1}: {ids} is {value!r}, expected text or a whole number"
                            )
                        image_id = check_image_id(str(value), place=f"{location!r}, row {row + 1}")
                        yield ImageRef(image_id, f"{name}/{row}", offset=row)
                        row += 1
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise InputError(
                    f"{location!r} is not a whole Parquet file (after {row} rows): {error}; write it again"
                ) from error

    def _refs_by_path(self, name: str, paths: Sequence[str | None]) -> Iterator[ImageRef]:
        """Yield references with ids from paths, or from file and row without a path."""
        stem = id_of_path(name, self.ids)
        taken = {
            image_id for image_id in (id_of_path(path, self.ids) for path in paths if path) if image_id.startswith(f"{stem}-")
        }
        for row, path in enumerate(paths):
            image_id = id_of_path(path, self.ids) if path else f"{stem}-{row:06}"
            while not path and image_id in taken:
                image_id += "_"
            check_image_id(image_id, place=f"{self.folder.path_of(name)!r}, row {row + 1}")
            yield ImageRef(image_id, f"{name}/{row}", offset=row)


def _file_of(ref: ImageRef) -> str:
    return ref.uri.rpartition("/")[0]


def _parts_of(uri: str) -> tuple[str, str]:
    """Split a URI into the path of a tar and the path of its member."""
    parts = uri.split("/")
    end = next((index for index, part in enumerate(parts) if part.lower().endswith(".tar")), len(parts))
    return "/".join(parts[: end + 1]), "/".join(parts[end + 1 :])


def _check_member(member: TarInfo, location: str) -> None:
    """Check that a member is a regular file with a UTF-8 name."""
    try:
        member.name.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"{location!r} holds the member {member.name!r}, and its name is not UTF-8: rename it and pack it again"
        ) from error
    if not member.isreg() or member.sparse is not None:
        raise InputError(
            f"{location!r}: the member {member.name!r} is a link or a sparse file, not an image's bytes; "
            "pack it again with tar --dereference --hard-dereference"
        )


def _read_paths(file: pa.NativeFile, rows: ShardRows, column: str, location: str) -> list[str | None]:
    """Return the path of each row of a file; None for a missing path."""
    struct, _, field = column.partition(".")
    if rows.schema.field(struct).type.get_field_index(field) < 0:
        check_expansion(8 * rows.metadata.num_rows, file.size(), location)
        return [None] * rows.metadata.num_rows
    paths, size = [], 0
    table = pq.ParquetFile(file, metadata=rows.metadata, read_dictionary=[column])
    for group in range(table.num_row_groups):
        values = pc.struct_field(table.read_row_group(group, columns=[column]).column(0), field)
        size += 8 * len(values) + sum(map(text_bytes, values.chunks))
        check_expansion(size, file.size(), location)
        paths += values.cast(pa.string()).to_pylist()
    return paths


def no_image() -> OSError:
    """Return the error of a row without an image."""
    return OSError(errno.ENODATA, "the row holds no image")


@lru_cache(maxsize=16)  # Few, since footers are large.
def read_metadata(folder: Folder, name: str, version: str) -> pq.FileMetaData:
    """Return the footer of a Parquet file; the version is part of the cache key."""
    with folder.open(name) as file:
        return pq.read_metadata(file)


@lru_cache(maxsize=4096)
def first_rows(folder: Folder, name: str, version: str) -> tuple[int, ...]:
    """Return the first row of each row group, followed by the number of rows."""
    metadata = read_metadata(folder, name, version)
    return tuple(accumulate((metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)), initial=0))


def read_column(folder: Folder, name: str, version: str, group: int) -> pa.ChunkedArray:
    """Return the images of a row group, or raise an ArrowException or OSError.

    Of a row group that exceeds its limit of memory only the first images are returned.
    """
    with folder.open(name) as file:
        table = pq.ParquetFile(file, metadata=read_metadata(folder, name, version))
        column = _bytes_column(table.schema_arrow)
        if column is None:
            raise pa.ArrowInvalid("no image bytes")
        room, chunks = max_memory(file.size()), []
        for batch in table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column]):
            room -= batch.nbytes
            if room < 0:
                break
            chunks.append(batch.column(0))
    values = pa.chunked_array(chunks)
    return pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values


@lru_cache(maxsize=2)  # Threads may still read the last row group when others begin the next.
def _cached_column(folder: Folder, name: str, version: str, group: int) -> pa.ChunkedArray:
    return read_column(folder, name, version, group)


def _bytes_column(schema: pa.Schema) -> str | None:
    """Return the image column in Parquet's notation; None without one."""
    for name in (name for name in _BYTES_COLUMNS if schema.names.count(name) == 1):
        kind = schema.field(name).type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return name
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            return f"{name}.bytes"
    return None


def _ids_column(schema: pa.Schema, location: str) -> str:
    """Return the column of image ids, in Parquet's notation.

    Raises:
        InputError: the file has no such column, or no image column.
    """
    images = _bytes_column(schema)
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
        f"{location!r} has no column of image ids; its columns are {', '.join(map(repr, schema.names))}. "
        f"Name one of them {', '.join(map(repr, _ID_COLUMNS[:-1]))} or {_ID_COLUMNS[-1]!r}"
    )
