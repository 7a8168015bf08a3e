from __future__ import annotations

import io
import pickle
import struct
import sys
import zlib

import cv2
import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageFile, features

from extractors.images import decoding, formats
from extractors.images.decoding import DecodeError, decode_image
from extractors.images.formats import FORMATS, image_format

pillow_heif.register_heif_opener()  # For writing the files of the tests.
RAMP = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)


def encode(image: Image.Image, format: str = "PNG", **options) -> bytes:  # noqa: A002
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray:
    image = decode_image(data)
    assert image.mode == "RGB"
    return np.asarray(image)


def replicated(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[:, :, None], 3, axis=2)


def png(width: int, height: int, depth: int, color: int, rows: bytes, **chunks: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    data = chunk(b"IDAT", zlib.compress(rows))
    more = b"".join(chunk(name.encode(), body) for name, body in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + more + data + chunk(b"IEND", b"")


def noise(height: int = 64, width: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def reason_of(data: bytes, match: str = r"\w", **options) -> str:
    with pytest.raises(DecodeError, match=match) as caught:
        decode_image(data, **options)
    return caught.value.reason


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP", "JPEG2000", "PPM", "TGA", "ICO"])
def test_decode_image_lossless_formats_equal_stored_rgb(format):  # noqa: A002
    image = noise()
    options = {"WEBP": {"lossless": True}, "ICO": {"sizes": [image.size]}}.get(format, {})
    np.testing.assert_array_equal(pixels(encode(image, format, **options)), np.asarray(image))


@pytest.mark.parametrize("mode", ["L", "1"])
def test_decode_image_grey_is_replicated(mode):
    values = RAMP if mode == "L" else np.where(RAMP > 100, 255, 0).astype(np.uint8)
    np.testing.assert_array_equal(pixels(encode(Image.fromarray(values).convert(mode))), replicated(values))


@pytest.mark.parametrize("transparency", [None, 1, b"\x80\x00\xff"])
def test_decode_image_palette_ignores_transparency(transparency, recwarn):
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 128, 0, 1, 2, 3])
    image.putdata([0, 1, 2])
    options = {} if transparency is None else {"transparency": transparency}
    assert pixels(encode(image, **options)).tolist() == [[[255, 0, 0], [0, 128, 0], [1, 2, 3]]]
    assert not recwarn.list


@pytest.mark.parametrize("alpha", [0, 7, 255])
def test_alpha_is_dropped_not_composited(alpha):
    assert pixels(encode(Image.new("RGBA", (2, 2), (10, 20, 30, alpha)))).tolist() == [[[10, 20, 30]] * 2] * 2
    assert pixels(encode(Image.new("LA", (2, 2), (90, alpha)))).tolist() == [[[90] * 3] * 2] * 2


def test_16_bit_grey_is_scaled_and_rounded():
    values = np.array([[0, 128, 129, 257, 385, 386, 32768, 65407, 65535]], dtype=np.uint16)
    expected = np.round(values / 257).astype(np.uint8)
    assert expected.tolist() == [[0, 0, 1, 1, 1, 2, 128, 255, 255]]
    for format in ("PNG", "TIFF"):  # noqa: A001
        np.testing.assert_array_equal(pixels(encode(Image.fromarray(values), format)), replicated(expected))


def test_16_bit_rgb_and_grey_with_alpha_give_the_high_byte():
    rgb = png(1, 1, 16, 2, b"\x00" + struct.pack(">HHH", 0x12FF, 0x80FF, 0xFF00))
    assert pixels(rgb).tolist() == [[[0x12, 0x80, 0xFF]]]
    grey_alpha = png(1, 1, 16, 4, b"\x00" + struct.pack(">HH", 0x42FF, 0x0100))
    assert pixels(grey_alpha).tolist() == [[[0x42] * 3]]


@pytest.mark.parametrize("chunk", [{"tRNS": b"\x42\x42"}, {"gAMA": b"\x00\x01\x86\xa0"}, {"sBIT": b"\x0c"}])
def test_decode_image_png_ignores_transparency_gamma_and_significant_bits(chunk):
    """Samples of fewer significant bits are scaled to all bits by who writes the file (PNG 13.12)."""
    values = np.arange(16) * 0x111  # 12 bits
    row = b"\x00" + (values << 4 | values >> 8).astype(">u2").tobytes()
    assert pixels(png(16, 1, 16, 0, row, **chunk))[0, :, 0].tolist() == [17 * value for value in range(16)]


def test_decode_image_cmyk_tiff_and_adobe_inverted_jpeg_have_intended_colour():
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert pixels(encode(red, "TIFF")).tolist() == [[[255, 0, 0]] * 16] * 16
    jpeg = encode(red, "JPEG", quality=100)
    assert b"Adobe" in jpeg  # Pillow writes CMYK as Photoshop does: inverted, with Adobe's marker
    assert np.abs(pixels(jpeg).astype(int) - [255, 0, 0]).max() <= 2


def test_decode_image_cmyk_jpeg_is_inverted_without_adobe_marker_and_as_ycck():
    data = encode(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    at = data.index(b"\xff\xee") + 16
    np.testing.assert_array_equal(pixels(data[: at - 16] + data[at:]), pixels(data))
    ycck = pixels(data[: at - 1] + b"\x02" + data[at:])  # The same samples are Y 255, Cb 0, Cr 0, and no black.
    assert np.abs(ycck - np.array([1.402 * 128, 0, 1.772 * 128])).max() <= 1


# --- the other formats -----------------------------------------------------------------------------------------------

RAMP_16 = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64)


def jp2(array: np.ndarray) -> bytes:
    """Without loss, by OpenCV."""
    encoded, data = cv2.imencode(".jp2", np.ascontiguousarray(array[..., ::-1] if array.ndim == 3 else array))
    assert encoded
    return data.tobytes()


@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_decode_image_lossy_formats_are_near_original(format):  # noqa: A002
    values = np.add.outer(np.arange(64), np.arange(64))[:, :, None] + np.array([0, 60, 120])
    image = Image.fromarray(values.astype(np.uint8))
    assert np.abs(pixels(encode(image, format, quality=95)).astype(int) - np.asarray(image)).max() < 12


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"P2\n3 1\n100\n0 50 100\n", [0, 128, 255]),
        (b"P5\n3 1\n100\n\x00\x32\x64", [0, 128, 255]),
        (b"P5 2 1 65535\n" + struct.pack(">HH", 20000, 65535), [78, 255]),
        (b"P5 2 1 4095\n" + struct.pack(">HH", 1250, 4095), [78, 255]),
        (b"P1 2 1\n1 0\n", [0, 255]),  # Bitmaps are black where they have ones.
        (b"P4 2 1\n\x80", [0, 255]),
    ],
)
def test_pgm_and_pbm_are_scaled_to_their_maximum(data, expected):
    assert pixels(data).tolist() == [[[value] * 3 for value in expected]]


def test_ppm_is_scaled_to_its_maximum():
    assert pixels(b"P3 1 1 15\n0 5 15\n").tolist() == [[[0, 85, 255]]]
    colours = np.stack([RAMP_16, RAMP_16[::-1], RAMP_16.T], axis=-1)
    data = b"P6 64 64 65535\n" + colours.astype(">u2").tobytes()
    np.testing.assert_array_equal(pixels(data), np.round(colours / 257))


def test_decode_image_15_bit_tga_begins_at_the_bottom():
    header = struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 2, 2, 16, 0)
    rows = struct.pack("<HHHH", 0x7C00, 0x03E0, 0x001F, 0x7FFF)  # Red and green, above them blue and white.
    assert pixels(header + rows + bytes(26)).tolist() == [[[0, 0, 255], [255, 255, 255]], [[255, 0, 0], [0, 255, 0]]]


def test_decode_image_tga_palette_is_applied():
    header = struct.pack("<BBBHHBHHHHBB", 0, 1, 1, 0, 2, 24, 0, 0, 2, 1, 8, 0x20)
    palette = b"\x00\x00\xff" + b"\x00\x80\x00"  # Blue, green, red.
    assert pixels(header + palette + b"\x01\x00").tolist() == [[[0, 128, 0], [255, 0, 0]]]


@pytest.mark.parametrize("bitmap_format", ["png", "bmp"])
def test_decode_image_icon_reads_largest_image(bitmap_format):
    image = Image.new("RGBA", (48, 48), (10, 20, 30, 0))
    data = encode(image, "ICO", sizes=[(16, 16), (48, 48), (32, 32)], bitmap_format=bitmap_format)
    decoded = decode_image(data, max_pixels=48 * 48)
    assert (decoded.size, decoded.getpixel((5, 5))) == ((48, 48), (10, 20, 30))
    assert reason_of(data, max_pixels=48 * 48 - 1) == "too_large"


def test_grey_of_jpeg_2000_has_up_to_16_bits():
    np.testing.assert_array_equal(pixels(jp2(RAMP_16)), replicated(np.round(RAMP_16 / 257).astype(np.uint8)))


def test_decode_image_jpeg_2000_12_bit_grey_is_scaled():
    values = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    # The encoder stores the distance from the middle: of these values in 16 bits it is that of `values` in 12 bits.
    data = bytearray(encode(Image.fromarray(values + 32768 - 2048), "JPEG2000", no_jp2=True))
    assert (bytes(data[40:42]), data[42]) == (b"\x00\x01", 15)
    data[42] = 11
    decoded = pixels(bytes(data))[:, :, 0]
    assert np.abs(decoded - np.round(values / 4095 * 255)).max() <= 1
    assert decoded[[0, -1], [0, -1]].tolist() == [0, 255]


def test_colours_of_16_bits_in_jpeg_2000_are_unsupported():
    """Pillow makes 0 of the brightest values."""
    data = jp2(np.full((64, 64, 3), 65500, dtype=np.uint16))
    assert np.asarray(Image.open(io.BytesIO(data))).max() == 0
    assert reason_of(data, "the samples have 16 bits, expected 8, or 8 to 16 for grey without alpha") == "unsupported"


def jpeg_2000_of_4_bits() -> bytes:
    """White, of which Pillow makes 240: it shifts fewer bits than 8."""
    data = bytearray(encode(Image.new("L", (64, 64), 15), "JPEG2000", no_jp2=True))
    data[42] = 3
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        *(encode(Image.fromarray(np.array([[0, value]], dtype=np.int32)), "TIFF") for value in (-1, 65536)),
        b"Pf\n1 1\n-1.0\n" + struct.pack("<f", 0.5),
        jpeg_2000_of_4_bits(),
    ],
    ids=["negative grey of 32 bits", "grey beyond 16 bits", "floats of a PFM", "JPEG 2000 of 4 bits"],
)
def test_decode_image_samples_of_other_ranges_are_unsupported(data):
    assert reason_of(data) == "unsupported"


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF", "MPO", "AVIF", "HEIF"])
def test_decode_image_several_frames_reads_the_first_or_primary(format):  # noqa: A002
    frames = [Image.new("RGB", (64, 64), color) for color in ((200, 0, 0), (0, 0, 200))]
    options = {"primary_index": 1} if format == "HEIF" else {}
    data = encode(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert np.abs(pixels(data).astype(int) - ([0, 0, 200] if options else [200, 0, 0])).max() <= 3


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("format", ["AVIF", "HEIF"])
def test_orientation_of_avif_and_heic_is_part_of_the_format(format, orientation):  # noqa: A002
    corner = np.zeros((64, 48, 3), np.uint8)
    corner[:32, :24] = 200
    exif = Image.Exif()
    exif[0x0112] = orientation  # Both encoders write it as a property of the image.
    turned = np.rot90(corner, k={1: 0, 3: 2, 6: -1, 8: 1}[orientation])
    found = pixels(encode(Image.fromarray(corner), format, exif=exif.tobytes(), quality=95))
    assert found.shape == turned.shape
    assert np.abs(found.astype(int) - turned).mean() < 3


@pytest.mark.parametrize("depth", [10, 12])
def test_deep_colours_of_avif_become_8_bits(depth):
    grey = np.full((64, 64, 3), 700 << (depth - 10), np.uint16)
    encoded, data = cv2.imencode(".avif", grey, [cv2.IMWRITE_AVIF_DEPTH, depth, cv2.IMWRITE_AVIF_QUALITY, 100])
    assert encoded
    assert np.abs(pixels(data.tobytes()).astype(float) - 700 / 1023 * 255).max() <= 1


@pytest.mark.parametrize(("mode", "bands"), [("RGB;16", 3), ("I;16", 1)])
def test_deep_colours_and_grey_of_heic_become_8_bits(mode, bands):
    data = io.BytesIO()
    pillow_heif.from_bytes(mode, (64, 64), np.full((64, 64, bands), 40000, np.uint16).tobytes()).save(data, quality=-1)
    assert np.abs(pixels(data.getvalue()).astype(float) - 40000 / 257).max() <= 1


# --- whole files of kinds that are not decoded --------------------------------------------------------------------------


def bmp(bits: int, compression: int, masks: bytes = b"") -> bytes:
    header = struct.pack("<IiiHHIIiiII", 40, 4, 2, 1, bits, compression, 0, 0, 0, 0, 0) + masks
    return b"BM" + struct.pack("<IHHI", 14 + len(header) + 64, 0, 0, 14 + len(header)) + header + bytes(64)


@pytest.mark.parametrize(
    "data",
    [
        bmp(16, 3, struct.pack("<III", 0xF00, 0xF0, 0xF)),
        bmp(32, 3, struct.pack("<III", 0x3FF00000, 0xFFC00, 0x3FF)),
        bmp(64, 0),
        bmp(2, 0),
        bmp(0, 4),  # a JPEG in it
        struct.pack("<BBBHHBHHHHBB", 0, 1, 1, 0, 2, 32, 0, 0, 2, 1, 8, 0x20) + bytes(16),  # a palette of four bytes each
        struct.pack("<BBBHHBHHHHBB", 0, 1, 1, 0, 2, 24, 0, 0, 2, 1, 16, 0x20) + bytes(18) + b"TRUEVISION-XFILE.\x00",
    ],
)
def test_decode_image_bmp_and_tga_variants_without_pillow_support_are_unsupported(data):
    assert reason_of(data, r"has a layout that is not supported \(.+\): convert it to 8-bit RGB") == "unsupported"


@pytest.mark.parametrize(
    ("start_of_frame", "bits", "process"), [(0xC0, 12, 0), (0xC1, 12, 1), (0xC3, 8, 3), (0xC5, 8, 5), (0xF7, 8, 55)]
)
def test_jpeg_of_other_processes_is_unsupported(start_of_frame, bits, process):
    data = bytearray(encode(Image.fromarray(RAMP), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 1], data[at + 4] = start_of_frame, bits
    assert reason_of(bytes(data), f"samples of {bits} bits in JPEG's process SOF{process}, expected 8") == "unsupported"


# --- orientation, frames ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_is_not_applied(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for format in ("PNG", "JPEG"):  # noqa: A001
        rotated = decode_image(encode(noise(), format, exif=exif))
        assert rotated.size == (48, 64)
        np.testing.assert_array_equal(np.asarray(rotated), pixels(encode(noise(), format)))


def test_orientation_of_tiff_is_part_of_the_format():
    data = encode(noise(), "TIFF", tiffinfo={274: 6})
    np.testing.assert_array_equal(pixels(data), np.rot90(np.asarray(noise()), k=-1))


@pytest.mark.parametrize("data", [b"", b"\x00" * 100, b"<html>not found</html>", b"%PDF-1.4 ...", b"GIF"])
def test_decode_image_other_bytes_are_not_an_image(data):
    assert reason_of(data) == ("not_an_image" if data else "empty")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("part", [0.5, 0.9])
def test_decode_image_cut_file_fails(format, part):  # noqa: A002
    data = encode(noise(), format)
    reason = reason_of(data[: int(len(data) * part)])
    assert reason == "truncated" or (reason == "decode_error" and format not in ("JPEG", "PNG", "GIF", "BMP", "PPM", "TGA"))


def test_decode_image_damaged_header_is_decode_error():
    assert reason_of(b"\x89PNG\r\n\x1a\n" + bytes(50), "begin like PNG, but the header cannot be read") == "decode_error"
    jpeg = encode(noise(), "JPEG")
    assert reason_of(jpeg[: jpeg.index(b"\xff\xc0")], "begin like JPEG") == "decode_error"


def test_decode_image_png_with_another_checksum_of_pixels_is_decode_error():
    data = encode(noise())
    at = data.index(b"IEND") - 8
    assert reason_of(data[:at] + bytes(4) + data[at + 4 :], "checksum of the pixel data differs") == "decode_error"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_decode_image_max_pixels_are_counted_in_the_header():
    bomb = png(10_000, 10_000, 8, 2, b"")  # has no pixels: decoding it would fail for another reason
    assert reason_of(bomb, "10000×10000 pixels, expected at most 99999999 in all", max_pixels=99_999_999) == "too_large"
    assert reason_of(bomb, max_pixels=100_000_000) != "too_large"


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("is_icon", [False, True])
def test_decode_image_default_limit_equals_pillow_limit(is_icon, monkeypatch):
    bomb = png(20_000, 20_000, 8, 2, b"")
    if is_icon:
        small = encode(Image.new("RGB", (1, 1)))
        entries = ((1, len(small), 38), (0, len(bomb), 38 + len(small)))
        packed = [struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, size, at) for side, size, at in entries]
        bomb = struct.pack("<HHH", 0, 1, 2) + b"".join(packed) + small + bomb
    assert reason_of(bomb) == "too_large"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert reason_of(bomb) == "too_large"


def test_decode_image_pillow_tolerating_truncation_raises(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(Exception, match="LOAD_TRUNCATED_IMAGES is True in this process"):
        decode_image(encode(noise()))


def test_decode_error_can_be_pickled_and_has_a_known_reason():
    error = pickle.loads(pickle.dumps(DecodeError("empty", "no bytes")))
    assert (error.reason, str(error)) == ("empty", "no bytes")
    with pytest.raises(ValueError, match="reason is 'other', expected one of"):
        DecodeError("other", "")


def encode_as(format: str, mode: str = "RGB", **options) -> bytes:  # noqa: A002
    return encode(Image.linear_gradient("L").resize((32, 32)).convert(mode), format, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_image_format_of_files_from_pillow_is_detected(name):
    assert image_format(encode_as(name)) == name
    assert Image.open(io.BytesIO(encode_as(name))).format == name


@pytest.mark.parametrize("compression", [None, "tga_rle"])
@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA"])
def test_image_format_of_tga_needs_no_footer(mode, compression):
    data = encode_as("TGA", mode, compression=compression)
    assert data.endswith(b"TRUEVISION-XFILE.\x00")
    assert image_format(data) == image_format(data[:-26]) == "TGA"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"P",
        b"P5",
        b"P9\n1 1\n255\n",
        *(encode_as(name) for name in ("EPS", "PDF", "PCX", "SGI", "DDS")),
        b"\x00\x00\x02\x00\x01\x00\x20\x20\x00\x00\x01\x00\x01\x00\xa8\x10\x00\x00\x16\x00",  # a cursor
        b"\x00\x00\x02\x00\x06\x04\x06\x00\x08\x00\x00\x00\x00\x00\x00\x00\x00\x00",  # Lotus 1-2-3
        b"\x00\x00\x01\xba" + bytes(range(40)),  # an MPEG program stream
        b"\x00\x01\x00\x00\x00\x0f\x00\x80" + bytes(30),  # a TrueType font
        b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom",  # a film
        struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 0, 5, 24, 0),  # TGA of width 0
        struct.pack("<BBBHHBHHHHBB", 0, 0, 2, 0, 0, 0, 0, 0, 5, 5, 12, 0),  # TGA of 12 bits
        struct.pack("<BBBHHBHHHHBB", 3, 0, 1, 0, 0, 0, 0, 0, 5, 5, 8, 0),  # TGA of indices without a palette
    ],
)
def test_image_format_of_other_files_is_none(data):
    assert image_format(data) is None


def test_image_format_of_container_reads_all_brands():
    def box(*brands: bytes) -> bytes:
        return struct.pack(">I", 12 + 4 * len(brands)) + b"ftyp" + brands[0] + bytes(4) + b"".join(brands[1:])

    assert image_format(box(b"mif1", b"miaf", b"avif")) == "AVIF"
    assert image_format(box(b"mif1", b"miaf", b"heic")) == "HEIF"
    assert image_format(box(b"mif1")) == "HEIF"
    assert image_format(box(b"isom", b"mp42") + b"avif") is None


def test_decode_image_without_its_decoder_is_unsupported(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.setattr(formats, "_register_heif", formats._register_heif.__wrapped__)
    assert reason_of(encode_as("HEIF"), r"bytes are HEIF, .* pip install 'imagepivot\[heif\]'") == "unsupported"
    monkeypatch.setattr(features, "get_supported", list)
    for name in ("AVIF", "WEBP"):
        assert reason_of(encode_as(name), f"bytes are {name}, and this build of Pillow has no decoder") == "unsupported"


def test_decode_image_jpeg_2000_with_a_box_of_64_bits_is_decode_error():
    """Reproduces a file whose box, of 2**64 - 1 bytes, ended a run with an OverflowError."""
    header = b"\0\0\0\x0cjP  \r\n\x87\n" + struct.pack(">I4s4sI4s", 20, b"ftyp", b"jp2 ", 0, b"jp2 ")
    assert reason_of(header + struct.pack(">I4sQ", 1, b"xxxx", 2**64 - 1) + bytes(64), "OverflowError") == "decode_error"


def test_decode_image_without_memory_for_the_pixels_is_too_large(monkeypatch):
    def fail(image):
        raise MemoryError

    monkeypatch.setattr(decoding, "_to_rgb", fail)
    assert reason_of(encode(noise()), "its pixels do not fit into this process's memory") == "too_large"
