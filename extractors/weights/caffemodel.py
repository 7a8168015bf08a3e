"""Safe reader of ``.caffemodel`` weights by protobuf, without Caffe.

A ``.caffemodel`` is a serialised ``NetParameter`` of Caffe's ``src/caffe/proto/caffe.proto``. `_MESSAGES` has
the fields that are read; others are skipped. Arrays are declared as bytes, which packed numbers are, so that
numpy reads them without a Python object for each number. Caffe writes all arrays packed. No code is run.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from schemas.errors import InputError

MAX_BYTES = 2**31 - 1
"""Maximum file size, protobuf's own limit."""

_MAX_DIMS = 32
_LEGACY_DIMS = ("num", "channels", "height", "width")
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "BlobShape": {"dim": (1, "uint64")},
    "BlobProto": {
        **{name: (number, "uint64") for number, name in enumerate(_LEGACY_DIMS, start=1)},
        "data": (5, "bytes"),
        "shape": (7, "BlobShape"),
        "double_data": (8, "bytes"),
    },
    "V1LayerParameter": {"name": (4, "bytes"), "blobs": (6, "BlobProto")},
    "LayerParameter": {"name": (1, "bytes"), "blobs": (7, "BlobProto")},
    "NetParameter": {"layers": (2, "V1LayerParameter"), "layer": (100, "LayerParameter")},  # Until 2014, and later.
}
"""Number and type of each field of a message. All are read as repeated ones, as the pieces of an array may be."""


def read_layers(path: Path) -> dict[str, list[np.ndarray]]:
    """Read the blobs of all layers with weights.

    Returns:
        float32 arrays of each layer by name, in file order: usually weight and bias. Legacy four-number shapes lose leading ones.

    Raises:
        InputError: the file is no ``.caffemodel``, truncated or otherwise corrupt, or too large.
    """
    from google.protobuf.message import DecodeError

    size = path.stat().st_size
    if not 0 < size <= MAX_BYTES:
        raise InputError(
            f"the weights file {str(path)!r} has {size} bytes, expected a .caffemodel of 1 to {MAX_BYTES}: download it again"
        )
    layers: dict[str, list[np.ndarray]] = {}
    try:
        net = _net_class().FromString(path.read_bytes())
        for layer in (*net.layers, *net.layer):
            name = b"".join(layer.name[-1:]).decode("utf-8", errors="replace")
            if layer.blobs and name in layers:
                raise ValueError(f"two layers are named {name!r}")
            if layer.blobs:
                layers[name] = [_read_blob(blob) for blob in layer.blobs]
    except (DecodeError, ValueError, OverflowError) as error:
        raise InputError(
            f"the weights file {str(path)!r} cannot be read as a .caffemodel ({error}): it is truncated, "
            "corrupt or of another kind; download it again"
        ) from error
    if not layers:
        raise InputError(
            f"the weights file {str(path)!r} has no layer with weights, expected a trained .caffemodel, not "
            "the definition of a network (prototxt) or a solver state"
        )
    return layers


@cache
def _net_class() -> Any:
    """Return the class of ``NetParameter``."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="imagepivot/caffe.proto", package="imagepivot.caffe")
    for message, fields in _MESSAGES.items():
        described = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            field = described.field.add(name=name, number=number, label=field_types.LABEL_REPEATED)
            if kind in _MESSAGES:
                field.type, field.type_name = field_types.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                field.type = field_types.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.NetParameter"))


def _read_blob(blob: Any) -> np.ndarray:
    """Read an array as float32."""
    if blob.shape:
        shape = [side for part in blob.shape for side in part.dim]
    else:
        # Blobs before 2015 always have four dimensions; matrices and vectors have leading ones.
        sides = [(getattr(blob, name) or [0])[-1] for name in _LEGACY_DIMS]
        first = next((index for index, side in enumerate(sides) if side != 1), len(sides) - 1)
        shape = sides[first:]
    if len(shape) > _MAX_DIMS:
        raise ValueError(f"a shape of more than {_MAX_DIMS} sides")
    parts = [np.frombuffer(b"".join(content), dtype) for content, dtype in ((blob.data, "<f4"), (blob.double_data, "<f8"))]
    values = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    try:
        return values.reshape(shape)
    except (ValueError, OverflowError) as error:  # Also for sides beyond numpy's limits, beside one of zero.
        raise ValueError(f"{values.size} numbers for the shape {shape}") from error
