"""Files of captions and archives of images, written as they are given; captions are read whole."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.inputs.captions import EVERYTHING, CaptionSource, RawCaption, Selection


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and its folders; a ``.gz`` is compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


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
