import numpy as np
import pytest

from extractors.weights.caffemodel import read_layers
from schemas.errors import InputError

LAYERS = {
    "conv1_1": [np.arange(24, dtype=np.float32).reshape(4, 3, 2, 1) / 7, np.array([1.5, -2, 3, 0], dtype=np.float32)],
    "fc6": [np.arange(300, dtype=np.float32).reshape(3, 100) * -0.25, np.array([9, 8, 7], dtype=np.float32)],
}


# --- a tiny writer of protobuf's wire format ---------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value %= 2**64
    out = b""
    while value >= 128:
        out += bytes([value % 128 + 128])
        value //= 128
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field * 8) + varint(value)


def message(field: int, content: bytes) -> bytes:
    return varint(field * 8 + 2) + varint(len(content)) + content


def blob(array: np.ndarray, *, legacy: bool = False, packed: bool = True, double: bool = False) -> bytes:
    if legacy:
        dims = (1,) * (4 - array.ndim) + array.shape
        shape = b"".join(number(i + 1, dim) for i, dim in enumerate(dims))
    elif packed:
        shape = message(7, message(1, b"".join(varint(dim) for dim in array.shape)))
    else:
        shape = message(7, b"".join(number(1, dim) for dim in array.shape))
    field, code = (8, "<d") if double else (5, "<f")
    return shape + message(field, array.astype(code).tobytes())


def layer(name: str, blobs: list[bytes], *, old: bool = False) -> bytes:
    name_field, blobs_field, layers_field = (4, 6, 2) if old else (1, 7, 100)
    kind = number(5, 4) if old else message(2, b"Convolution")
    content = message(3, b"top") + message(name_field, name.encode()) + kind
    return message(layers_field, content + b"".join(message(blobs_field, blob) for blob in blobs))


def net(layers: dict[str, list[np.ndarray]], *, old: bool = False, **options: bool) -> bytes:
    """Write a whole model, with other fields around the layers; ``packed`` is about shapes."""
    head = message(1, b"VGG_ILSVRC_19_layers") + message(3, b"data") + number(4, 10) + varint(99 * 8 + 1) + bytes(8)
    body = b"".join(layer(name, [blob(array, **options) for array in arrays], old=old) for name, arrays in layers.items())
    return head + layer("relu1_1", [], old=old) + body + varint(98 * 8 + 5) + bytes(4)


# --- reading -----------------------------------------------------------------------------------------------------------


def read(tmp_path, data: bytes) -> dict[str, list[np.ndarray]]:
    path = tmp_path / "net.caffemodel"
    path.write_bytes(data)
    return read_layers(path)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("double", [False, True])
def test_read_layers_reads_all_encodings(tmp_path, old, legacy, packed, double):
    found = read(tmp_path, net(LAYERS, old=old, legacy=legacy, packed=packed, double=double))
    assert list(found) == list(LAYERS)
    for name, arrays in LAYERS.items():
        for array, expected in zip(found[name], arrays, strict=True):
            assert array.dtype == np.float32
            np.testing.assert_array_equal(array, expected)


# --- refusing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_read_layers_cut_file_raises_or_has_fewer_layers(tmp_path, packed):
    data = net(LAYERS, packed=packed)
    whole = read(tmp_path, data)
    for size in range(0, len(data), 5):
        try:
            found = read(tmp_path, data[:size])
        except InputError:
            continue
        assert list(found) in (["conv1_1"], ["conv1_1", "fc6"])
        assert all(np.array_equal(a, b) for name in found for a, b in zip(found[name], whole[name], strict=True))


SHAPE_OF_FOUR = message(7, number(1, 4))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "has 0 bytes"),
        (message(1, b"only a name"), "has no layer with weights"),
        (b'name: "VGG"\nlayers { name: "conv1_1" }', "cannot be read as a .caffemodel"),
        (layer("x", [SHAPE_OF_FOUR + message(5, bytes(12))]), r"3 numbers for the shape \[4\]"),
        (layer("x", [SHAPE_OF_FOUR + message(5, bytes(15))]), "cannot be read as a .caffemodel"),
        (layer("x", [message(7, number(1, -4)) + message(5, bytes(16))]), r"4 numbers for the shape \[18446744073709551612\]"),
        (layer("x", [message(7, number(1, 2**40) * 2) + message(5, bytes(16))]), "4 numbers for the shape"),
        (layer("x", [message(7, message(1, varint(1) * 10**6)) + message(5, bytes(4))]), "more than 32 sides"),
        (layer("x", [blob(np.ones(2))]) * 2, "two layers are named 'x'"),
        (varint(100 * 8 + 2) + varint(2**62), "cannot be read as a .caffemodel"),
        (b"\x80" * 11, "cannot be read as a .caffemodel"),
    ],
)
def test_read_layers_malformed_file_raises(tmp_path, data, problem):
    with pytest.raises(InputError, match=problem):
        read(tmp_path, data)
