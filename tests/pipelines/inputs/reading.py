"""Files of captions and archives of images, written as they are given; captions are read whole."""

from __future__ import annotations

import csv
import gzip
import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.captions.base import EVERYTHING, CaptionSource, RawCaption, Selection


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and its folders; a ``.gz`` is compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows of the same columns with the standard tools of each format; a ``.gz`` is compressed."""
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=100)
        return path
    text = io.StringIO(newline="")
    if kind in ("csv", "tsv"):
        writer = csv.writer(text, delimiter="," if kind == "csv" else "\t", lineterminator="\r\n" if kind == "csv" else "\n")
        writer.writerows([rows[0], *(row.values() for row in rows)])
    else:
        text.writelines(json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for number, row in enumerate(rows))
    return write(path, text.getvalue())


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], form: int = tarfile.USTAR_FORMAT) -> Path:
    """Write a tar; a member whose name ends in ``/`` is a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return path


def write_structs(path: Path, rows: Iterable[tuple[bytes, str | None]]) -> Path:
    """Write bytes and path of images as Hugging Face does, without a column of ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = pa.array([{"bytes": data, "path": name} for data, name in rows], kind)
    pq.write_table(pa.table({"image": values, "label": [0] * len(values)}), path, row_group_size=2)
    return path


def read(source: CaptionSource, selection: Selection = EVERYTHING) -> list[RawCaption]:
    return [row for part in source.parts(selection) for row in source.read(part, selection)]
