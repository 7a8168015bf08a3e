"""The tsv files of bottom-up-attention and of its PyTorch port."""

import base64
from collections.abc import Sequence

import pyarrow as pa

from pipelines.exchange.exporters.base import Staging, options_for
from pipelines.exchange.jobs import ExportJob
from schemas.dataset import Dataset, check_kind
from schemas.errors import DatasetError

BOTTOM_UP = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
"""Columns as peteanderson80/bottom-up-attention writes them."""

LXMERT = ("img_id", "img_h", "img_w", "objects_id", "objects_conf", "attrs_id", "attrs_conf", "num_boxes", "boxes", "features")
"""Columns as airsplay/lxmert and airsplay/py-bottom-up-attention write them, and LXMERT reads them. Height comes before width.

Their ids of classes and attributes count from 0, without background and none; those of the kind ``regions`` count from 1.
"""

_COLUMNS = {"bottom-up": BOTTOM_UP, "lxmert": LXMERT}
_BATCH_ROWS = 32
ARRAYS = {
    "boxes": ("boxes", "<f4"),
    "features": ("features", "<f4"),
    "objects_id": ("class_ids", "<i8"),
    "objects_conf": ("class_scores", "<f4"),
    "attrs_id": ("attribute_ids", "<i8"),
    "attrs_conf": ("attribute_scores", "<f4"),
}
"""Our column and its type in the file, by the column in the file."""

_FROM_ZERO = ("objects_id", "attrs_id")
_NUMBERS = {"image_w": "width", "image_h": "height", "img_w": "width", "img_h": "height", "num_boxes": "num_regions"}


def write_tsv(job: ExportJob, dataset: Dataset, staging: Staging) -> None:
    """Write ``regions.tsv`` with the used regions of each image."""
    check_kind(dataset, "regions")  # A tsv holds boxes.
    options = options_for(dataset.image_ids(), regions=dataset.shape_of("features")[0])
    with staging.files(["regions.tsv"], options={"regions.tsv": options}) as (path,), path.open("wb") as file:
        for batch in dataset.batches(batch_size=_BATCH_ROWS):
            for row in range(batch.num_rows):
                file.write(_tsv_line(batch, row, _COLUMNS[job.columns]))
            staging.meter.add(images=batch.num_rows)


def _tsv_line(batch: pa.RecordBatch, row: int, columns: Sequence[str]) -> bytes:
    regions = batch.column("num_regions")[row].as_py()
    fields = []
    for name in columns:
        if name in ARRAYS:
            ours, dtype = ARRAYS[name]
            column = batch.column(ours)
            values = column[row].values.to_numpy(zero_copy_only=False)
            if name in _FROM_ZERO:
                values = values - 1  # No attribute becomes -1, the label that LXMERT's loss ignores.
            width = len(values) // batch.schema.field("class_ids").type.list_size
            fields.append(base64.b64encode(values[: regions * width].astype(dtype).tobytes()))
        elif name in _NUMBERS:
            fields.append(str(batch.column(_NUMBERS[name])[row].as_py()).encode())
        else:
            image_id = batch.column("image_id")[row].as_py()
            if not image_id or any(character in image_id for character in '\t\r\n"'):
                flaw = "holds a tab, a line break or a quote" if image_id else "is empty"
                raise DatasetError(f"image id {image_id!r} {flaw}: a tsv cannot hold it")
            fields.append(image_id.encode())
    return b"\t".join(fields) + b"\n"
