"""Formats of image files, and whether their decoders are installed.

A format is detected from the content, not from the name: by magic bytes, for TGA by its footer (version 2) or a plausible header.
"""

import re
import struct
from functools import cache

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "ICO", "HEIF", "TGA")
"""Supported formats by Pillow's names; those that run programs (EPS) or hold no photographs are excluded."""

_MARKS = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+", b"II\x00*", b"MM*\x00"),  # Pillow accepts the last two, too.
    "JPEG2000": (b"\xff\x4f\xff\x51", b"\x00\x00\x00\x0cjP  \r\n\x87\n"),
    "ICO": (b"\x00\x00\x01\x00",),
}
# P1 to P6 and PFM's Pf, then white space or a comment.
_PPM = re.compile(rb"P[1-6f][\s#]")
_BRANDS = {
    "AVIF": {b"avif", b"avis"},
    "HEIF": {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1"},
}
_TGA_FOOTER = b"TRUEVISION-XFILE.\x00"
# Image type -> valid bits per pixel: palette, colours, grey; then run-length encoded.
_TGA_DEPTHS = {1: (8,), 2: (16, 24, 32), 3: (1, 8, 16), 9: (8,), 10: (16, 24, 32), 11: (8, 16)}


def image_format(data: bytes) -> str | None:
    """Detect the format of a file's content, one of `FORMATS`; None for others."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _format_of_brands(data)
    if _PPM.match(data):
        return "PPM"
    name = next((name for name, marks in _MARKS.items() if data.startswith(marks)), None)
    return name or ("TGA" if _is_tga(data) else None)


def missing_decoder(name: str) -> str | None:
    """Return how to install a missing decoder, else None; codecs are not checked."""
    if name == "HEIF":
        return None if _register_heif() else "its decoder is not installed: pip install 'imagepivot[heif]'"
    if name in ("AVIF", "WEBP"):
        from PIL import features

        if name.lower() not in features.get_supported():
            return "this build of Pillow has no decoder for it: install Pillow 11.3 or newer from a wheel"
    return None


@cache
def _register_heif() -> bool:
    """Register Pillow's HEIF plugin, and return whether it is installed."""
    try:
        import pillow_heif
    except ImportError:
        return False
    pillow_heif.register_heif_opener()
    return True


def _format_of_brands(data: bytes) -> str | None:
    """Return the format of an ISO 14496-12 file by the brands in its first box."""
    end = min(int.from_bytes(data[:4], "big"), 256)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
    return next((name for name, format_brands in _BRANDS.items() if brands & format_brands), None)


def _is_tga(data: bytes) -> bool:
    if len(data) < 18:
        return False
    if data.endswith(_TGA_FOOTER):
        return True
    _, mapped, kind, first, count, bits, _, _, width, height, depth, flags = struct.unpack_from("<BBBHHBHHHHBB", data)
    has_map = mapped == 1 and bits in (16, 24, 32) and 0 < count <= 256
    has_none = mapped == 0 and (first, count, bits) == (0, 0, 0) and kind & 7 != 1
    return (has_map or has_none) and depth in _TGA_DEPTHS.get(kind, ()) and width > 0 < height and flags < 64
