"""Decoding image files into RGB pixels: one defined result, or one reason why there is none.

The pixels are the ones that the file stores; nothing is guessed, repaired or corrected:

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
signed or 32-bit grey       the same if all values lie in 0…65535 (0…255 of 8 bits), else ``unsupported``
PGM, PPM                    scaled so that the file's maximum becomes 255; grey of more than 8 bits by way of 16-bit grey
16-bit RGB, grey and alpha  the high byte of each sample of PNG and TIFF, as Pillow reads them
JPEG 2000, not 8 bits       grey of 9…16 bits is shifted to 16 bits, then as 16-bit grey; everything else is ``unsupported``
AVIF, HEIC, not 8 bits      what libavif and libheif make of them: colours of 8 bits, grey of 16 bits
12-bit TIFF, floats, Lab    ``unsupported``: there is no agreed way to 8 bits
tags that Pillow ignores    ``unsupported``, see `extractors.images.tiff`; docs/reference/image-files.md lists all kinds of files
several frames or images    the first; the primary image of HEIC, the largest of an icon
==========================  ===============================================================================================

**EXIF orientation is not applied.** The feature sets of the papers (2016 to 2019) were made without it, and Flickr30K and COCO
files are stored upright. A photograph that relies on the tag is seen as it is stored, lying on its side. Only orientation that is
part of the format itself is applied: that of TIFF, TGA, AVIF and HEIC. Colour profiles and gamma are ignored too.

The content decides the format, not the name. Every format but TGA begins with a mark of its own; TGA, the oldest, is recognised by
its footer (version 2) or by a header in which every field is plausible, and only after all the others. A format that cannot be
decoded here, because Pillow was built without it or the extra ``heif`` is missing, is ``unsupported``.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from functools import cache
from typing import TYPE_CHECKING

from schemas.errors import InputError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image, ImageFile


DECODING = 1
"""Version of the rules above, part of every extractor's parameters. A change of a rule makes a new version."""

MAX_PIXELS = 178_956_970
"""Greatest width times height that is decoded; a small file can claim any size. Equals the limit of Pillow's own error."""

REASONS = ("empty", "not_an_image", "truncated", "too_large", "unsupported", "decode_error")
"""All reasons of a `DecodeError`."""

# Modes that Pillow converts to RGB as the table says. Grey of 16 and 32 bits is converted here.
_CONVERTED_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBX", "RGBA", "CMYK", "YCbCr")
# Errors that Pillow raises for broken files: its documented OSError, ValueError, SyntaxError and EOFError, and those that its
# plugins let through for malformed headers (`PIL.ImageFile.ImageFile` itself treats most of them as a sign of a broken file). The
# decoders of AVIF and HEIF raise RuntimeError, the parser of JPEG 2000 has assertions about the file.
_PILLOW_ERRORS = (
    *(OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error),
    *(RuntimeError, AssertionError),
)
# What Pillow says of files that are whole, but that it does not read.
_UNREAD = re.compile(
    r"^(unknown (pixel mode|raw mode|TGA)|unrecognized raw mode|cannot handle \d+-layer|Unsupported BMP|cannot load this image|"
    r"unable to determine J2K|Windows Media Photo|Unknown compression method)"
)
_JPEG_PROCESSES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, sequential and progressive, the last two arithmetic
_START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}


class DecodeError(InputError):
    """Raised for an image that cannot be decoded.

    Args:
        reason: one of `REASONS`.
        message: what was found, the likely cause and what to do.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        if reason not in REASONS:
            raise ValueError(f"reason is {reason!r}, expected one of {REASONS}")
        self.reason = reason

    def __str__(self) -> str:
        return str(self.args[1])


def decode(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decode the bytes of one image file into RGB.

    Args:
        data: content of the whole file.
        max_pixels: greatest width times height that is decoded; checked in the header, before any pixel is decoded. Pillow's own
            ``PIL.Image.MAX_IMAGE_PIXELS`` leads to the same reason if it is lower.

    Returns:
        A loaded image of mode ``RGB``, independent of ``data``.

    Raises:
        DecodeError: the bytes are not an image, are damaged, or have no defined RGB; see `REASONS`.
        UsageError: the process has set ``PIL.ImageFile.LOAD_TRUNCATED_IMAGES``, so that damage would go unnoticed.
    """
    from PIL import Image, ImageFile

    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise UsageError(
            "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set in this process: truncated images would silently be filled with grey. "
            "Some other code set it; set it to False before decoding."
        )
    if not data:
        raise DecodeError("empty", "the image file has 0 bytes: its download or copy was probably cut off; fetch it again")
    kind = format_of(data)
    if kind is None:
        raise DecodeError(
            "not_an_image",
            f"the {len(data)} bytes begin with {data[:16]!r}, expected one of the formats {', '.join(FORMATS)}: "
            "probably an error page or another kind of file under an image's name",
        )
    if (missing := missing_decoder(kind)) is not None:
        raise DecodeError("unsupported", f"the {len(data)} bytes are {kind}, and {missing}")
    try:
        if kind == "ICO":
            _check_icon(data, max_pixels)
        image = _open(data, kind)
        _check_pixels(*image.size, max_pixels)
        if kind == "JPEG2000":
            _check_depth(data, image.mode)
        image.load()
    except DecodeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DecodeError("too_large", f"the image exceeds Pillow's own limit of pixels: {error}") from error
    except _PILLOW_ERRORS as error:
        raise _broken(data, kind, error) from error
    return _to_rgb(_upright(image) if kind == "AVIF" else image)


def _open(data: bytes, kind: str) -> ImageFile.ImageFile:
    """Open an image as ``PIL.Image.open`` does, whose error does not say what is wrong with the header.

    Raises:
        PIL.UnidentifiedImageError: the header cannot be read, for the reason that the error states.
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
            f"the header says {width}×{height} pixels, expected at most {max_pixels} in all: a decompression bomb or a scan; "
            "scale it down or leave it out",
        )


def _check_icon(data: bytes, max_pixels: int) -> None:
    """Check the headers of the images in an icon: Pillow decodes one of them already while it opens the file."""
    (count,) = struct.unpack_from("<H", data, 4)
    for number in range(count):
        (offset,) = struct.unpack_from("<I", data, 6 + 16 * number + 12)
        if data.startswith(b"\x89PNG", offset):
            width, height = struct.unpack_from(">II", data, offset + 16)
        else:
            width, height = struct.unpack_from("<ii", data, offset + 4)
            height //= 2  # The mask lies behind the pixels.
        _check_pixels(abs(width), abs(height), max_pixels)


def _check_depth(data: bytes, mode: str) -> None:
    """Check that a JPEG 2000 file has 8 bits, or for grey 8 to 16: of others, Pillow makes 8 bits that are wrong.

    Colours of more than 8 bits overflow, so that the brightest become 0; fewer bits are shifted, so that white becomes grey, and
    indices into a palette become others.
    """
    start = data.index(b"\xff\x4f\xff\x51")  # The codestream, ISO 15444-1 A.5.1: number of components, then 3 bytes of each.
    (count,) = struct.unpack_from(">H", data, start + 40)
    depths = {(data[start + 42 + 3 * number] & 0x7F) + 1 for number in range(count)}
    fits = 8 < max(depths) <= 16 if mode == "I;16" else depths == {8}
    if not fits:
        raise DecodeError(
            "unsupported",
            f"the samples have {' and '.join(map(str, sorted(depths)))} bits, expected 8, or 8 to 16 for grey without alpha: "
            "convert the file to 8-bit RGB",
        )


def _upright(image: Image.Image) -> Image.Image:
    """Turn an AVIF image as its own properties say (``irot``, ``imir``), which Pillow hands over as EXIF."""
    from PIL import ImageOps

    image.info.pop("xmp", None)  # It may hold a tag of orientation, too, which is not one of those properties.
    return ImageOps.exif_transpose(image)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded image as the table at the top of this module says."""
    if image.mode.startswith("I"):
        return _grey16_to_rgb(image)
    if image.mode == "L" and getattr(image, "is_signed", False):
        _check_range(_array(image).view("int8"), 255)
    if image.mode not in _CONVERTED_MODES:
        raise DecodeError(
            "unsupported",
            f"the pixels are of mode {image.mode!r}, expected one of {', '.join(_CONVERTED_MODES)} or 16-bit grey: "
            "there is no agreed way from it to 8-bit RGB; convert the file",
        )
    # It only decides whether the result keeps a mark of transparency; if it stays, Pillow warns about every such file.
    image.info.pop("transparency", None)
    if image.mode == "RGB" and image.format == "JPEG":
        return image  # Loaded, so that it holds its pixels and no file; `convert` would copy them, a fifth of libjpeg's time.
    return image.convert("RGB")


def _grey16_to_rgb(image: Image.Image) -> Image.Image:
    """Scale grey values in 0…65535 to 8 bits, rounding to the nearest, and replicate them."""
    from PIL import Image as PilImage

    values = _array(image).astype("int64")  # [H, W]
    if tuple(getattr(image, "tag_v2", {}).get(258, ())) == (12,):  # a TIFF's BitsPerSample
        raise DecodeError("unsupported", "the pixels have 12 bits, expected 8 or 16: convert the file to 8-bit RGB")
    _check_range(values, 65535)
    if getattr(image, "white_is_zero", False):
        values = 65535 - values
    return PilImage.fromarray(((values + 128) // 257).astype("uint8")).convert("RGB")


def _array(image: Image.Image) -> np.ndarray:
    import numpy as np

    return np.asarray(image)


def _check_range(values: np.ndarray, greatest: int) -> None:
    if values.size and (values.min() < 0 or values.max() > greatest):
        raise DecodeError(
            "unsupported",
            f"the grey values run from {values.min()} to {values.max()}, expected 0 to {greatest}: convert the file to 8-bit RGB",
        )


def _unread(data: bytes, kind: str, error: Exception) -> str | None:
    """Return the property of a file that no decoder here follows, if an error is about that; None for damage."""
    if kind == "JPEG" and (process := _jpeg_process(data)) is not None:
        return process
    if isinstance(error, NotImplementedError):
        return str(error)
    return f"a layout that is not supported ({error})" if _UNREAD.search(str(error)) else None


def _jpeg_process(data: bytes) -> str | None:
    """Return the process and depth of a JPEG file that libjpeg does not decode; None for those it does, and for damage."""
    position = 2
    while data[position : position + 1] == b"\xff" and position + 5 <= len(data):
        marker, length, bits = struct.unpack_from(">BHB", data, position + 1)
        if marker in _START_OF_FRAME:
            if marker in _JPEG_PROCESSES and bits == 8:
                return None
            return f"samples of {bits} bits in JPEG's process SOF{marker - 0xC0}, expected 8 in SOF0 to SOF2"
        position += 2 + length
    return None


def _broken(data: bytes, kind: str, error: Exception) -> DecodeError:
    """Distinguish files that end too early, and those that nothing here reads, from damage, as Pillow does only in its texts."""
    from PIL import Image

    text = f"{type(error).__name__}: {error}"
    if (fault := _unread(data, kind, error)) is not None:
        return DecodeError("unsupported", f"the {kind} file of {len(data)} bytes has {fault}: convert it to 8-bit RGB")
    if isinstance(error, Image.UnidentifiedImageError):
        return DecodeError(
            "decode_error",
            f"the {len(data)} bytes begin like {kind}, but the header cannot be read: the file is damaged or was cut off "
            "near its start; fetch it again",
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


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "HEIF", "TGA")
"""Formats that are opened, by Pillow's names. Formats that run programs (EPS) or hold no photographs are never tried."""

_MARKS = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+", b"II\x00*", b"MM*\x00"),  # The last two are wrong but accepted.
    "JPEG2000": (b"\xff\x4f\xff\x51", b"\x00\x00\x00\x0cjP  \r\n\x87\n"),
    "ICO": (b"\x00\x00\x01\x00",),
}
# P1 to P6, and the floats of PFM; then white space or a comment.
_PPM = re.compile(rb"P[1-6f][\s#]")
_BRANDS = {
    "AVIF": {b"avif", b"avis"},
    "HEIF": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"},
}
_TGA_FOOTER = b"TRUEVISION-XFILE.\x00"
# Type of the pixels -> bits of a pixel that it can have: palette, colours, grey; the same run-length encoded.
_TGA_DEPTHS = {1: (8,), 2: (16, 24, 32), 3: (1, 8, 16), 9: (8,), 10: (16, 24, 32), 11: (8, 16)}


def format_of(data: bytes) -> str | None:
    """Return the format of the bytes of a file, one of `FORMATS`; None if they are in none of these."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _format_of_brands(data)
    if _PPM.match(data):
        return "PPM"
    name = next((name for name, marks in _MARKS.items() if data.startswith(marks)), None)
    return name or ("TGA" if _is_tga(data) else None)


def missing_decoder(name: str) -> str | None:
    """Return what to install if a format cannot be decoded here; None if it can.

    Codecs that Pillow itself misses only while it decodes (JPEG 2000, compressed TIFF) are not asked for.
    """
    if name == "HEIF":
        return None if _register_heif() else "its decoder is not installed: pip install 'imagepivot[heif]'"
    if name in ("AVIF", "WEBP"):
        from PIL import features

        if name.lower() not in features.get_supported():
            return "this build of Pillow has no decoder for it: install Pillow 11.3 or newer from a wheel"
    return None


@cache
def _register_heif() -> bool:
    """Let Pillow open HEIF files, and return whether that is possible."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _format_of_brands(data: bytes) -> str | None:
    """Return the format of a file in boxes (ISO 14496-12): its first box lists the brands that it conforms to."""
    end = min(int.from_bytes(data[:4], "big"), 256)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
    return next((name for name, known in _BRANDS.items() if brands & known), None)


def _is_tga(data: bytes) -> bool:
    if len(data) < 18:
        return False
    if data.endswith(_TGA_FOOTER):
        return True
    _, mapped, kind, first, count, bits, _, _, width, height, depth, flags = struct.unpack_from("<BBBHHBHHHHBB", data)
    has_map = mapped == 1 and bits in (16, 24, 32) and 0 < count <= 256
    has_none = mapped == 0 and (first, count, bits) == (0, 0, 0) and kind & 7 != 1
    return (has_map or has_none) and depth in _TGA_DEPTHS.get(kind, ()) and width > 0 < height and flags < 64
