"""JPEG decoding that reports the warnings of libjpeg, which Pillow ignores.

libjpeg fills missing pixels with grey or noise, and warns. docs/reference/image-files.md lists the decision on each warning.
simplejpeg stops at the first one. If it is harmless, the pixel data are checked again without the bytes that caused it.
"""

import re
import struct
from collections.abc import Iterator

import numpy as np
import simplejpeg

_LOSS = re.compile("premature end of data|bad (Huffman|arithmetic) code|instead of RST|Inconsistent progression")
_NUM_ZEROS = 32  # Before other data; cameras and scanners fill up files with shorter runs, or at the end.
_PROCESSES = {0xC0, 0xC1, 0xC2, 0xC9, 0xCA}  # baseline, sequential and progressive, the last two arithmetic
_SEQUENTIAL = {0xC0, 0xC1, 0xC9}
_START_OF_FRAME = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, b"\xff\xd9"
_NEEDED = {*_START_OF_FRAME, 0xC4, 0xCC, 0xDB, 0xDD}  # frame, Huffman and arithmetic tables, quantization, restart interval


def decode_rgb(data: bytes, mode: str) -> np.ndarray | None:
    """Decode an intact JPEG file as Pillow does; None leaves the file to Pillow.

    ``mode`` is Pillow's mode of the image; ``CMYK`` is only checked. Pixels are uint8 ``[height, width, 3]``.

    Raises:
        OSError: pixels are missing or damaged; the message is libjpeg's.
    """
    pixels, warning = _decode_strictly(data, mode)
    if warning and not _LOSS.search(warning):
        pixel_data, scans = _pixel_data(data)
        _, warning = _decode_strictly(pixel_data, mode)
        if "extraneous" in warning and (bytes(_NUM_ZEROS) in scans or not _has_all_restarts(scans)):
            raise OSError(f"zeros within the data of the pixels, or a missing restart marker; {warning}")
    if _LOSS.search(warning):
        raise OSError(f"truncated or with a hole: {warning}" if "premature" in warning else warning)
    return None if mode == "CMYK" else pixels


def _decode_strictly(data: bytes, mode: str) -> tuple[np.ndarray | None, str]:
    """Return pixels, or the first warning or error."""
    try:
        return simplejpeg.decode_jpeg(data, colorspace="CMYK" if mode == "CMYK" else "RGB", strict=True), ""
    except ValueError as error:
        return None, str(error)


def unsupported_process(data: bytes) -> str | None:
    """Return a JPEG file's process and depth if libjpeg does not support it."""
    for marker, start, _ in _segments(data):
        if marker in _START_OF_FRAME:
            bits = data[start + 4]
            if marker in _PROCESSES and bits == 8:
                return None
            return f"samples of {bits} bits in JPEG's process SOF{marker - 0xC0}, expected 8 in SOF0 to SOF2"
    return None


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment up to the first scan."""
    position = 2
    # Other bytes between segments are skipped.
    while (position := data.find(b"\xff", position)) >= 0 and position + 5 <= len(data):
        marker, length = struct.unpack_from(">BH", data, position + 1)
        if marker in (0x00, 0xFF):
            position += 1
            continue
        yield marker, position, position + 2 + length
        if marker == _START_OF_SCAN:
            return
        position += 2 + length


def _pixel_data(data: bytes) -> tuple[bytes, bytes]:
    """Return a file without optional segments and padding, and its scans."""
    header, scan_header, end, frame = b"\xff\xd8", b"", 2, 0
    for marker, start, end in _segments(data):
        if marker in _NEEDED:
            header += data[start:end]
        if marker in _START_OF_FRAME:
            frame = marker
        if marker == _START_OF_SCAN:
            scan_header = data[start:end]
    if frame in _SEQUENTIAL:
        scan_header = scan_header[:-3] + b"\x00\x3f\x00"  # Without effect, but NOT_SEQUENTIAL would hide later warnings.
    last = data.find(_END_OF_IMAGE, end)
    scans = data[end : last if last >= 0 else len(data)]
    scans = scans[: len(scans.rstrip(b"\x00")) + 2]  # Two zeros may belong to the last pixels.
    return header + scan_header + scans + _END_OF_IMAGE, scans


def _has_all_restarts(scans: bytes) -> bool:
    """Return whether restart markers count from 0 to 7 again and again in each scan."""
    counted = [[marker[1] & 7 for marker in re.findall(rb"\xff[\xd0-\xd7]", scan)] for scan in scans.split(b"\xff\xda")]
    return all(indices == [index % 8 for index in range(len(indices))] for indices in counted)
