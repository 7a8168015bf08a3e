"""Collections of images: folders, tables, tars and Parquet files."""

from pipelines.inputs.ids import IdRule
from pipelines.inputs.images.archives import ImagesInParquet, ImagesInTars
from pipelines.inputs.images.base import EXTENSIONS, ImageRef, ImageSource, SkippedFiles
from pipelines.inputs.images.folders import ImagesInFolder, ImageTable
from pipelines.inputs.images.listing import KeptRefs, Listing, SharedRefs, digest_of, kept_refs, sum_digests
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.images.staged_images import COPIES_SCHEMA, CopiedImages, Copies, Copy

__all__ = [
    "COPIES_SCHEMA",
    "EXTENSIONS",
    "CopiedImages",
    "Copies",
    "Copy",
    "IdRule",
    "ImageRef",
    "ImageSource",
    "ImageTable",
    "ImagesInFolder",
    "ImagesInParquet",
    "ImagesInTars",
    "KeptRefs",
    "Listing",
    "SharedRefs",
    "SkippedFiles",
    "digest_of",
    "kept_refs",
    "open_images",
    "sum_digests",
]
