"""npy arrays of features with a list of image ids, for anything that reads numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipelines.exchange.exporters.arrays import check_images, feature_column, rows_of, write_array, write_ids
from pipelines.exchange.exporters.base import Note
from pipelines.exchange.exporters.staging import Staging
from pipelines.exchange.image_lists import local_file, match_ids
from pipelines.exchange.sidecars import options_for
from pipelines.running.meter import Meter
from schemas.dataset import Dataset
from schemas.errors import UsageError

__all__ = ["NpyLayout"]


@dataclass(frozen=True)
class NpyLayout:
    """``features.npy`` as stored and ``ids.txt``; for regions also ``boxes.npy`` and ``sizes.npy`` (width, height).

    ``features.import.json`` holds the options that ``import`` needs, see `pipelines.exchange.sidecars`.

    Attributes:
        lists: at most one text file with image ids or file names, for the order of the rows; the dataset's own order when empty.
        l2: divide each vector by its Euclidean norm.
    """

    format: ClassVar[str] = "npy"

    lists: tuple[str, ...] = ()
    l2: bool = False

    def __post_init__(self) -> None:
        if len(self.lists) > 1:
            raise UsageError(f"npy takes one list for the order of the rows, found {len(self.lists)}")

    def write(
        self, dataset: Dataset, staging: Staging, *, meter: Meter = Meter(), note: Note = lambda text: None
    ) -> list[Path]:
        """Write two files, or four for regions."""
        column = feature_column(dataset)
        image_ids = dataset.image_ids()
        if self.lists:
            image_ids = match_ids(local_file(self.lists[0]), set(image_ids))
            check_images(dataset, image_ids, wanted_by=repr(self.lists[0]), advice="take them out of the list")
        rows = rows_of(image_ids)
        dtype = dataset.spec.dtype if dataset.spec is not None else "float32"
        names = ["features.npy", "ids.txt", *(["boxes.npy", "sizes.npy"] if dataset.kind == "regions" else [])]
        regions = dataset.spec.shape[0] if dataset.kind == "regions" and dataset.spec is not None else None
        options = options_for(image_ids, regions=regions, ids="ids.txt")
        if regions is not None:
            options |= {"boxes": "boxes.npy", "sizes": "sizes.npy"}
        with staging.files(names, options={"features.npy": options}) as files:
            write_array(files[0], dataset, column, rows, dtype=dtype, l2=self.l2, meter=meter)
            write_ids(files[1], image_ids)
            if dataset.kind == "regions":
                write_array(files[2], dataset, "boxes", rows, dtype="float32")
                write_array(files[3], dataset, "sizes", rows, dtype="int32")
        return staging.paths(names)
