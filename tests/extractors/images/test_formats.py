"""Formats are told by the content of a file, and a decoder that is missing is named."""

import io
import struct
import sys

import pillow_heif
import pytest
from PIL import Image, features

from extractors.images import formats
from extractors.images.decoding import DecodeError, decode
from extractors.images.formats import FORMATS, format_of, missing_decoder

pillow_heif.register_heif_opener()  # For writing the files of the tests.


def encode(format: str, mode: str = "RGB", **options) -> bytes:  # noqa: A002
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).convert(mode).save(buffer, format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_what_pillow_writes_is_recognised(name):
    assert format_of(encode(name)) == name
    assert Image.open(io.BytesIO(encode(name))).format == name


@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_every_kind_of_ppm_is_one(mode):
    assert format_of(encode("PPM", mode)) == "PPM"
    assert format_of(b"P1\n# by hand\n1 1\n0\n") == "PPM"


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")),
        *((mode, {"compression": "tga_rle"}) for mode in ("L", "LA", "P", "RGB", "RGBA")),
    ],
)
def test_a_tga_is_one_with_and_without_its_footer(mode, options):
    data = encode("TGA", mode, **options)
    assert data.endswith(b"TRUEVISION-XFILE.\x00")
    assert format_of(data) == format_of(data[:-26]) == "TGA"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"P",
        b"P5",
        b"P9\n1 1\n255\n",
        b"PK\x03\x04" + bytes(40),
        bytes(100),
        b"<!DOCTYPE html><html>",
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
def test_other_files_are_none(data):
    assert format_of(data) is None


def test_containers_are_told_by_all_their_brands():
    def box(*brands: bytes) -> bytes:
        return struct.pack(">I", 12 + 4 * len(brands)) + b"ftyp" + brands[0] + bytes(4) + b"".join(brands[1:])

    assert format_of(box(b"mif1", b"miaf", b"avif")) == "AVIF"
    assert format_of(box(b"mif1", b"miaf", b"heic")) == "HEIF"
    assert format_of(box(b"mif1")) == "HEIF"
    assert format_of(box(b"isom", b"mp42") + b"avif") is None


def test_heic_without_the_extra_says_which_one(monkeypatch):
    data = encode("HEIF")
    assert decode(data).size == (32, 32)
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    formats._register_heif.cache_clear()
    try:
        with pytest.raises(
            DecodeError, match=r"bytes are HEIF, and .* not installed: pip install 'imagepivot\[heif\]'"
        ) as caught:
            decode(data)
    finally:
        formats._register_heif.cache_clear()
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize("name", ["AVIF", "WEBP"])
def test_a_pillow_without_a_codec_says_so(monkeypatch, name):
    supported = [feature for feature in features.get_supported() if feature != name.lower()]
    monkeypatch.setattr(features, "get_supported", lambda: supported)
    with pytest.raises(DecodeError, match=rf"bytes are {name}, and this build of Pillow has no decoder for it") as caught:
        decode(encode(name))
    assert caught.value.reason == "unsupported"


@pytest.mark.parametrize(
    ("name", "options", "codec"),
    [("JPEG2000", {}, "jpeg2k"), ("JPEG", {}, "jpeg"), ("TIFF", {"compression": "tiff_lzw"}, "libtiff")],
)
def test_a_codec_that_pillow_misses_while_it_decodes(monkeypatch, name, options, codec):
    data = encode(name, **options)
    monkeypatch.delattr(Image.core, f"{codec}_decoder")
    with pytest.raises(DecodeError, match=rf"cannot decode the {name} file .*decoder {codec} not available") as caught:
        decode(data)
    assert caught.value.reason == "unsupported"


def test_this_build_has_them_all():
    assert [missing_decoder(name) for name in FORMATS] == [None] * len(FORMATS)
