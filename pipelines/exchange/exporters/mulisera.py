"""Multi30K's own layout of features (``data/imgfeats``), which kadarakos/mulisera reads by file name and line number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipelines.exchange.exporters.arrays import check_images, rows_of, write_array, write_ids
from pipelines.exchange.exporters.base import Note, split_name
from pipelines.exchange.exporters.staging import Staging
from pipelines.exchange.image_lists import local_file, match_ids
from pipelines.exchange.sidecars import options_for
from pipelines.running.meter import Meter
from schemas.dataset import Dataset
from schemas.errors import DatasetError, UsageError
from schemas.storage.locations import local_path

__all__ = ["MuliseraLayout"]

_FEATURE = "resnet50-avgpool"


@dataclass(frozen=True)
class MuliseraLayout:
    """``SPLIT-resnet50-avgpool.npy``, float16 ``[N, D]``, rows in the order of Multi30K's ``image_splits/SPLIT.txt``.

    ``SPLIT-resnet50-avgpool.ids`` lists the image ids of the rows, for ``import``.

    Attributes:
        lists: lists of images, one per split; their file names without extension are the splits.
        split_names: pairs of a split's name here and in the layout; mulisera calls ``test_2016_flickr`` ``test_2016``.
        l2: divide each vector by its Euclidean norm.
    """

    format: ClassVar[str] = "mulisera"

    lists: tuple[str, ...] = ()
    split_names: tuple[tuple[str, str], ...] = ()
    l2: bool = False

    def write(
        self, dataset: Dataset, staging: Staging, *, meter: Meter = Meter(), note: Note = lambda text: None
    ) -> list[Path]:
        """Write two files per list; the dataset must hold features of one dimension."""
        if dataset.kind != "features" or dataset.spec is None or len(dataset.spec.shape) != 1:
            raise DatasetError(f"{dataset.folder.location!r} does not hold features [D], the only ones that mulisera reads")
        if not self.lists:
            raise UsageError("mulisera reads features by line number: give the lists with --lists, e.g. image_splits/train.txt")
        known = set(dataset.image_ids())
        orders = {
            split_name(local_path(location).stem, self.split_names): match_ids(local_file(location), known)
            for location in self.lists
        }
        if len(orders) != len(self.lists):
            raise UsageError("two of the lists are for the same split: give each split one list")
        for split, image_ids in orders.items():
            check_images(dataset, image_ids, wanted_by=f"split {split!r}", advice="take them out of the list")
        names = [f"{split}-{_FEATURE}.{extension}" for split in orders for extension in ("npy", "ids")]
        listed = {image_id for image_ids in orders.values() for image_id in image_ids}
        options = {name: options_for(listed, ids=list_) for name, list_ in zip(names[::2], names[1::2], strict=True)}
        with staging.files(names, options=options) as files:
            for array, list_, image_ids in zip(files[::2], files[1::2], orders.values(), strict=True):
                write_array(array, dataset, "feature", rows_of(image_ids), dtype="float16", l2=self.l2, meter=meter)
                write_ids(list_, image_ids)
        return staging.paths(names)
