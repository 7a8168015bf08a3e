"""Choice of the image source for a location: folder, pattern, archive or table."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from pipelines.inputs.dialects import AUTO_DIALECT, Dialect, Quoting
from pipelines.inputs.files import kind_of, locate
from pipelines.inputs.ids import IdRule
from pipelines.inputs.images.archives import ImagesInParquet, ImagesInTars, archive_kind, archives_in, holds_image_bytes
from pipelines.inputs.images.base import ImageSource
from pipelines.inputs.images.folders import TABLE_COLUMNS, ImagesInFolder, ImageTable
from pipelines.inputs.tables import InputTable, check_columns, check_dialect, is_table
from pipelines.inputs.web import PUBLIC_ACCESS, WebAccess
from schemas.conversion import convert
from schemas.errors import InputError, UsageError
from schemas.storage.folder import Folder, file_at


def open_images(
    location: str | os.PathLike[str],
    *,
    id_rule: IdRule = "name",
    columns: Mapping[str, str] | None = None,
    delimiter: str = "",
    quoting: Quoting = "auto",
    allow_private_addresses: bool = False,
    user_agent: str = "",
) -> ImageSource:
    """Open a collection of images.

    Args:
        location: a folder (searched recursively for images, else for tars or Parquet files with image bytes),
            a pattern with ``*``, ``?``, ``[...]`` or ``**`` for images, ``.tar`` or ``.parquet`` files, a
            table with the columns ``image_id`` and ``uri``, a ``.tar``, a ``.parquet`` file with image bytes,
            or one image file; local, ``gs://`` or ``s3://``.
        id_rule: rule for image ids from paths.
        columns: for a table, our name of a column -> the table's name.
        delimiter: for CSV and TSV, the character between two values; empty: detected.
        quoting: for CSV and TSV, the meaning of ``"``, see `pipelines.inputs.dialects.Quoting`.
        allow_private_addresses: for a table: allow downloads from addresses that are not public, and through proxies.
        user_agent: for a table: the header User-Agent of downloads; empty for ``imagepivot/VERSION``.

    Raises:
        UsageError: ``id_rule`` is neither ``name`` nor ``path``, a column is unknown, or an option for tables has another location.
        InputError: the location does not exist, or is a compressed tar.
    """
    convert(id_rule, IdRule, "--id-rule")
    check_columns(columns or {}, TABLE_COLUMNS)
    dialect = Dialect(delimiter, quoting)
    access = WebAccess(allow_private_addresses=allow_private_addresses, user_agent=user_agent)
    source = _open(locate(location), id_rule)
    if isinstance(source, ImageTable):
        check_dialect(source.table.name, dialect)
        table = replace(source.table, renamed=tuple(sorted((columns or {}).items())), dialect=dialect)
        return ImageTable(table, access)
    if columns:
        raise UsageError(f"columns {dict(columns)!r} were given for {source.location!r}: only a table of addresses has columns")
    if dialect != AUTO_DIALECT:
        raise UsageError(f"--delimiter or --quoting was given for {source.location!r}: only a table of addresses has them")
    if access != PUBLIC_ACCESS:
        option = "--allow-private-addresses" if allow_private_addresses else "--user-agent"
        raise UsageError(f"{option} is for a table of addresses, but {source.location!r} is none: leave it out")
    return source


def _open(path: str, ids: IdRule) -> ImageSource:
    kind = kind_of(path)
    if kind == "folder":
        folder, name, pattern = Folder(path), "", None
        archive = archives_in(folder)
    elif kind == "file":
        folder, name = file_at(path)
        pattern = re.escape(name)
        archive = archive_kind(name)
        if archive == "parquet" and not holds_image_bytes(folder, name):
            archive = None
    elif re.search(r"[*?\[]", path):
        parts = path.split("/")
        first = next(index for index, part in enumerate(parts) if re.search(r"[*?\[]", part))
        parent = "/".join(parts[:first])
        slashes = parent[len(parent.rstrip("/")) :]  # In a store they belong to the keys.
        folder, name, pattern = Folder(parent or "/"), "", slashes + _to_regex("/".join(parts[first:]))
        archive = archive_kind(path)
    else:
        raise InputError(f"the images {path!r} do not exist: check the path")
    if archive is not None:
        return (ImagesInTars if archive == "tar" else ImagesInParquet)(folder, pattern=pattern, ids=ids)
    if is_table(name):
        return ImageTable(InputTable(folder, name, TABLE_COLUMNS, TABLE_COLUMNS))
    return ImagesInFolder(folder, pattern=pattern, ids=ids)


def _to_regex(pattern: str) -> str:
    """Translate a shell pattern, in which only ``**`` crosses ``/``, to a regex."""
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    result = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[!?[^\]]+\]|.", pattern):
        if piece.startswith("[") and len(piece) > 1:
            result += "[" + piece[1:-1].replace("\\", r"\\").replace("!", "^", 1 if piece[1] == "!" else 0) + "]"
        else:
            result += tokens.get(piece, re.escape(piece))
    return result
