"""npy arrays of features, also in Multi30K's layout (``data/imgfeats``).

Arrays are written row by row and never held in memory. kadarakos/mulisera reads those of Multi30K by file name and line number.

Shapes: ``N`` rows, ``R`` regions, ``D`` values.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipelines.exchange.exporters.base import Staging, options_for
from pipelines.exchange.image_lists import local_file, match_ids
from pipelines.exchange.jobs import ExportJob
from pipelines.running.meter import Meter
from pipelines.running.process_pool import by_key
from schemas.dataset import Dataset, check_kind
from schemas.errors import DatasetError, UsageError
from schemas.keys import normalization_hint
from schemas.kinds import numpy_type
from schemas.storage.locations import local_path
from schemas.text import MARK

_BATCH_BYTES = 8 << 20
_MULISERA = "resnet50-avgpool"


def write_npy(job: ExportJob, dataset: Dataset, staging: Staging) -> None:
    """Write ``features.npy`` as stored and ``ids.txt``.

    Regions also have ``boxes.npy`` and ``sizes.npy`` (width, height). ``features.import.json`` holds the
    options that ``import`` needs, see `pipelines.exchange.exporters.base`.
    """
    column = feature_column(dataset)
    image_ids = dataset.image_ids()
    if job.lists:
        image_ids = match_ids(local_file(job.lists[0]), set(image_ids))
        check_images(dataset, image_ids, wanted_by=repr(job.lists[0]), advice="take them out of the list")
    rows = rows_of(image_ids)
    dtype = numpy_type(dataset.schema.field(column).type).name
    names, regions = ["features.npy", "ids.txt"], None
    if dataset.kind == "regions":
        names, regions = [*names, "boxes.npy", "sizes.npy"], dataset.shape_of(column)[0]
    options = options_for(image_ids, regions=regions, ids="ids.txt")
    if regions is not None:
        options |= {"boxes": "boxes.npy", "sizes": "sizes.npy"}
    with staging.files(names, options={"features.npy": options}) as files:
        write_array(files[0], dataset, [column], rows, dtype=dtype, l2=job.l2, meter=staging.meter)
        write_ids(files[1], image_ids)
        if regions is not None:
            write_array(files[2], dataset, ["boxes"], rows, dtype="float32")
            write_array(files[3], dataset, ["width", "height"], rows, dtype="int32")


def write_mulisera(job: ExportJob, dataset: Dataset, staging: Staging) -> None:
    """Write ``SPLIT-resnet50-avgpool.npy``, float16 ``[N, D]``, and ``.ids``.

    The rows follow a list of Multi30K for each split, e.g. ``image_splits/SPLIT.txt``; ``.ids`` holds their image ids.
    """
    if dataset.kind != "features" or len(dataset.shape_of("feature")) != 1:
        raise DatasetError(f"{dataset.folder.location!r} does not hold features [D], the only ones that mulisera reads")
    image_ids = set(dataset.image_ids())
    orders = {}
    for location in job.lists:
        split = local_path(location).stem
        orders[job.split_names.get(split, split)] = match_ids(local_file(location), image_ids)
    if len(orders) != len(job.lists):
        raise UsageError("two of the lists are for the same split: give each split one list")
    for split, order in orders.items():
        check_images(dataset, order, wanted_by=f"split {split!r}", advice="take them out of the list")
    names = [f"{split}-{_MULISERA}.{extension}" for split in orders for extension in ("npy", "ids")]
    listed = {image_id for order in orders.values() for image_id in order}
    options = {name: options_for(listed, ids=list_) for name, list_ in zip(names[::2], names[1::2], strict=True)}
    with staging.files(names, options=options) as files:
        for array, list_, order in zip(files[::2], files[1::2], orders.values(), strict=True):
            write_array(array, dataset, ["feature"], rows_of(order), dtype="float16", l2=job.l2, meter=staging.meter)
            write_ids(list_, order)


def feature_column(dataset: Dataset) -> str:
    """Return the name of the column with the features.

    Raises:
        DatasetError: the dataset has none.
    """
    check_kind(dataset, "features", "regions")
    return "feature" if dataset.kind == "features" else "features"


def rows_of(image_ids: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows of an array by image id; an image may be listed several times."""
    return by_key((image_id, row) for row, image_id in enumerate(image_ids))


def check_images(dataset: Dataset, image_ids: Iterable[str], *, wanted_by: str, advice: str) -> None:
    """Check that a dataset has a row for each image of a list or split.

    Raises:
        DatasetError: rows are missing; the message has their number, the first ids and the advice.
    """
    wanted, present = set(image_ids), dataset.image_ids()
    missing = sorted(wanted - set(present))
    if missing:
        hint = normalization_hint(missing, present) or f"extract their features first, or {advice}"
        raise DatasetError(
            f"{len(missing):,} of {len(wanted):,} images of {wanted_by} have no row in "
            f"{dataset.folder.location!r}, e.g. {', '.join(map(repr, missing[:5]))}: {hint}"
        )


def write_ids(path: Path, image_ids: Sequence[str]) -> None:
    """Write image ids, one per line.

    Raises:
        DatasetError: an id is empty or contains a line break.
    """
    broken = next((image_id for image_id in image_ids if not image_id or "\n" in image_id or "\r" in image_id), None)
    if broken is not None:
        flaw = "contains a line break" if broken else "is empty"
        raise DatasetError(f"image id {broken!r} {flaw}: this layout lists one id per line and cannot hold it")
    write_lines(path, image_ids)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines that `schemas.text` reads back unchanged."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for index, line in enumerate(lines):
            if index == 0 and line.startswith(MARK):
                file.write(MARK)  # Readers take the first as the byte order mark of the file.
            file.write(f"{line}\n")


def write_array(
    path: Path,
    dataset: Dataset,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[int]],
    *,
    dtype: str,
    l2: bool = False,
    meter: Meter = Meter(),
) -> None:
    """Write a column of vectors, or columns of numbers, as an npy array.

    The rows of the array by image id are those of `rows_of`. With ``l2``, each vector is divided by its
    Euclidean norm over the last axis; a zero vector stays zero.

    Raises:
        DatasetError: a value is too large for the type.
    """
    shape = dataset.shape_of(columns[0]) or (len(columns),)
    row_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False}
    with path.open("wb") as file:
        count = sum(len(numbers) for numbers in rows.values())
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (count, *shape)})
        start = file.tell()
        for batch in dataset.batches(["image_id", *columns], batch_size=max(1, _BATCH_BYTES // row_bytes)):
            image_ids = batch.column("image_id").to_pylist()
            wanted = [index for index, image_id in enumerate(image_ids) if image_id in rows]
            if wanted:
                taken = pa.Table.from_batches([batch]).take(wanted)
                values = np.stack([np.asarray(dataset.values(taken[name], name)) for name in columns], axis=-1)
                values = values.reshape(len(wanted), *shape)
                converted = _cast(values, dtype, l2=l2, image_ids=[image_ids[index] for index in wanted])
                for index, values_of_row in zip(wanted, converted, strict=True):
                    for row in rows[image_ids[index]]:
                        file.seek(start + row * row_bytes)
                        file.write(values_of_row.tobytes())
            meter.add(images=len(wanted))


def _cast(values: np.ndarray, dtype: str, *, l2: bool, image_ids: Sequence[str]) -> np.ndarray:
    if l2:
        values = values.astype(np.float32)
        norms = np.sqrt(np.einsum("...d,...d->...", values, values))[..., np.newaxis]
        values = values / np.where(norms > 0, norms, 1)
    with np.errstate(over="ignore"):
        converted = values.astype(dtype, copy=False)
    bad = ~np.isfinite(converted).reshape(len(converted), -1).all(axis=1)
    if bad.any():
        raise DatasetError(
            f"a value of image {image_ids[int(bad.argmax())]!r} is too large for {dtype}: export another layout, or with --l2"
        )
    return converted
