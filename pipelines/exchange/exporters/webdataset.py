"""WebDataset: tar files in which the files of a sample are adjacent and share their name up to the first dot."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.arrays import feature_column
from pipelines.exchange.exporters.base import Staging, read_captions
from pipelines.exchange.jobs import ExportJob
from schemas.dataset import Dataset
from schemas.errors import DatasetError
from schemas.keys import normalization_hint

_NUMBERS = ("width", "height", "num_regions")
_LABELS = ("class_ids", "class_scores", "attribute_ids", "attribute_scores")


def write_webdataset(job: ExportJob, dataset: Dataset, staging: Staging) -> list[Path]:
    """Write ``part-00000.tar`` ..., one per shard, with ``IMAGE_ID.feature.npy`` as stored; always the same bytes.

    Regions have ``IMAGE_ID.boxes.npy`` and ``IMAGE_ID.regions.json`` as well. With captions there is
    ``IMAGE_ID.captions.json``, a list, and only images that have a chosen caption are written.
    """
    feature_column(dataset)
    captions = read_captions(job, "text", "tokens") if job.captions else None
    captions_of = None if captions is None else _by_image(captions)
    names = [f"part-{number:05d}.tar" for number in range(dataset.num_shards)]
    left_out, num_images = [], 0
    with staging.files(names, obsolete="part-*.tar") as files:
        for path, number in zip(files, range(dataset.num_shards), strict=True):
            with path.open("wb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for row in _rows(dataset, number):
                    of_image = None if captions_of is None else captions_of(row["image_id"])
                    if captions_of is not None and not of_image:
                        left_out.append(row["image_id"])
                        continue
                    for name, data in _sample(dataset, row, of_image):
                        info = tarfile.TarInfo(f"{row['image_id']}.{name}")  # Its defaults: no time, no owner, mode 644.
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    num_images += 1
                    staging.meter.add(images=1)
    if captions is not None and (missing := pc.count_distinct(captions["image_id"]).as_py() - num_images):
        staging.note(f"{missing:,} images with a chosen caption have no row in {dataset.folder.location!r}: they were left out")
    if captions is not None and left_out:
        hint = normalization_hint(left_out, pc.unique(captions["image_id"]).to_pylist())
        staging.note(f"{len(left_out):,} images without a chosen caption were left out{hint and f': {hint}'}")
    return staging.paths(names)


def _rows(dataset: Dataset, number: int) -> Iterator[dict[str, Any]]:
    spec = dataset.spec
    shapes = {"feature": spec.shape, "features": spec.shape, "boxes": (-1, 4)} if spec is not None else {}
    for batch in dataset.shard_batches(number):
        for position in range(batch.num_rows):
            row: dict[str, Any] = {}
            for column in batch.schema:
                value = batch.column(column.name)[position]
                vector = pa.types.is_fixed_size_list(column.type)
                row[column.name] = value.values.to_numpy(zero_copy_only=False) if vector else value.as_py()
                if column.name in shapes:
                    row[column.name] = row[column.name].reshape(shapes[column.name])
            if not _is_sample_name(row["image_id"]):
                raise DatasetError(
                    f"image id {row['image_id']!r} holds a dot or is not a relative path: WebDataset ends the name of a sample at "
                    "the first dot behind its last slash, so that this layout cannot hold it"
                )
            yield row


def _is_sample_name(image_id: str) -> bool:
    """Return True for a path below the folder of the reader, whose last component has no dot."""
    *folders, name = image_id.split("/")
    return "" not in (*folders, name) and not {".", ".."} & set(folders) and "." not in name


def _sample(dataset: Dataset, row: dict[str, Any], captions: list[dict[str, Any]] | None) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files of an image, sorted by name."""
    if dataset.kind == "regions":
        yield "boxes.npy", _npy(row["boxes"])
    if captions is not None:
        yield "captions.json", _json(captions)
    yield "feature.npy", _npy(row[feature_column(dataset)])
    if dataset.kind == "regions":
        plain = {name: row[name] for name in _NUMBERS} | {name: row[name].tolist() for name in _LABELS}
        yield "regions.json", _json(plain)


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    return file.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _by_image(captions: pa.Table) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that finds the captions of an image, without its id, in the order of their keys."""
    ids = captions["image_id"].combine_chunks()
    runs = pc.run_end_encode(ids)
    ends = runs.run_ends.to_numpy()
    starts = dict(zip(runs.values.to_pylist(), zip(np.concatenate([[0], ends[:-1]]), ends, strict=True), strict=True))
    rest = captions.drop_columns(["image_id"])

    def captions_of(image_id: str) -> list[dict[str, Any]]:
        start, end = starts.get(image_id, (0, 0))
        return rest.slice(start, end - start).to_pylist()

    return captions_of
