"""Decoding of image files to RGB pixels, or to a defined reason of failure.

Pixels are those stored in the file, without repairs or corrections:

==========================  ===============================================================================================
file                        pixels
==========================  ===============================================================================================
RGB, YCbCr JPEG             as Pillow decodes them, at full size (JPEG's cheaper "draft" sizes change pixels: not used)
grey (``L``)                replicated into the three channels
black and white (``1``)     0 and 255
palette (``P``)             looked up in the palette; a transparent entry has the colour that the palette has for it
``LA``, ``PA``, ``RGBA``    alpha is dropped, not composited: ``convert("RGB")``, as the Multi30K authors did
CMYK, YCCK                  Pillow's conversion, which knows Adobe's inverted CMYK; no colour profile is applied
16-bit grey                 ``round(value / 257)``, so 0…65535 becomes 0…255 (a plain ``convert("RGB")`` clips to white);
                            inverted where the file says that 0 is white
signed or 32-bit grey       as 16-bit grey if all values are in 0…65535 (0…255 of 8 bits), else ``unsupported``
PGM, PPM                    scaled so that the file's maximum becomes 255; grey of more than 8 bits by way of 16-bit grey
16-bit RGB, grey and alpha  the high byte of each sample of PNG and TIFF, as Pillow reads them
JPEG 2000, not 8 bits       grey of 9…16 bits is shifted to 16 bits, then as 16-bit grey; everything else is ``unsupported``
AVIF, HEIC, not 8 bits      as decoded by libavif and libheif: colours of 8 bits, grey of 16 bits
12-bit TIFF, floats, Lab    ``unsupported``: no agreed conversion to 8 bits exists
tags that Pillow ignores    ``unsupported``, see `extractors.images.tiff`; docs/reference/image-files.md lists all kinds of files
several frames or images    the first; the primary image of HEIC, the largest of an icon
==========================  ===============================================================================================

**EXIF orientation is not applied.** The feature sets of the papers (2016 to 2019) were extracted without it,
and Flickr30K and COCO files are stored upright. Only orientation that is part of the format is applied: that
of TIFF, TGA, AVIF and HEIC. Colour profiles and gamma are ignored.

Formats without a decoder (Pillow built without it, or the extra ``heif`` missing) are ``unsupported``.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from typing import TYPE_CHECKING

from extractors.images.formats import FORMATS, image_format, missing_decoder
from schemas.errors import InputError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image, ImageFile


DECODING = 1
"""Version of the rules above, part of every extractor's parameters; changes with each rule."""

MAX_PIXELS = 178_956_970
"""Maximum width times height; equals the limit of Pillow's own error."""

REASONS = ("empty", "not_an_image", "truncated", "too_large", "unsupported", "decode_error", "crashed")
"""All reasons of a `DecodeError`."""

_BLOCK_PIXELS = 1 << 20  # Pixels of 16-bit grey that are converted together: copies of all pixels may take gigabytes.
# Modes that Pillow converts to RGB by the table. Grey of 16 and 32 bits is converted here.
_CONVERTED_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr")
# Pillow's documented errors for corrupt files, those of its plugins for malformed headers (see `PIL.ImageFile.ImageFile`), and
# those of the AVIF and HEIF decoders (RuntimeError) and of the JPEG 2000 parser (AssertionError; OverflowError for a box of 2**64).
_PILLOW_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, LookupError, TypeError, AttributeError, struct.error, zlib.error),
    *(RuntimeError, AssertionError, ArithmeticError),
)
# Pillow's messages for intact files that it does not support.
_UNSUPPORTED = re.compile(
    r"^(unknown (pixel mode|raw mode|TGA)|unrecognized raw mode|cannot handle \d+-layer|Unsupported BMP|cannot load this image|"
    r"unable to determine J2K|Windows Media Photo|Unknown compression method)"
)


class DecodeError(InputError):
    """Raised for an image that cannot be decoded.

    Args:
        reason: one of `REASONS`.
        message: the problem, its likely cause and the remedy.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        if reason not in REASONS:
            raise ValueError(f"reason is {reason!r}, expected one of {REASONS}")
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the bytes of one image file into RGB.

    ``max_pixels`` limits width times height, checked in the header. A lower ``PIL.Image.MAX_IMAGE_PIXELS`` also applies.

    Returns:
        A loaded image of mode ``RGB``, independent of ``data``.

    Raises:
        DecodeError: the bytes are no image, are corrupt, or have no defined RGB; see `REASONS`.
        UsageError: ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES`` is set, which would hide corruption.
    """
    from PIL import Image, ImageFile

    from extractors.images.jpeg import decode_rgb

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise UsageError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is True in this process, so that truncated images would "
            "be filled with grey: set it to False before decoding"
        )
    if not data:
        raise DecodeError("empty", "the image file has 0 bytes: its download or copy was probably cut off; fetch it again")
    kind = image_format(data)
    if kind is None:
        raise DecodeError(
            "not_an_image",
            f"the {len(data)} bytes begin with {data[:16]!r}, expected one of the formats "
            f"{', '.join(FORMATS)}: probably an error page or another kind of file under an image's name",
        )
    if (missing := missing_decoder(kind)) is not None:
        raise DecodeError("unsupported", f"the {len(data)} bytes are {kind}, and {missing}")
    try:
        if kind == "ICO":
            _check_icon(data, max_pixels)
        image = _open_image(data, kind)
        _check_pixels(*image.size, max_pixels)
        if kind == "JPEG2000":
            _check_depth(data, image.mode)
        if kind == "JPEG" and (rgb := decode_rgb(data, image.mode)) is not None:
            return Image.fromarray(rgb)
        image.load()
        if kind == "PNG":
            _check_crc(data)
        return _to_rgb(_upright(image) if kind == "AVIF" else image)
    except DecodeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DecodeError("too_large", f"the image exceeds Pillow's own limit of pixels: {error}") from error
    except MemoryError as error:
        raise DecodeError(
            "too_large", "its pixels do not fit into this process's memory: scale it down or leave it out"
        ) from error
    except _PILLOW_ERRORS as error:
        raise _decode_error(data, kind, error) from error


def _open_image(data: bytes, kind: str) -> ImageFile.ImageFile:
    """Open an image as ``PIL.Image.open`` does, but with the reason in the error.

    Raises:
        PIL.UnidentifiedImageError: the header is invalid.
    """
    from PIL import Image

    from extractors.images.tiff import TiffFile

    Image.preinit()
    if kind not in Image.OPEN:
        Image.init()
    try:
        image = TiffFile(io.BytesIO(data)) if kind == "TIFF" else Image.OPEN[kind][0](io.BytesIO(data), "")
    except (SyntaxError, IndexError, TypeError, struct.error) as error:
        raise Image.UnidentifiedImageError(str(error)) from error
    Image._decompression_bomb_check(image.size)
    return image


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise DecodeError(
            "too_large",
            f"the header says {width}×{height} pixels, expected at most {max_pixels} in all: a "
            "decompression bomb or a scan; scale it down or leave it out",
        )


def _check_icon(data: bytes, max_pixels: int) -> None:
    """Check the headers in an icon, since Pillow decodes one image when opening it."""
    (count,) = struct.unpack_from("<H", data, 4)
    for index in range(count):
        (offset,) = struct.unpack_from("<I", data, 6 + 16 * index + 12)
        if data.startswith(b"\x89PNG", offset):
            width, height = struct.unpack_from(">II", data, offset + 16)
        else:
            width, height = struct.unpack_from("<ii", data, offset + 4)
            height //= 2  # Pixels and mask.
        _check_pixels(abs(width), abs(height), max_pixels)


def _check_depth(data: bytes, mode: str) -> None:
    """Check that JPEG 2000 has 8 bits (grey: 8 to 16); Pillow misconverts others."""
    start = data.index(b"\xff\x4f\xff\x51")  # ISO 15444-1 A.5.1: number of components, then 3 bytes for each.
    (count,) = struct.unpack_from(">H", data, start + 40)
    depths = {(data[start + 42 + 3 * index] & 0x7F) + 1 for index in range(count)}
    fits = 8 < max(depths) <= 16 if mode == "I;16" else depths == {8}
    if not fits:
        raise DecodeError(
            "unsupported",
            f"the samples have {' and '.join(map(str, sorted(depths)))} bits, expected 8, or 8 to 16 for "
            "grey without alpha: convert the file to 8-bit RGB",
        )


def _check_crc(data: bytes) -> None:
    """Check the checksums of a PNG's pixel data, which Pillow ignores.

    Raises:
        ValueError: a checksum differs, as after a hole that was filled with zeros.
    """
    position, view = 8, memoryview(data)
    while position + 12 <= len(data):
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 8 + length
        if name == b"IDAT" and view[end : end + 4] != zlib.crc32(view[position + 4 : end]).to_bytes(4, "big"):
            raise ValueError("the checksum of the pixel data differs")
        if name == b"IEND":
            return
        position = end + 4


def _upright(image: Image.Image) -> Image.Image:
    """Apply ``irot`` and ``imir`` of an AVIF image, which Pillow returns as EXIF."""
    from PIL import ImageOps

    image.info.pop("xmp", None)  # It may contain another orientation.
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image by the table at the top of this module."""
    import numpy as np

    if image.mode.startswith("I"):
        return _grey16_to_rgb(image)
    if image.mode == "L" and getattr(image, "is_signed", False):
        _check_range(np.asarray(image).view("int8"), 255)
    if image.mode not in _CONVERTED_MODES:
        raise DecodeError(
            "unsupported",
            f"the pixels are of mode {image.mode!r}, expected one of {', '.join(_CONVERTED_MODES)} or "
            "16-bit grey: there is no agreed way from it to 8-bit RGB; convert the file",
        )
    image.info.pop("transparency", None)  # Avoids a warning of Pillow, without effect on pixels.
    if image.mode == "RGB" and image.format == "JPEG":
        return image  # Already loaded; `convert` would copy the pixels.
    return image.convert("RGB")


def _grey16_to_rgb(image: Image.Image) -> Image.Image:
    """Scale grey in 0…65535 to 8 bits, rounded to the nearest, and replicate it."""
    import numpy as np
    from PIL import Image as PilImage

    values = np.asarray(image)  # [H, W]
    if tuple(getattr(image, "tag_v2", {}).get(258, ())) == (12,):  # BitsPerSample of a TIFF.
        raise DecodeError("unsupported", "the pixels have 12 bits, expected 8 or 16: convert the file to 8-bit RGB")
    _check_range(values, 65535)
    grey = np.empty(values.shape, np.uint8)
    rows = 1 + _BLOCK_PIXELS // (1 + image.width)
    for start in range(0, image.height, rows):
        block = values[start : start + rows].astype(np.int64)
        if getattr(image, "white_is_zero", False):
            block = 65535 - block
        grey[start : start + rows] = (block + 128) // 257
    del values
    return PilImage.fromarray(grey).convert("RGB")


def _check_range(values: np.ndarray, max_value: int) -> None:
    if values.size and (values.min() < 0 or values.max() > max_value):
        raise DecodeError(
            "unsupported",
            f"the grey values run from {values.min()} to {values.max()}, expected 0 to {max_value}: convert the file to 8-bit RGB",
        )


def _unsupported_property(data: bytes, kind: str, error: Exception) -> str | None:
    """Return the unsupported property that caused an error; None for a corrupt file."""
    if kind == "JPEG":
        from extractors.images.jpeg import unsupported_process

        if (process := unsupported_process(data)) is not None:
            return process
    if isinstance(error, NotImplementedError):
        return str(error)
    return f"a layout that is not supported ({error})" if _UNSUPPORTED.search(str(error)) else None


def _decode_error(data: bytes, kind: str, error: Exception) -> DecodeError:
    """Classify an error of Pillow by its message: truncated, unsupported or corrupt."""
    from PIL import Image

    text = f"{type(error).__name__}: {error}"
    if (fault := _unsupported_property(data, kind, error)) is not None:
        return DecodeError("unsupported", f"the {kind} file of {len(data)} bytes has {fault}: convert it to 8-bit RGB")
    if isinstance(error, Image.UnidentifiedImageError):
        return DecodeError(
            "decode_error",
            f"the {len(data)} bytes begin like {kind}, but the header cannot be read: the file is damaged "
            "or was cut off near its start; fetch it again",
        )
    if str(error).endswith("not available"):
        return DecodeError(
            "unsupported", f"this build of Pillow cannot decode the {kind} file ({text}): install Pillow's wheel"
        )
    if isinstance(error, EOFError) or "truncated" in str(error).lower():
        return DecodeError(
            "truncated", f"the {kind} file ends after {len(data)} bytes, before its pixels do ({text}); fetch it again"
        )
    return DecodeError("decode_error", f"the {kind} file of {len(data)} bytes is damaged ({text}); fetch it again")
