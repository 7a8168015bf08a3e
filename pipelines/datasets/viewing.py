"""``imagepivot view``: the regions or crops that the features of an image come from, drawn over the picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from PIL import Image

from pipelines.datasets.drawing import LabelledBox, draw_boxes
from pipelines.datasets.pictures import alike, decoded_pictures
from pipelines.datasets.region_names import RegionNames, named_regions
from pipelines.jobs import ViewJob
from schemas.dataset import Dataset, open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import file_at

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_CORNERS = ("top left", "top right", "bottom left", "bottom right", "centre")


def draw_view(job: ViewJob) -> str:
    """Draw what the features of an image come from: its regions, or the crops that the model saw.

    Args:
        job: the image and the drawing.

    Returns:
        A description of the drawing.

    Raises:
        UsageError: the file exists, or its name does not tell the format.
        InputError: the image is not in the dataset or not among the images, or is a different picture.
        DatasetError: the dataset does not say how it was made, or there is no bucket for the drawing.
    """
    folder, name = file_at(job.output)
    if PurePosixPath(name).suffix.lower() not in _FORMATS:
        raise UsageError(f"cannot tell the format of {job.output!r}, expected a name that ends in {', '.join(_FORMATS)}")
    dataset = open_dataset(job.dataset)
    folder.check_bucket()
    if not job.overwrite and folder.size(name) is not None:
        raise UsageError(f"{job.output!r} already exists: give --overwrite to replace it, or another name")
    if dataset.kind not in ("regions", "features"):
        raise DatasetError(f"{dataset.folder.location!r} holds {dataset.kind}, expected regions or features")
    row = _row(dataset, job.image_id)
    picture = decoded_pictures(job.open_images(), [job.image_id])[job.image_id]
    if dataset.kind == "regions":
        drawing, description = _draw_regions(dataset, row, picture, job.max_regions or None)
    else:
        drawing, description = _draw_crops(dataset, picture)
    with folder.replace(name) as file:
        drawing.save(file, _FORMATS[PurePosixPath(name).suffix.lower()])
    return f"{description} of {job.image_id!r}"


def center_crop_box(
    size_wh: tuple[int, int], *, resize_short: float, crop_wh: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return the box of a resized image's centre crop in the original image, accurate to about a pixel.

    Args:
        size_wh: width and height of the image.
        resize_short: pixels of its shorter side after resizing.
        crop_wh: width and height of the crop.

    Example:
        >>> center_crop_box((512, 600), resize_short=256, crop_wh=(224, 224))
        (32.0, 76.0, 480.0, 524.0)
    """
    width, height = size_wh
    scale = resize_short / min(size_wh)
    across, down = crop_wh[0] / scale, crop_wh[1] / scale
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


def _row(dataset: Dataset, image_id: str) -> dict[str, Any]:
    try:
        return dataset.get(image_id)
    except KeyError:
        pass
    place = f"image {image_id!r} is not in {dataset.folder.location!r}"
    failed = next((row for row in dataset.failures().to_pylist() if row["key"] == image_id), None)
    if failed is not None:
        raise InputError(f"{place}: it failed with {failed['reason']}, {failed['message']!r}")
    raise InputError(f"{place}{alike(image_id, dataset.image_ids())}")


def _draw_regions(
    dataset: Dataset, row: Mapping[str, Any], picture: Image.Image, max_regions: int | None
) -> tuple[Image.Image, str]:
    size_wh = (row["width"], row["height"])
    if all(size_wh) and size_wh != picture.size:
        raise InputError(
            f"image {row['image_id']!r} is {picture.width}×{picture.height} pixels, its regions are those of a picture of "
            f"{size_wh[0]}×{size_wh[1]}: give the images that the dataset was made of"
        )
    regions = named_regions(row, RegionNames.of(dataset))[:max_regions]
    boxes = [LabelledBox(region.xyxy, region.text, region.class_id) for region in regions]
    return draw_boxes(picture, boxes), f"{len(boxes)} region{'s' * (len(boxes) != 1)}"


def _draw_crops(dataset: Dataset, picture: Image.Image) -> tuple[Image.Image, str]:
    transform = FeaturesParameters.from_json(dataset.manifest.parameters).transform
    if transform is None:
        raise DatasetError(
            f"{dataset.folder.location!r} does not say what its features were made of: they were imported, and for a whole image "
            "there is nothing to draw"
        )
    try:
        return _draw_ten_crops(transform, picture) if transform.get("crops") == 10 else _draw_one_crop(transform, picture)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise DatasetError(
            f"{dataset.folder.location!r} states a transform of its images that cannot be drawn ({type(error).__name__}: {error}); "
            f"it is {dict(transform)!r}: was the manifest changed, or written by a newer version?"
        ) from error


def _draw_one_crop(transform: Mapping[str, Any], picture: Image.Image) -> tuple[Image.Image, str]:
    if "input_size" in transform:  # In the notation of timm.
        _, height, width = transform["input_size"]
        whole = transform.get("crop_mode", "center") != "center"
        short = min(width, height) // transform["crop_pct"]
    elif "resize_hw" in transform:
        height, width = transform["resize_hw"]
        whole, short = True, 0
    else:
        width = height = transform["crop"]
        whole, short = False, transform["resize_short"]
    box = (0, 0, *picture.size) if whole else center_crop_box(picture.size, resize_short=short, crop_wh=(width, height))
    label = f"{'whole image' if whole else 'centre crop'}, {width}x{height} for the model"
    return draw_boxes(picture, [LabelledBox(box, label)]), "the whole image" if whole else "the centre crop"


def _draw_ten_crops(transform: Mapping[str, Any], picture: Image.Image) -> tuple[Image.Image, str]:
    """Draw the crops over the resized picture. A mirrored crop gets a box of its own if it shows other columns."""
    from extractors.images.preprocessing import Preprocessing, resize, ten_crop_views

    known = {field.name: transform[field.name] for field in fields(Preprocessing)}
    resized = resize(picture, Preprocessing(**known))
    crop = transform["crop"]
    places: dict[tuple[int, int], list[str]] = {}
    for number, view in enumerate(ten_crop_views(resized.height, resized.width, crop=crop, center=transform["center"])):
        name = f"{number + 1} {_CORNERS[number % 5]}{' mirrored' if view.mirrored else ''}"
        places.setdefault((view.left, view.top), []).append(name)
    boxes = [
        LabelledBox((left, top, left + crop - 1, top + crop - 1), ", ".join(names), number)
        for number, ((left, top), names) in enumerate(places.items())
    ]
    return draw_boxes(resized, boxes), f"ten crops over the {resized.width}×{resized.height} pixels"
