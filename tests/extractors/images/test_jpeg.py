from __future__ import annotations

import io
import struct

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from extractors.images.decoding import DecodeError, decode_image

END = b"\xff\xd9"
DEPTHS = np.mgrid[0:256, 0:256]


def jpeg(**options) -> bytes:
    y, x = DEPTHS
    values = np.stack([x, y, (x + y) // 2], -1) * 0.7 + np.random.default_rng(3).integers(0, 70, (256, 256, 3))
    image = Image.fromarray(values.astype(np.uint8)).convert(options.pop("mode", "RGB"))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def warning_of(data: bytes) -> str:
    """By libjpeg itself."""
    colorspace = "CMYK" if Image.open(io.BytesIO(data)).mode == "CMYK" else "RGB"
    with pytest.raises(ValueError, match=r"\w") as caught:
        simplejpeg.decode_jpeg(data, colorspace=colorspace)
    return str(caught.value)


def reason_of(data: bytes) -> str:
    with pytest.raises(DecodeError, match=r"the JPEG file .*fetch it again") as caught:
        decode_image(data)
    return caught.value.reason


def middle(data: bytes) -> int:
    return (data.index(b"\xff\xda") + len(data)) // 2


def closed(data: bytes) -> bytes:
    return data[: middle(data)] + END


def zeros(data: bytes, count: int = 600) -> bytes:
    return data[: middle(data)] + bytes(count) + data[middle(data) + count :]


def hole(data: bytes) -> bytes:
    return data[: middle(data)] + data[middle(data) + 700 :]


def sparse(data: bytes) -> bytes:
    """As a download leaves a file whose space was reserved."""
    return zeros(data, len(data) - middle(data))


def sparse_and_closed(data: bytes) -> bytes:
    return sparse(data)[:-2] + END


def without_restart(data: bytes) -> bytes:
    return data[: data.index(b"\xff\xd2")] + data[data.index(b"\xff\xd3") :]


def without_scan(data: bytes) -> bytes:
    """Without the second scan of a progressive file, which later ones refine."""
    starts = [at for at in range(len(data)) if data.startswith(b"\xff\xda", at)]
    tables = data.rindex(b"\xff\xc4", 0, starts[1])
    next_tables = data.rindex(b"\xff\xc4", 0, starts[2])
    return data[:tables] + data[next_tables:]


def with_segment(data: bytes, marker: int, body: bytes) -> bytes:
    return data[:2] + struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body + data[2:]


def of_jfif_7(data: bytes) -> bytes:
    return data.replace(b"JFIF\x00\x01", b"JFIF\x00\x07", 1)


def of_adobe_transform_7(data: bytes) -> bytes:
    """Without JFIF's segment, which goes first."""
    return with_segment(data[:2] + data[20:], 0xEE, b"Adobe\x00\x64\x00\x00\x00\x00\x07")


def of_zero_scan_parameters(data: bytes) -> bytes:
    at = data.index(b"\xff\xda\x00\x0c") + 11
    return data[:at] + bytes(3) + data[at + 3 :]


def of_header_garbage(data: bytes) -> bytes:
    return data[:20] + b"garbage" + data[20:]


def noisy(count: int) -> bytes:
    return np.random.default_rng(0).integers(1, 255, count, dtype=np.uint8).tobytes()


def without_restart_but_noise(data: bytes) -> bytes:
    at = data.index(b"\xff\xd1")
    return without_restart(data[:at] + noisy(200) + data[at:])


LOSSES = {
    "HIT_MARKER, closed": (closed, {}, "premature end of data segment", "truncated"),
    "HIT_MARKER, progressive, closed": (closed, {"progressive": True}, "premature end of data segment", "truncated"),
    "HIT_MARKER, hole": (hole, {}, "premature end of data segment", "truncated"),
    "HIT_MARKER, progressive, hole": (hole, {"progressive": True}, "premature end of data segment", "truncated"),
    "HUFF_BAD_CODE": (zeros, {"progressive": True}, "bad Huffman code", "decode_error"),
    "EXTRANEOUS_DATA, zeros": (zeros, {}, "extraneous bytes before marker 0xd9", "decode_error"),
    "EXTRANEOUS_DATA, sparse": (sparse_and_closed, {}, "extraneous bytes before marker 0xd9", "truncated"),
    "JPEG_EOF, sparse": (sparse, {}, "Premature end of JPEG file", "truncated"),
    "JPEG_EOF, progressive, sparse": (sparse, {"progressive": True}, "Premature end of JPEG file", "truncated"),
    "JPEG_EOF, cut": (lambda data: data[: middle(data)], {}, "Premature end of JPEG file", "truncated"),
    "MUST_RESYNC": (without_restart, {"restart_marker_blocks": 32}, "found marker 0xd3 instead of RST2", "decode_error"),
    "EXTRANEOUS_DATA, restart": (
        *(without_restart_but_noise, {"restart_marker_blocks": 32}),
        *("extraneous bytes before marker 0xd1", "decode_error"),
    ),
    "BOGUS_PROGRESSION": (without_scan, {"progressive": True}, "Inconsistent progression sequence", "decode_error"),
    "grey": (closed, {"mode": "L"}, "premature end of data segment", "truncated"),
    "CMYK": (closed, {"mode": "CMYK"}, "premature end of data segment", "truncated"),
}
HARMLESS = {
    "EXTRANEOUS_DATA, noise": (lambda data: data[:-2] + noisy(200) + END, "extraneous bytes before marker 0xd9"),
    "EXTRANEOUS_DATA, padding": (lambda data: data[:-2] + bytes(200) + END, "extraneous bytes before marker 0xd9"),
    "EXTRANEOUS_DATA, header": (of_header_garbage, "7 extraneous bytes before marker 0xdb"),
    "JPEG_EOF, padding": (lambda data: data[:-2] + bytes(5000), "Premature end of JPEG file"),
    "NOT_SEQUENTIAL": (of_zero_scan_parameters, "Invalid SOS parameters"),
    "ADOBE_XFORM": (of_adobe_transform_7, "Unknown Adobe color transform code 7"),
    "JFIF_MAJOR": (of_jfif_7, "unknown JFIF revision number 7"),
    "BOGUS_ICC": (lambda data: with_segment(data, 0xE2, b"ICC_PROFILE\x00\x05\x02" + bytes(9)), "bad ICC marker"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_decode_image_jpeg_that_lost_pixels_fails(case):
    damage, options, warning, reason = LOSSES[case]
    data = jpeg(**options)
    np.testing.assert_array_equal(np.asarray(decode_image(data)), by_pillow(data))
    assert warning in warning_of(damage(data))
    assert reason_of(damage(data)) == reason


@pytest.mark.parametrize("case", HARMLESS)
def test_decode_image_jpeg_with_harmless_warning_gives_all_pixels(case):
    change, warning = HARMLESS[case]
    whole = jpeg()
    data = change(whole)
    assert warning in warning_of(data)
    np.testing.assert_array_equal(np.asarray(decode_image(data)), by_pillow(data if case == "ADOBE_XFORM" else whole))


@pytest.mark.parametrize("change", [of_jfif_7, of_adobe_transform_7, of_zero_scan_parameters, of_header_garbage])
@pytest.mark.parametrize("damage", [closed, hole, zeros, sparse, sparse_and_closed])
def test_decode_image_jpeg_harmless_warning_hides_no_loss(change, damage):
    assert reason_of(change(damage(jpeg()))) in ("truncated", "decode_error")


@pytest.mark.parametrize("tail", [b"abc", bytes(5000), END, jpeg(quality=5)])
def test_decode_image_jpeg_ignores_bytes_behind_the_end(tail):
    np.testing.assert_array_equal(np.asarray(decode_image(jpeg() + tail)), by_pillow(jpeg()))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"optimize": True, "restart_marker_blocks": 3}, {"quality": 5}])
def test_decode_image_jpeg_equals_pillow(mode, options):
    image = Image.open(io.BytesIO(jpeg(quality=99))).convert(mode)
    for subsampling in range(3):
        for size in [(1, 1), (7, 9), (33, 16), (250, 131)]:
            buffer = io.BytesIO()
            image.crop((0, 0, *size)).save(buffer, "JPEG", subsampling=subsampling, **options)
            np.testing.assert_array_equal(np.asarray(decode_image(buffer.getvalue())), by_pillow(buffer.getvalue()))


def test_decode_image_jpeg_photographs_equal_pillow(photos):
    paths = sorted((photos / "images").glob("*.jpg"))
    assert len(paths) == 12
    for path in paths:
        np.testing.assert_array_equal(np.asarray(decode_image(path.read_bytes())), by_pillow(path.read_bytes()))
