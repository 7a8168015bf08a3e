"""Safe reader of ``.caffemodel`` weights, without Caffe and protobuf.

A ``.caffemodel`` is a serialised ``NetParameter`` of Caffe's ``src/caffe/proto/caffe.proto``. These fields are read, by number:

- net: ``layers`` (2, until 2014, with ``name`` 4 and ``blobs`` 6) and ``layer`` (100, later, with ``name`` 1 and ``blobs`` 7),
- blob: ``num``, ``channels``, ``height``, ``width`` (1 to 4), ``data`` (5), ``shape`` (7), ``double_data`` (8),
- shape: ``dim`` (1).

No code is run, lengths are checked before use, and memory is limited to the size of the file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from schemas.errors import InputError

MAX_BYTES = 2**31 - 1
"""Maximum file size, protobuf's own limit."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_MAX_DIMS = 32
# Field number in the net -> field numbers of name and blobs in the layer.
_LAYER_FIELDS = {2: (4, 6), 100: (1, 7)}
_LEGACY_DIMS, _DATA, _SHAPE, _DOUBLE_DATA = (1, 2, 3, 4), 5, 7, 8
_DATA_TYPES: dict[int, np.dtype[Any]] = {_DATA: np.dtype("<f4"), _DOUBLE_DATA: np.dtype("<f8")}


class _MalformedError(Exception):
    """Raised for invalid bytes, with their position."""


class _Field(NamedTuple):
    """Field of a message: number, wire type, varint (else 0), start and end."""

    number: int
    wire_type: int
    value: int
    start: int
    end: int


def read_layers(path: Path) -> dict[str, list[np.ndarray]]:
    """Read the blobs of all layers with weights.

    Returns:
        float32 arrays of each layer by name, in file order: usually weight and bias. Legacy four-number shapes lose leading ones.

    Raises:
        InputError: the file is no ``.caffemodel``, truncated or otherwise corrupt, or too large.
    """
    size = path.stat().st_size
    if not 0 < size <= MAX_BYTES:
        raise InputError(
            f"the weights file {str(path)!r} has {size} bytes, expected a .caffemodel of 1 to {MAX_BYTES}: download it again"
        )
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            layers = _net(data)
        except _MalformedError as error:
            raise InputError(
                f"the weights file {str(path)!r} cannot be read as a .caffemodel ({error}): it is truncated, corrupt or of another "
                "kind; download it again"
            ) from error
    if not layers:
        raise InputError(
            f"the weights file {str(path)!r} has no layer with weights, expected a trained .caffemodel, not the definition of a "
            "network (prototxt) or a solver state"
        )
    return layers


def _net(data: mmap.mmap) -> dict[str, list[np.ndarray]]:
    layers: dict[str, list[np.ndarray]] = {}
    for field in _read_fields(data, 0, len(data)):
        if field.number not in _LAYER_FIELDS:
            continue
        _expect(field, _BYTES)
        name, blobs = _read_layer(data, field, *_LAYER_FIELDS[field.number])
        if not blobs:
            continue
        if name in layers:
            raise _MalformedError(f"two layers are named {name!r}")
        layers[name] = blobs
    return layers


def _read_layer(data: mmap.mmap, layer: _Field, name_number: int, blobs_number: int) -> tuple[str, list[np.ndarray]]:
    name, blobs = "", []
    for field in _read_fields(data, layer.start, layer.end):
        if field.number == name_number:
            _expect(field, _BYTES)
            name = data[field.start : field.end].decode("utf-8", errors="replace")
        elif field.number == blobs_number:
            _expect(field, _BYTES)
            blobs.append(_blob(data, field))
    return name, blobs


def _blob(data: mmap.mmap, blob: _Field) -> np.ndarray:
    """Read an array as float32."""
    legacy, shape = dict.fromkeys(_LEGACY_DIMS, 0), None
    contents = {number: bytearray() for number in _DATA_TYPES}
    for field in _read_fields(data, blob.start, blob.end):
        if field.number in legacy:
            _expect(field, _VARINT)
            legacy[field.number] = field.value
        elif field.number == _SHAPE:
            _expect(field, _BYTES)
            if shape is not None:
                raise _MalformedError(f"two shapes for one blob, at byte {field.start}")
            shape = _dims(data, field)
        elif field.number in contents:
            size, length = _DATA_TYPES[field.number].itemsize, field.end - field.start
            if field.wire_type != _BYTES:  # Not packed: a field for each number.
                _expect(field, _FIXED64 if size == 8 else _FIXED32)
            if length % size:
                raise _MalformedError(f"{length} bytes of numbers, at byte {field.start}")
            contents[field.number] += memoryview(data)[field.start : field.end]
    if shape is None:
        # Blobs before 2015 always have four dimensions; matrices and vectors have leading ones.
        sides = [legacy[dim] for dim in _LEGACY_DIMS]
        first = next((index for index, side in enumerate(sides) if side != 1), len(sides) - 1)
        shape = sides[first:]
    numbers = ((_DATA_TYPES[number], content) for number, content in contents.items() if content)
    parts = [np.frombuffer(content, dtype).astype(np.float32, copy=False) for dtype, content in numbers]
    values = parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, dtype=np.float32), *parts])
    try:
        return values.reshape(shape)
    except ValueError as error:  # Also for sides beyond numpy's limits, beside one of zero.
        raise _MalformedError(f"{values.size} numbers for the shape {shape}, at byte {blob.start}") from error


def _dims(data: mmap.mmap, shape: _Field) -> list[int]:
    dims: list[int] = []
    for field in _read_fields(data, shape.start, shape.end):
        if field.number != 1:
            continue
        if field.wire_type == _VARINT:
            dims.append(field.value)
        else:
            _expect(field, _BYTES)
            position = field.start
            while position < field.end and len(dims) <= _MAX_DIMS:
                value, position = _varint(data, position, field.end)
                dims.append(value)
        if len(dims) > _MAX_DIMS:
            raise _MalformedError(f"a shape of more than {_MAX_DIMS} sides, at byte {shape.start}")
    return dims


def _read_fields(data: mmap.mmap, start: int, end: int) -> Iterator[_Field]:
    while start < end:
        field = _read_field(data, start, end)
        yield field
        start = field.end


def _read_field(data: mmap.mmap, start: int, end: int) -> _Field:
    """Read the tag at ``start``, and locate its content, at most up to ``end``."""
    key, position = _varint(data, start, end)
    number, wire_type = key >> 3, key & 7
    value = 0
    if number == 0 or number >= 2**29:
        raise _MalformedError(f"no field has the number {number}, at byte {start}")
    if wire_type == _VARINT:
        first = position
        value, position = _varint(data, position, end)
        return _Field(number, wire_type, value, first, position)
    if wire_type == _BYTES:
        length, position = _varint(data, position, end)
    elif wire_type in _FIXED_BYTES:
        length = _FIXED_BYTES[wire_type]
    else:
        raise _MalformedError(f"unknown wire type {wire_type}, at byte {start}")
    if length > end - position:
        raise _MalformedError(f"a field of {length} bytes where {end - position} are left, at byte {start}")
    return _Field(number, wire_type, value, position, position + length)


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    """Return a varint (seven bits per byte) and its end."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            raise _MalformedError(f"a number is cut off, at byte {position}")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise _MalformedError(f"a number of more than ten bytes, at byte {position}")


def _expect(field: _Field, wire_type: int) -> None:
    if field.wire_type != wire_type:
        raise _MalformedError(
            f"field {field.number} has wire type {field.wire_type}, expected {wire_type}, at byte {field.start}"
        )
