"""Files of captions, written as they are given and read whole."""

from __future__ import annotations

import gzip
from pathlib import Path

from pipelines.inputs.captions import EVERYTHING, CaptionSource, RawCaption, Selection


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, and its folders; a ``.gz`` is compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def read(source: CaptionSource, selection: Selection = EVERYTHING) -> list[RawCaption]:
    return [row for part in source.parts(selection) for row in source.read(part, selection)]
