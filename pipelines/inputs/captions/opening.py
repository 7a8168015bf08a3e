"""Opening a collection of raw captions, by format."""

import os
from collections.abc import Mapping

from pipelines.inputs.captions.base import CaptionSource
from pipelines.inputs.captions.json_formats import CocoSource, KarpathySource
from pipelines.inputs.captions.multi30k import Multi30kSource
from pipelines.inputs.captions.scan import ScanSource
from pipelines.inputs.captions.table import TABLE_COLUMNS, TableSource
from pipelines.inputs.dialects import AUTO_DIALECT, Dialect, Quoting
from pipelines.inputs.files import kind_of, locate
from pipelines.inputs.ids import IdRule
from pipelines.inputs.tables import check_columns
from schemas.conversion import convert
from schemas.errors import InputError, UsageError
from schemas.keys import check_language

FORMATS = ("multi30k", "karpathy", "coco", "scan", "table")


def open_captions(
    format: str,  # noqa: A002 -- the word of the command line
    path: str | os.PathLike[str],
    *,
    language: str = "en",
    columns: Mapping[str, str] | None = None,
    id_rule: IdRule = "name",
    delimiter: str = "",
    quoting: Quoting = "auto",
) -> CaptionSource:
    """Open a collection of captions.

    Args:
        format: one of `FORMATS`.
        path: local path, ``gs://`` or ``s3://`` address of the file or folder.
        language: language of the captions, for formats without one.
        columns: for a table, our name of a column -> the table's name.
        id_rule: rule for image ids from paths, for formats with image files.
        delimiter: for CSV and TSV, the character between two values; empty: detected.
        quoting: for CSV and TSV, the meaning of ``"``, see `pipelines.inputs.dialects.Quoting`.

    Raises:
        UsageError: format, language, columns, id rule or dialect do not go together.
        InputError: `path` does not exist, or lacks the files of the format.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown format of captions {format!r}: use one of {', '.join(FORMATS)}")
    if columns and format != "table":
        raise UsageError(f"columns {dict(columns)!r} were given for the format {format!r}: only a 'table' has columns")
    check_columns(columns or {}, TABLE_COLUMNS)
    convert(id_rule, IdRule, "--id-rule")
    if id_rule != "name" and format in ("scan", "table"):
        raise UsageError(f"--id-rule {id_rule} was given for the format {format!r}, which has ids and not paths: leave it out")
    dialect = Dialect(delimiter, quoting)
    if dialect != AUTO_DIALECT and format != "table":
        raise UsageError(f"--delimiter or --quoting was given for the format {format!r}: only a 'table' has them")
    language = check_language(language)
    if format == "multi30k" and language != "en":
        raise UsageError(
            f"a language, {language!r}, was given for the format 'multi30k': its file names say the languages; select some"
        )
    location = locate(path)
    if kind_of(location) == "nothing":
        raise InputError(f"the source {location!r} does not exist: check the path")
    match format:
        case "multi30k":
            return Multi30kSource.open(location, ids=id_rule)
        case "karpathy":
            return KarpathySource.open(location, language=language, ids=id_rule)
        case "coco":
            return CocoSource.open(location, language=language, ids=id_rule)
        case "scan":
            return ScanSource.open(location, language=language)
        case _:
            return TableSource.open(location, language=language, columns=columns or {}, dialect=dialect)
