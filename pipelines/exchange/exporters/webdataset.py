"""WebDataset tar files; files of a sample share their name up to the first dot."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.exchange.exporters.arrays import feature_column
from pipelines.exchange.exporters.base import Staging, read_selected_captions
from pipelines.exchange.jobs import ExportJob
from schemas.dataset import Dataset, dicts_of_rows
from schemas.errors import DatasetError
from schemas.escapes import counted
from schemas.keys import normalization_hint

NUMBERS = ("width", "height", "num_regions")
LABELS = ("class_ids", "class_scores", "attribute_ids", "attribute_scores")


def write_webdataset(job: ExportJob, dataset: Dataset, staging: Staging) -> None:
    """Write one ``part-00000.tar`` ... per shard, with ``IMAGE_ID.feature.npy``.

    Features are written as stored, always as the same bytes. Regions also have ``IMAGE_ID.boxes.npy`` and
    ``IMAGE_ID.regions.json``. With captions, images also have ``IMAGE_ID.captions.json``, a list, and images
    without a chosen caption are skipped.
    """
    feature_column(dataset)
    captions = read_selected_captions(job, "text", "tokens") if job.captions else None
    captions_of = None if captions is None else _by_image(captions)
    names = [f"part-{shard:05d}.tar" for shard in range(dataset.num_shards)]
    skipped, num_images = [], 0
    with staging.files(names, obsolete="part-*.tar") as files:
        for shard, path in enumerate(files):
            with path.open("wb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
                for row in _sample_rows(dataset, shard):
                    image_captions = None if captions_of is None else captions_of(row["image_id"])
                    if image_captions == []:
                        skipped.append(row["image_id"])
                        continue
                    for name, data in _sample_files(dataset, row, image_captions):
                        info = tarfile.TarInfo(f"{row['image_id']}.{name}")  # Its defaults: no time, no owner, mode 644.
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
                    num_images += 1
                    staging.meter.add(images=1)
    if captions is not None and (missing := pc.count_distinct(captions["image_id"]).as_py() - num_images):
        staging.on_warning(
            f"skipped {counted(missing, 'image')} with a chosen caption and without a row in {dataset.folder.location!r}"
        )
    if captions is not None and skipped:
        hint = normalization_hint(skipped, pc.unique(captions["image_id"]).to_pylist())
        staging.on_warning(f"skipped {counted(len(skipped), 'image')} without a chosen caption{hint and f': {hint}'}")


def _sample_rows(dataset: Dataset, shard: int) -> Iterator[dict[str, Any]]:
    for batch in dataset.shard_batches(shard):
        for row in dicts_of_rows(pa.Table.from_batches([batch]), dataset.spec):
            *folders, name = row["image_id"].split("/")
            if "" in (*folders, name) or {".", ".."} & set(folders) or "." in name:
                raise DatasetError(
                    f"image id {row['image_id']!r} holds a dot or is not a relative path: WebDataset ends the name of a sample at "
                    "the first dot behind its last slash, so that this layout cannot hold it"
                )
            yield row


def _sample_files(dataset: Dataset, row: dict[str, Any], captions: list[dict[str, Any]] | None) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of the files of an image, sorted by name."""
    has_regions = dataset.kind == "regions"
    if has_regions:
        yield "boxes.npy", _npy(row["boxes"])
    if captions is not None:
        yield "captions.json", _json(captions)
    yield "feature.npy", _npy(row[feature_column(dataset)])
    if has_regions:
        yield "regions.json", _json({name: row[name] for name in NUMBERS} | {name: row[name].tolist() for name in LABELS})


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(values), allow_pickle=False)
    return file.getvalue()


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _by_image(captions: pa.Table) -> Callable[[str], list[dict[str, Any]]]:
    """Return a function that looks captions up by image id."""
    runs = pc.run_end_encode(captions["image_id"].combine_chunks())
    ends = runs.run_ends.to_numpy()
    ranges = dict(zip(runs.values.to_pylist(), zip(np.concatenate([[0], ends[:-1]]), ends, strict=True), strict=True))
    columns = captions.drop_columns(["image_id"])

    def captions_of(image_id: str) -> list[dict[str, Any]]:
        start, end = ranges.get(image_id, (0, 0))
        return columns.slice(start, end - start).to_pylist()

    return captions_of
