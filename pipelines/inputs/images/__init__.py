"""Collections of images: folders, tables, tars and Parquet files."""

from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.inputs.images.listing import KeptRefs, Listing, SharedRefs, digest_of, kept_refs
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.images.staged_images import COPIES_SCHEMA, CopiedImages, Copies, Copy

__all__ = [
    "COPIES_SCHEMA",
    "CopiedImages",
    "Copies",
    "Copy",
    "ImageRef",
    "ImageSource",
    "ImagesInFolder",
    "ImagesInParquet",
    "KeptRefs",
    "Listing",
    "SharedRefs",
    "digest_of",
    "kept_refs",
    "open_images",
]
