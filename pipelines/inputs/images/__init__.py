"""Collections of images: folders, tables, tars and Parquet files."""

from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.inputs.images.folders import ImagesInFolder
from pipelines.inputs.images.listing import CachedListing, Listing, SharedListing, digest_of, read_listing
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.images.staged_images import STAGED_SCHEMA, StagedImage, StagedImages, StagingArea

__all__ = [
    "STAGED_SCHEMA",
    "CachedListing",
    "ImageRef",
    "ImageSource",
    "ImagesInFolder",
    "ImagesInParquet",
    "Listing",
    "SharedListing",
    "StagedImage",
    "StagedImages",
    "StagingArea",
    "digest_of",
    "open_images",
    "read_listing",
]
