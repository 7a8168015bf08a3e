"""Report of datasets, a chapter for each."""

from collections.abc import Iterator, Mapping, Sequence

from pipelines.datasets.inspection import describe_dataset, statistics_tables
from pipelines.looking.captions import describe_captions
from pipelines.looking.exhibits import Photos
from pipelines.looking.features import describe_duplicates, describe_failures, describe_features
from pipelines.looking.pages import Block, Chapter
from schemas.dataset import Dataset
from schemas.duplicates import Duplicate
from schemas.parameters import untrained_remark

_OF_IMAGES = ("features", "regions")


def dataset_chapters(datasets: Sequence[Dataset], photos: Photos) -> Iterator[Chapter]:
    """Yield a chapter for each dataset.

    Captions are compared with the images of the other datasets and of ``photos``.
    """
    vocabulary = next((dataset.vocabulary() for dataset in datasets if dataset.kind == "vocabulary"), None)
    images: Mapping[str, Sequence[str]] = {
        dataset.folder.location: dataset.image_ids() for dataset in datasets if dataset.kind in _OF_IMAGES
    }
    if photos.source is not None:
        images = {**images, photos.source.location: list(photos.refs)}
    for dataset in datasets:
        blocks: list[Block] = []
        remarks: list[str] = []
        if dataset.kind == "captions":
            blocks, remarks = describe_captions(dataset, photos, vocabulary, images)
        elif dataset.kind in _OF_IMAGES:
            blocks, remarks = describe_features(dataset, photos)
        else:
            blocks = [*statistics_tables(dataset.manifest)]
        if remark := untrained_remark(dataset.untrained):
            remarks = [remark, *remarks]
        overview = describe_dataset(dataset, rows=0)[0]
        yield Chapter(
            f"{dataset.kind}: {dataset.folder.location}",
            [*blocks, *describe_failures(dataset, photos), overview],
            remarks,
        )


def duplicates_chapter(location: str, duplicates: Sequence[Duplicate], photos: Photos) -> Chapter:
    """Return a chapter about a list of duplicates."""
    return Chapter(f"duplicates: {location}", describe_duplicates(duplicates, photos))
