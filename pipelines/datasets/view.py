"""``imagepivot view``: visualization of regions or crops of an image.

matplotlib, of the extra train, draws the boxes and is loaded only for them.
"""

from __future__ import annotations

import colorsys
import difflib
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from PIL import ExifTags, Image

import extractors
from pipelines.datasets.region_names import RegionNames, named_regions
from pipelines.inputs.images.base import ImageSource
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import ViewJob
from schemas.dataset import Dataset, check_kind, open_dataset
from schemas.drawing.fonts import draw_with_fonts
from schemas.errors import DatasetError, InputError, UsageError
from schemas.escapes import escape_text
from schemas.keys import normalization_hint
from schemas.options import takes_fields
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import file_at

if TYPE_CHECKING:
    from schemas.drawing.style import Figure

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
_PAGES = (".pdf", ".svg")
_CORNERS = ("top left", "top right", "bottom left", "bottom right", "centre")
_MIN_SIDE = 800  # Smaller pictures are enlarged to this many pixels on their longer side, so that labels are readable.
_MAX_SIDE = 2**16 - 1  # Longest side of a canvas of matplotlib.
_FONT_SIZE = 6  # Points of a label in a picture as wide as a column.
_PAD = 2  # Pixels around the text of a label.
_REACH = 20  # Greatest distance of a label and its box, in heights of the label.
_SOFTWARE = "imagepivot view"  # In the bytes of our pictures, as Exif tag or creator: --overwrite replaces no other file.
_GOLDEN_RATIO = (5**0.5 - 1) / 2


@takes_fields(ViewJob)
def draw_view(job: ViewJob) -> str:
    """Draw the regions or crops of an image over its picture; return a description.

    Raises:
        UsageError: the file exists, or its name has no known extension.
        InputError: the image is not in the dataset or not among the images, or is a different picture.
        DatasetError: the dataset has no transform, or the bucket for the drawing is missing.
    """
    folder, name = file_at(job.output)
    extension = PurePosixPath(name).suffix.lower()
    if extension not in (*_FORMATS, *_PAGES):
        known = ", ".join((*_FORMATS, *_PAGES))
        raise UsageError(f"cannot tell the format of {job.output!r}, expected a name that ends in {known}")
    dataset = open_dataset(job.dataset)
    folder.check_writable()
    if folder.stat(name) is not None:
        if not job.overwrite:
            raise UsageError(f"{job.output!r} already exists: give --overwrite to replace it, or another name")
        if _SOFTWARE.encode() not in folder.read(name):
            raise UsageError(
                f"{job.output!r} is not a picture of imagepivot view: choose another name, or delete the file first"
            )
    check_kind(dataset, "features", "regions")
    row = _row_of_image(dataset, job.image_id)
    picture = decoded_pictures(job.reading.open(job.images), [job.image_id])[job.image_id]
    if dataset.kind == "regions":
        drawing, description = _labelled_regions(dataset, row, picture, job.max_regions or None)
    else:
        drawing, description = _labelled_crops(dataset, picture)
    data = io.BytesIO()
    if extension in _PAGES:
        data.write(draw_page(*drawing, extension[1:]))
    else:
        exif = Image.Exif()
        exif[ExifTags.Base.Software] = _SOFTWARE
        draw_boxes(*drawing).save(data, _FORMATS[extension], exif=exif)
    folder.put(name, data.getvalue())
    return f"{description} of {job.image_id!r}"


def center_crop_box(
    size_wh: tuple[int, int], *, resize_short: float, crop_wh: tuple[int, int]
) -> tuple[float, float, float, float]:
    """Return a resized image's centre crop in the original image, to about a pixel.

    Example:
        >>> center_crop_box((512, 600), resize_short=256, crop_wh=(224, 224))
        (32.0, 76.0, 480.0, 524.0)
    """
    width, height = size_wh
    scale = resize_short / min(size_wh)
    across, down = crop_wh[0] / scale, crop_wh[1] / scale
    return (width - across) / 2, (height - down) / 2, (width + across) / 2, (height + down) / 2


def _row_of_image(dataset: Dataset, image_id: str) -> dict[str, Any]:
    try:
        return dataset.get(image_id)
    except KeyError:
        problem = f"image {image_id!r} is not in {dataset.folder.location!r}"
    for row in dataset.failures().to_pylist():
        if row["key"] == image_id:
            raise InputError(f"{problem}: it failed with {row['reason']}, {row['message']!r}")
    raise InputError(f"{problem}{_suggest_ids(image_id, dataset.image_ids())}")


def _labelled_regions(
    dataset: Dataset, row: Mapping[str, Any], picture: Image.Image, max_regions: int | None
) -> tuple[_Drawing, str]:
    size_wh = (row["width"], row["height"])
    if all(size_wh) and size_wh != picture.size:
        raise InputError(
            f"image {row['image_id']!r} is {picture.width}×{picture.height} pixels, its regions are those "
            f"of a picture of {size_wh[0]}×{size_wh[1]}: give the images that the dataset was made of"
        )
    regions = named_regions(row, RegionNames.of(dataset))[:max_regions]
    boxes = [LabelledBox(region.xyxy, region.text, index) for index, region in enumerate(regions)]
    return (picture, boxes), f"{len(boxes)} region{'s' * (len(boxes) != 1)}"


def _labelled_crops(dataset: Dataset, picture: Image.Image) -> tuple[_Drawing, str]:
    transform = FeaturesParameters.from_json(dataset.manifest.parameters).transform
    if transform is None:
        raise DatasetError(f"{dataset.folder.location!r} has imported features without a transform: there are no crops to draw")
    try:
        return (_ten_crops if transform.get("crops") == 10 else _one_crop)(transform, picture)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError) as error:
        raise DatasetError(
            f"the transform of {dataset.folder.location!r} cannot be drawn ({type(error).__name__}: "
            f"{error}); it is {dict(transform)!r}: was the manifest changed, or written by a newer version?"
        ) from error


def _one_crop(transform: Mapping[str, Any], picture: Image.Image) -> tuple[_Drawing, str]:
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
    return (picture, [LabelledBox(box, label)]), "the whole image" if whole else "the centre crop"


def _ten_crops(transform: Mapping[str, Any], picture: Image.Image) -> tuple[_Drawing, str]:
    """Return the resized picture and its crops; crops of equal corners share a box."""
    from extractors.images.preprocessing import Preprocessing, resize, ten_crop_views

    resized = resize(picture, Preprocessing(**{field.name: transform[field.name] for field in fields(Preprocessing)}))
    crop = transform["crop"]
    names_by_corner: dict[tuple[int, int], list[str]] = {}
    for index, view in enumerate(ten_crop_views(resized.height, resized.width, crop=crop, center=transform["center"])):
        name = f"{index + 1} {_CORNERS[index % 5]}{' mirrored' if view.mirrored else ''}"
        names_by_corner.setdefault((view.left, view.top), []).append(name)
    boxes = [
        LabelledBox((left, top, left + crop - 1, top + crop - 1), ", ".join(names), index)
        for index, ((left, top), names) in enumerate(names_by_corner.items())
    ]
    return (resized, boxes), f"ten crops over the {resized.width}×{resized.height} pixels"


class LabelledBox(NamedTuple):
    """A box in pixels with a label; the boxes of a group have the same colour."""

    xyxy: tuple[float, float, float, float]
    label: str
    group: int = 0


def colour_of(group: int) -> tuple[int, int, int]:
    """Return a colour; by the golden ratio, hues of successive groups are far apart."""
    red, green, blue = colorsys.hsv_to_rgb(group * _GOLDEN_RATIO % 1, 0.8, 0.95)
    return round(red * 255), round(green * 255), round(blue * 255)


_Drawing: TypeAlias = tuple[Image.Image, Sequence[LabelledBox]]


def draw_boxes(image: Image.Image, boxes: Sequence[LabelledBox]) -> Image.Image:
    """Draw boxes over a picture, with labels beside them.

    The picture and the drawing have the mode ``RGB``; a small picture is enlarged first. Line width and label height depend on its
    size. The first box is drawn on top of the others, and its label is placed first. Labels cover neither their box nor each other;
    those without a free place are listed below the picture, which makes the drawing higher.
    """
    from schemas.drawing.charts import ONE_COLUMN
    from schemas.drawing.style import FigureCanvasAgg, own_style

    scale = min(max(1.0, _MIN_SIDE / max(image.size)), _MAX_SIDE / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    pixels = np.asarray(image if size == image.size else image.resize(size, Image.Resampling.BICUBIC))
    with own_style():
        font_size = max(10.0, _FONT_SIZE * size[0] / (72 * ONE_COLUMN))
        figure = _figure_of(boxes, scale, size, max(2, round(max(size) / 400)), font_size)
        figure.figimage(pixels, origin="upper", yo=round(figure.bbox.height) - size[1])
        figure.set_size_inches(*(figure.get_size_inches() + 0.5 / 72))  # Half a pixel is cut off.
        canvas = FigureCanvasAgg(figure)
        draw_with_fonts(figure, canvas.draw)
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])


def draw_page(image: Image.Image, boxes: Sequence[LabelledBox], kind: str) -> bytes:
    """Draw boxes as `draw_boxes` into a ``pdf`` or ``svg``, as wide as a column."""
    from schemas.drawing.charts import ONE_COLUMN, render_figure
    from schemas.drawing.style import own_style

    scale = 72 * ONE_COLUMN / image.width  # Points of a pixel.
    size = (round(72 * ONE_COLUMN), max(1, round(image.height * scale)))
    with own_style():
        figure = _figure_of(boxes, scale, size, 0.75, _FONT_SIZE)
        share = size[1] / figure.bbox.height
        panel = figure.add_axes((0, 1 - share, 1, share))
        panel.set_axis_off()
        panel.imshow(np.asarray(image), aspect="auto")
    return render_figure(figure, kind, Creator=_SOFTWARE)


def _figure_of(boxes: Sequence[LabelledBox], scale: float, size_wh: tuple[int, int], line: float, font_size: float) -> Figure:
    """Return a figure of boxes and labels without the picture; its points are pixels."""
    from schemas.drawing.charts import Place, place_beside
    from schemas.drawing.style import Affine2D, Figure, Rectangle

    width, height = size_wh
    figure, pixels = Figure(figsize=(width / 72, height / 72), dpi=72), Affine2D()
    labels = []
    for box in reversed(boxes):
        colour = colour_of(box.group)
        paint = tuple(value / 255 for value in colour)
        left, top, right, bottom = _clip_to_canvas((value * scale for value in box.xyxy), size_wh)
        sides = max(0, right - left - line), max(0, bottom - top - line)
        pen: dict[str, Any] = {"lw": line, "ec": paint, "fill": False, "joinstyle": "miter", "aa": False, "snap": False}
        figure.add_artist(Rectangle((left + line / 2, top + line / 2), *sides, transform=pixels, **pen))
        # Channel weights for brightness from ITU-R BT.601.
        ink = "black" if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140 else "white"
        ground = {"fc": paint, "ec": "none", "lw": 0, "pad": _PAD, "aa": False}
        text: dict[str, Any] = {"size": font_size, "color": ink, "va": "top", "bbox": ground, "parse_math": False}
        labels.append((figure.text(0, 0, escape_text(box.label), transform=pixels, **text), (left, top, right, bottom)))
    draw_with_fonts(figure, figure.draw_without_rendering)
    taken: list[Place] = []
    bounds = (0, 0, width, height)
    across, down, end = 0, height, height  # The next place below the picture, and the end of its line.
    for label, target in reversed(labels):
        extent = label.get_window_extent()
        wh = (math.ceil(extent.width) + 2 * _PAD, math.ceil(extent.height) + 2 * _PAD)
        label.set_visible(bool(label.get_text()) and wh[0] <= width)
        if not label.get_visible():
            continue
        others = [*taken, *(box for _, box in labels)]
        place = place_beside(wh, target, others, bounds) or place_beside(wh, target, taken, bounds, reach=_REACH)
        if place is None:
            across, down = (across, down) if across + wh[0] <= width else (0, end)
            place = (across, down, across + wh[0], down + wh[1])
            across, end = across + wh[0], max(end, down + wh[1])
        taken.append(place)
        label.set_position((place[0] + _PAD, place[1] + _PAD))
    pixels.scale(1, -1).translate(0, end)
    figure.set_size_inches(width / 72, end / 72)
    return figure


def _clip_to_canvas(xyxy: Iterable[float], size_wh: tuple[int, int]) -> tuple[int, int, int, int]:
    """Move corners onto the canvas, so that sides are visible; last ones exclusive."""
    left, top, right, bottom = map(round, xyxy)
    width, height = size_wh
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    return left, top, min(max(right, left), width - 1) + 1, min(max(bottom, top), height - 1) + 1


class Picture(NamedTuple):
    """RGB pixels, uint8 ``[height, width, 3]``, and the original width and height."""

    pixels: np.ndarray
    size_wh: tuple[int, int]


def read_pictures(
    images: str | os.PathLike[str] | ImageSource, image_ids: Sequence[str], *, longer_side: int = 640
) -> dict[str, Picture]:
    """Read pictures by image id, downscaled to at most `longer_side` pixels.

    Raises:
        InputError: the location does not exist, lacks an image, or an image cannot be read.
    """
    pictures = {}
    opened = open_images(images) if isinstance(images, (str, os.PathLike)) else images
    for image_id, picture in decoded_pictures(opened, image_ids).items():
        size_wh = picture.size
        picture.thumbnail((longer_side, longer_side), Image.Resampling.LANCZOS)
        pictures[image_id] = Picture(np.asarray(picture), size_wh)
    return pictures


def decoded_pictures(images: ImageSource, image_ids: Sequence[str]) -> dict[str, Image.Image]:
    """Read pictures from a collection, mode ``RGB``, by image id.

    Raises:
        InputError: the collection has no image of an id, or two, or one cannot be read.
    """
    wanted = set(image_ids)
    refs = sorted(ref for ref in images.refs() if ref.image_id in wanted)
    images.check_ids(refs)
    refs_by_id = {ref.image_id: ref for ref in refs}
    pictures = {}
    for image_id in image_ids:
        if image_id not in refs_by_id:
            hint = " (--id-rule path makes ids of whole paths)" if getattr(images, "ids", "") == "name" else ""
            raise InputError(
                f"image {image_id!r} is not among the images in {images.location!r}"
                f"{_suggest_ids(image_id, (ref.image_id for ref in images.refs()))}{hint}"
            )
        ref = refs_by_id[image_id]
        try:
            pictures[image_id] = extractors.decode_image(images.read(ref))
        except extractors.DecodeError as error:
            raise InputError(f"image {ref.uri!r} cannot be decoded: {error}") from error
        except OSError as error:
            raise InputError(f"image {ref.uri!r} cannot be read: {error.strerror or type(error).__name__}") from error
    return pictures


def _suggest_ids(image_id: str, image_ids: Iterable[str]) -> str:
    """Return a hint for a message: a normalized id, similar ids, or examples."""
    ids = sorted(image_ids)
    if hint := normalization_hint([image_id], ids):
        return f": {hint}"
    without_extension = PurePosixPath(image_id).stem
    close = [without_extension] if without_extension in ids else difflib.get_close_matches(image_id, ids, n=3)
    if close:
        return f": did you mean {' or '.join(map(repr, close))}?"
    return f": its ids look like {', '.join(map(repr, ids[:3]))}" if ids else ": it has no images"
