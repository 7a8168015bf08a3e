"""WebDataset: tar files in which the files of a sample stand together and share their name up to the first dot."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.arrays import feature_column
from pipelines.exchange.exporters.captions import EVERYTHING, Choice, read_captions
from pipelines.exchange.exporters.staging import Staging
from pipelines.running.progress import Meter
from schemas.batches import shard_batches
from schemas.dataset import Dataset
from schemas.errors import DatasetError

__all__ = ["export_webdataset"]

_REGION_COLUMNS = (
    "width",
    "height",
    "num_regions",
    "class_ids",
    "class_scores",
    "attribute_ids",
    "attribute_scores",
)


def export_webdataset(
    dataset: Dataset,
    staging: Staging,
    *,
    captions: Dataset | None = None,
    choice: Choice = EVERYTHING,
    note: Callable[[str], None] = lambda text: None,
    meter: Meter = Meter(),
) -> list[Path]:
    """Writes ``part-00000.tar`` ..., one for each shard, with ``IMAGE_ID.feature.npy`` as stored; byte for byte the same always.

    Of regions there are ``IMAGE_ID.boxes.npy`` and ``IMAGE_ID.regions.json`` as well. With captions there is
    ``IMAGE_ID.captions.json``, a list, and only images that have a chosen caption are written.

    Args:
        dataset: features or regions.
        staging: the folder.
        captions: captions, if they are wanted.
        choice: which captions.
        note: takes a sentence about what was left out.
        meter: counts images.
    """
    feature_column(dataset)
    texts = None if captions is None else _by_image(read_captions(captions, choice, "text", "tokens"))
    names = [f"part-{number:05d}.tar" for number in range(dataset.num_shards)]
    left_out = 0
    with staging.files(names, obsolete="part-*.tar") as files:
        for path, number in zip(files, range(dataset.num_shards), strict=True):
            with path.open("wb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for row in _rows(dataset, number):
                    image_id = row["image_id"]
                    found = None if texts is None else texts(image_id)
                    if found is not None and not found:
                        left_out += 1
                        continue
                    for name, data in _sample(dataset, row, found):
                        info = tarfile.TarInfo(f"{image_id}.{name}")  # Its defaults: no time, no owner, mode 644.
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    meter.add(images=1)
    if left_out:
        note(f"{left_out:,} images without a chosen caption were left out")
    return staging.paths(names)


def _rows(dataset: Dataset, number: int) -> Iterator[dict[str, Any]]:
    spec = dataset.spec
    shapes = {"feature": spec.shape, "features": spec.shape, "boxes": (-1, 4)} if spec is not None else {}
    for batch in shard_batches(dataset, number):
        for position in range(batch.num_rows):
            row: dict[str, Any] = {}
            for column in batch.schema:
                value = batch.column(column.name)[position]
                vector = pa.types.is_fixed_size_list(column.type)
                row[column.name] = value.values.to_numpy(zero_copy_only=False) if vector else value.as_py()
                if column.name in shapes:
                    row[column.name] = row[column.name].reshape(shapes[column.name])
            if "." in row["image_id"] or str(PurePosixPath(row["image_id"])) != row["image_id"].lstrip("/"):
                raise DatasetError(
                    f"image id {row['image_id']!r} holds a dot or is no relative path: WebDataset ends the name of a sample at "
                    "the first dot, so that this layout cannot hold it"
                )
            yield row


def _sample(dataset: Dataset, row: dict[str, Any], captions: list[dict[str, Any]] | None) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files of an image, sorted by name."""
    if dataset.kind == "regions":
        yield "boxes.npy", _npy(row["boxes"])
    if captions is not None:
        yield "captions.json", _json(captions)
    yield "feature.npy", _npy(row[feature_column(dataset)])
    if dataset.kind == "regions":
        plain = {name: row[name].tolist() if isinstance(row[name], np.ndarray) else row[name] for name in _REGION_COLUMNS}
        yield "regions.json", _json(plain)


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    return file.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _by_image(captions: pa.Table) -> Callable[[str], list[dict[str, Any]]]:
    """Gives the captions of an image, without its id, in the order of their keys."""
    ids = captions["image_id"].combine_chunks()
    runs = pc.run_end_encode(ids)
    ends = runs.run_ends.to_numpy()
    starts = dict(zip(runs.values.to_pylist(), zip(np.concatenate([[0], ends[:-1]]), ends, strict=True), strict=True))
    rest = captions.drop_columns(["image_id"])

    def captions_of(image_id: str) -> list[dict[str, Any]]:
        start, end = starts.get(image_id, (0, 0))
        return rest.slice(start, end - start).to_pylist()

    return captions_of
