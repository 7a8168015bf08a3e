"""Files whose every byte is written here: rows of 16 samples, whose values and tags are literal."""

import struct
import zlib

import cv2
import numpy as np
import pytest

from extractors.images.decoding import DecodeError, decode_image

BITS, COMPRESSION, PHOTOMETRIC, FILL_ORDER, SAMPLES, PLANES = 258, 259, 262, 266, 277, 284
COLOR_MAP, SUBSAMPLING, EXTRA_SAMPLES, SAMPLE_FORMAT = 320, 530, 338, 339
RAMP = np.arange(16) * 17  # 0 17 34 ... 255
ORDERS = ["<", ">"]


def tiff(order: str, rows: list[bytes], tags: dict[int, object], *, width: int = 16, height: int = 1) -> bytes:
    """A file of one strip for each plane in ``rows``, with short values in ``tags``."""
    data = (b"II*\x00" if order == "<" else b"MM\x00*") + bytes(4)
    offsets = []
    for row in rows:
        offsets.append(len(data))
        data += row + bytes(len(row) % 2)
    entries = {256: width, 257: height, 273: offsets, 278: height, 279: [len(row) for row in rows], COMPRESSION: 1, **tags}
    directory = struct.pack(order + "H", len(entries))
    for tag, value in sorted(entries.items()):
        values = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(values)}H", *values)
        if len(packed) > 4:
            packed, data = struct.pack(order + "I", len(data)), data + packed
        directory += struct.pack(order + "HHI", tag, 3, len(values)) + packed.ljust(4, b"\x00")
    return data[:4] + struct.pack(order + "I", len(data)) + data[8:] + directory + bytes(4)


def samples(order: str, values, kind: str) -> bytes:
    return np.asarray(values).astype(np.dtype(kind).newbyteorder(order)).tobytes()


def grey(order: str, values, kind: str, *, compressed: bool = False, **tags) -> bytes:
    """A file of one row of grey values in which 0 is black."""
    row = samples(order, values, kind)
    fixed = {BITS: 8 * np.dtype(kind).itemsize, PHOTOMETRIC: 1, SAMPLES: 1, COMPRESSION: 8 if compressed else 1}
    return tiff(
        order, [zlib.compress(row) if compressed else row], fixed | {int(tag[1:]): value for tag, value in tags.items()}
    )


def row_of(data: bytes) -> list[int]:
    """The first row, after a check that it is grey."""
    row = np.asarray(decode_image(data))[0]
    assert (row == row[:, :1]).all()
    return row[:, 0].tolist()


def message_of(data: bytes) -> str:
    with pytest.raises(DecodeError, match="convert") as caught:
        decode_image(data)
    assert caught.value.reason == "unsupported"
    return str(caught.value)


@pytest.mark.parametrize("options", [{}, {"compressed": True}, {"t284": 2}], ids=["plain", "compressed", "planes"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["u1", "u2"])
def test_tiff_white_is_zero_is_inverted(order, kind, options):
    """A single sample has no planes, whatever its tag says."""
    values = RAMP * (257 if kind == "u2" else 1)
    expected = [255, 238, 221, 204, 187, 170, 153, 136, 119, 102, 85, 68, 51, 34, 17, 0]
    assert row_of(grey(order, values, kind, t262=0, **options)) == expected
    assert row_of(grey(order, values, kind, **options)) == expected[::-1]


def test_tiff_white_is_zero_is_scaled_after_inversion():
    values = [0, 128, 129, 20000, 65406, 65407, 65535] + [65535] * 9
    assert row_of(grey("<", values, "u2", t262=0))[:7] == [255, 255, 254, 177, 1, 0, 0]


def test_tiff_white_is_zero_with_reversed_bits_is_inverted():
    row = bytes(int(f"{byte:08b}"[::-1], 2) for byte in samples("<", RAMP * 257, "u2"))
    assert row_of(tiff("<", [row], {BITS: 16, PHOTOMETRIC: 0, SAMPLES: 1, FILL_ORDER: 2})) == (255 - RAMP).tolist()


def test_tiff_planes_of_reversed_bits_are_unsupported():
    tags = {BITS: [8] * 3, PHOTOMETRIC: 2, SAMPLES: 3, PLANES: 2, FILL_ORDER: 2}
    assert "separate planes" in message_of(tiff("<", [bytes(16)] * 3, tags))


@pytest.mark.parametrize("order", ORDERS)
def test_tiff_sample_value_range_is_ignored(order):
    """TIFF 6.0: MaxSampleValue "is not to be used to affect the visual appearance of an image"."""
    assert row_of(grey(order, RAMP * 16, "u2", t280=0, t281=4095)) == ((RAMP * 16 + 128) // 257).tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kind", "factor", "offset", "limits"),
    [
        ("i1", 1, 128, "from -128 to 127, expected 0 to 255"),
        ("i2", 257, 32768, "from -32768 to 32767, expected 0 to 65535"),
        ("i4", 257, 1, "from -1 to 65534, expected 0 to 65535"),
    ],
)
def test_tiff_signed_grey_is_scaled_unless_negative(order, kind, factor, offset, limits):
    assert row_of(grey(order, RAMP // 2 * factor, kind, t339=2)) == (RAMP // 2).tolist()
    assert limits in message_of(grey(order, RAMP * factor - offset, kind, t339=2))


@pytest.mark.parametrize("kind", ["i2", "i4"])
def test_tiff_compressed_signed_grey_big_endian_is_unsupported(kind):
    """Pillow swaps the bytes of big-endian values that libtiff has put in order already."""
    values = [256, 257] * 8
    assert row_of(grey("<", values, kind, compressed=True, t339=2)) == [1] * 16
    assert "compressed signed integers" in message_of(grey(">", values, kind, compressed=True, t339=2))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("photometric", [0, 1])
@pytest.mark.parametrize("bits", [6, 10, 12, 14, 24, 64])
def test_tiff_other_depths_are_unsupported(order, photometric, bits):
    message = message_of(tiff(order, [bytes(2 * bits)], {BITS: bits, PHOTOMETRIC: photometric, SAMPLES: 1}))
    assert ("12 bits, expected 8 or 16" in message) == ((order, photometric, bits) == ("<", 1, 12)), message


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("photometric", [0, 1])
def test_tiff_fewer_bits_are_scaled(order, bits, photometric):
    values = np.arange(16) % 2**bits
    packed = int("".join(f"{value:0{bits}b}" for value in values), 2).to_bytes(2 * bits, "big")
    expected = values * 255 // (2**bits - 1)
    expected = expected if photometric else 255 - expected
    assert row_of(tiff(order, [packed], {BITS: bits, PHOTOMETRIC: photometric, SAMPLES: 1})) == expected.tolist()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kind", "tags"),
    [
        ("u4", {"t262": 0}),
        ("f2", {"t339": 3}),
        ("f4", {"t339": 3}),
        ("f8", {"t339": 3}),
        ("u2", {"t262": 32803}),  # the mosaic of a camera
        ("u1", {"t262": 3, "t258": 16}),
        ("u1", {"t262": 4}),
        ("u1", {"t259": 34887}),  # LERC
        ("u1", {"t259": 50001}),  # WebP, which a library that can decode it may not have
    ],
)
def test_tiff_other_kinds_are_unsupported(order, kind, tags):
    assert message_of(grey(order, RAMP, kind, **tags))


@pytest.mark.parametrize(("order", "bits"), [("<", 8), (">", 8), ("<", 16)])
def test_tiff_without_photometric_interpretation_is_unsupported(order, bits):
    assert "0 may be black or white" in message_of(tiff(order, [bytes(2 * bits)], {BITS: bits, SAMPLES: 1}))


# --- colours -----------------------------------------------------------------------------------------------------------

COLOURS = np.stack([RAMP, RAMP[::-1], np.full(16, 51)], axis=-1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("extra", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("kind", ["u1", "u2"])
def test_tiff_colours_are_decoded_or_unsupported(order, planes, compressed, extra, kind):
    """Pillow takes uncompressed planes of 16 bits for bytes."""
    factor = 257 if kind == "u2" else 1
    values = np.concatenate([COLOURS * factor, np.full((16, len(extra)), 255 * factor)], axis=-1)
    rows = [samples(order, values, kind)] if planes == 1 else [samples(order, plane, kind) for plane in values.T]
    tags = {PHOTOMETRIC: 2, SAMPLES: 3 + len(extra), PLANES: planes}
    tags |= {BITS: [8 * np.dtype(kind).itemsize] * (3 + len(extra)), COMPRESSION: 8 if compressed else 1}
    tags |= {EXTRA_SAMPLES: list(extra)} if extra else {}
    data = tiff(order, [zlib.compress(row) for row in rows] if compressed else rows, tags)
    if planes == 2 and not compressed and (kind == "u2" or extra in [(0,), (1,)]):
        assert message_of(data)
    else:
        np.testing.assert_array_equal(np.asarray(decode_image(data))[0], COLOURS)


def test_tiff_premultiplied_colours_are_divided_by_alpha():
    values = np.concatenate([COLOURS * 128 // 255, np.full((16, 1), 128)], axis=-1)
    tags = {BITS: [8] * 4, PHOTOMETRIC: 2, SAMPLES: 4, EXTRA_SAMPLES: 1}
    found = np.asarray(decode_image(tiff("<", [samples("<", values, "u1")], tags)))[0]
    assert np.abs(found.astype(int) - COLOURS).max() <= 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("factor", [1, 256, 257])
def test_tiff_8_bit_palette_equals_opencv(order, factor):
    """As libtiff tells them apart; OpenCV reads the files with it."""
    palette = np.zeros((3, 256), int)
    palette[:, :16] = COLOURS.T * factor
    data = tiff(order, [bytes(range(16))], {BITS: 8, PHOTOMETRIC: 3, SAMPLES: 1, COLOR_MAP: palette.flatten().tolist()})
    np.testing.assert_array_equal(np.asarray(decode_image(data))[0], COLOURS)
    np.testing.assert_array_equal(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[0, :, ::-1], COLOURS)


def ycbcr(order: str, *, compressed: bool) -> bytes:
    """Grey of 16 values, in YCbCr without subsampling."""
    row = np.stack([RAMP, np.full(16, 128), np.full(16, 128)], axis=-1).astype(np.uint8).tobytes()
    tags = {BITS: [8] * 3, PHOTOMETRIC: 6, SAMPLES: 3, SUBSAMPLING: [1, 1], COMPRESSION: 8 if compressed else 1}
    return tiff(order, [zlib.compress(row) if compressed else row], tags)


@pytest.mark.parametrize("order", ORDERS)
def test_tiff_uncompressed_ycbcr_is_unsupported(order):
    """Pillow takes uncompressed YCbCr for RGBX."""
    assert row_of(ycbcr(order, compressed=True)) == RAMP.tolist()
    assert "YCbCr without compression" in message_of(ycbcr(order, compressed=False))


@pytest.mark.parametrize("photometric", [8, 9, 10])
def test_tiff_lab_is_unsupported(photometric):
    for kind in ("u1", "u2"):
        tags = {BITS: [8 * np.dtype(kind).itemsize] * 3, PHOTOMETRIC: photometric, SAMPLES: 3}
        assert message_of(tiff("<", [samples("<", COLOURS, kind)], tags))


def test_tiff_grey_with_alpha_needs_8_bits():
    values = np.stack([RAMP, RAMP[::-1]], axis=-1)
    tags = {BITS: [8, 8], PHOTOMETRIC: 1, SAMPLES: 2, EXTRA_SAMPLES: 2}
    assert row_of(tiff("<", [samples("<", values, "u1")], tags)) == RAMP.tolist()
    assert message_of(tiff("<", [samples("<", values, "u2")], tags | {BITS: [16, 16]}))
    assert message_of(tiff("<", [samples("<", values, "u1")], tags | {PHOTOMETRIC: 0}))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_tiff_corrupt_and_unsupported_files_have_different_reasons():
    whole = grey("<", RAMP, "u1")
    for data in (whole[:4] + b"\xff\xff\xff\x7f" + whole[8:], whole[:40]):
        with pytest.raises(DecodeError, match="the header cannot be read: the file is damaged or was cut off") as caught:
            decode_image(data)
        assert caught.value.reason == "decode_error"
