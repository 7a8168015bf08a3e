"""Safe reader of pickled arrays and tensors.

A pickle is a program for a stack machine that may call any function of any installed package. Pickled state
dicts need only some instructions and a few functions of numpy and torch. The reader works in two steps:

1. Scan the program. Only instructions for plain values, containers and calls are allowed. Lengths and memo positions beyond the
   file are refused, because Python would allocate memory for them.
2. Run the program with substitutes for the allowed functions, which check their arguments. Other functions are refused by name.

Names of instructions are those of Python's ``pickletools``. Numpy pickles arrays in ``ndarray.__reduce_ex__``,
``ndarray.__setstate__`` and ``dtype.__reduce__``, for protocol 5 in ``numpy._core.numeric._frombuffer`` (``numpy._core`` is
``numpy.core`` in numpy 1). Torch pickles tensors in ``torch.Tensor.__reduce_ex__`` as views of a storage, with a file of
``torch.save`` before version 1.6 as its bytes.
"""

from __future__ import annotations

import io
import mmap
import pickle
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError, first_line
from schemas.pickle_growth import ELEMENT_BYTES, check_growth, instructions

OLD_TORCH_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of files of ``torch.save`` before version 1.6: the pickle of a magic number."""

# fmt: off
_INSTRUCTIONS = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
})
# fmt: on
_NUMERIC_KINDS = "biufc"
PICKLE_ERRORS = (
    *(pickle.UnpicklingError, ValueError, TypeError, AttributeError, LookupError, EOFError, OverflowError, MemoryError),
    *(AssertionError, RuntimeError),
)
"""Errors of unpickling and of torch for corrupt programs."""


def read_pickle(path: Path) -> Any:
    """Read a pickle of arrays and containers (protocols 2 to 5, also of Python 2).

    Returns:
        Numbers, strings, bytes, None, tuples, lists, dictionaries, tensors, and (possibly read-only) numpy arrays.

    Raises:
        InputError: the file is corrupt, no pickle, or holds other objects.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            for name, position in instructions(cast("IO[bytes]", data)):
                if name not in _INSTRUCTIONS:
                    raise pickle.UnpicklingError(f"it holds the instruction {name}, at byte {position}")
            data.seek(0)
            return _RestrictedUnpickler(data, safe_globals(2 * len(data))).load()
        except PICKLE_ERRORS as error:
            raise InputError(
                f"the weights file {str(path)!r} is refused as a pickle ({first_line(error)[:200]}): it is "
                "corrupt, or holds more than arrays, tensors and plain containers, which could run code "
                "when read. If you trust the file, save its arrays alone, best as .safetensors"
            ) from error


def safe_globals(max_bytes: int) -> dict[str, Any]:
    """Return substitutes for the functions called by pickles of arrays or tensors.

    Args:
        max_bytes: total bytes that the substitutes may create, against pickles that expand. An array needs
            its size twice, as text and as array.

    Returns:
        Substitutes by the functions' names in pickles (``numpy.dtype``). The last two permit the classes'
        ``__setstate__``; their names cannot be imported.
    """
    builders = _Builders(max_bytes)
    functions: dict[str, Callable[..., Any]] = {
        "numpy.ndarray": builders.empty,
        "numpy.dtype": _Type,
        "collections.OrderedDict": builders.ordered,
        "builtins.bytes": lambda: b"",  # Empty bytes in protocols before 3.
        "__builtin__.bytes": lambda: b"",
        "_codecs.encode": builders.encode,
        "torch.storage._load_from_bytes": builders.storage,
        "torch._utils._rebuild_tensor_v2": builders.tensor,
    }
    for core in ("numpy.core", "numpy._core"):
        functions[f"{core}.multiarray._reconstruct"] = builders.empty
        functions[f"{core}.multiarray.scalar"] = builders.scalar
        functions[f"{core}.numeric._frombuffer"] = builders.array
    return {name: _Function(call) for name, call in functions.items()} | {"<array>": _Array, "<type>": _Type}


class _RestrictedUnpickler(pickle.Unpickler):
    """Unpickler restricted to the substitutes."""

    def __init__(self, file: mmap.mmap, functions: dict[str, Any]) -> None:
        super().__init__(file, encoding="latin1")  # Strings of Python 2, including bytes of arrays.
        self._functions = functions

    def find_class(self, module: str, name: str) -> Any:
        function = self._functions.get(f"{module}.{name}")
        if not isinstance(function, _Function):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return function


class _Function:
    """Function that a pickle can call, but not modify."""

    __slots__ = ("_call",)

    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")


class _Type:
    """Substitute for ``numpy.dtype``, restricted to numeric dtypes."""

    __slots__ = ("numbers",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not code.isalnum():
            raise pickle.UnpicklingError(f"an array's type is {code!r}, not a number's")
        self.numbers = np.dtype(code)
        if self.numbers.kind not in _NUMERIC_KINDS:
            raise pickle.UnpicklingError(f"an array holds {self.numbers}, not numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Apply ``(version, byte order, ...)``; later elements describe records."""
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError(f"an array's type has the state {state!r}, not a number's")
        self.numbers = self.numbers.newbyteorder(order)


class _Array(np.ndarray):
    """Array that a pickle creates empty and fills later."""

    _builders: _Builders

    def __new__(cls) -> _Array:
        return np.ndarray.__new__(cls, (0,))

    def __setstate__(self, state: Any) -> None:
        """Apply ``([version,] shape, type, is Fortran order, bytes)``."""
        shape, kind, is_fortran, content = state[-4:]
        content = content.encode("latin1") if isinstance(content, str) else content
        self._builders.array(content, kind, shape)
        checked: Any = (1, shape, kind.numbers, bool(is_fortran), bytes(content))
        super().__setstate__(checked)


class _Builders:
    """Substitutes that create at most ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._bytes_left = max_bytes

    def empty(self, *_: Any) -> _Array:
        array = _Array()
        array._builders = self
        return array

    def array(self, content: Any, kind: Any, shape: Any, order: Any = "C") -> np.ndarray:
        if not isinstance(content, bytes | bytearray) or not isinstance(kind, _Type) or not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array without bytes, type or shape")
        if not all(type(side) is int and side >= 0 for side in shape) or order not in ("C", "F"):
            raise pickle.UnpicklingError(f"an array of shape {shape!r} and order {order!r}")
        if len(content) != prod(shape) * kind.numbers.itemsize:
            raise pickle.UnpicklingError(f"{len(content)} bytes for an array of shape {shape} and type {kind.numbers}")
        self._spend(len(content))
        return np.frombuffer(content, kind.numbers).reshape(shape, order=order)

    def scalar(self, kind: Any, content: Any) -> Any:
        """Return a Python number for a numpy scalar."""
        return self.array(content.encode("latin1") if isinstance(content, str) else content, kind, ()).item()

    def storage(self, content: Any) -> Any:
        """Read the storage of tensors with torch's own restricted reader."""
        if not isinstance(content, bytes) or not content.startswith(OLD_TORCH_MAGIC):
            raise pickle.UnpicklingError("a tensor without bytes")
        self._spend(len(content))
        try:
            check_growth(io.BytesIO(content))
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # Its text advises unsafe reading.
            raise pickle.UnpicklingError("numbers of a tensor that torch refuses") from error

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
        """Create a view of a storage; torch raises if it would exceed the storage."""
        if not isinstance(storage, torch.storage.TypedStorage):
            raise pickle.UnpicklingError("a tensor without numbers")
        # Torch's own function calls set_ with a shape, which would enlarge the storage instead of raising.
        return torch.empty(0, dtype=storage.dtype).set_(storage).as_strided(shape, strides, offset)

    def encode(self, text: Any, encoding: Any) -> bytes:
        """Return bytes, which protocols before 3 store as text."""
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes of a {type(text).__name__} in {encoding!r}")
        self._spend(len(text))
        return text.encode("latin1")

    def ordered(self, *items: Any) -> OrderedDict[Any, Any]:
        """Return a dictionary; its pairs may be a list that was used before."""
        self._spend(ELEMENT_BYTES * sum(map(len, items)))
        return OrderedDict(*items)

    def _spend(self, count: int) -> None:
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise pickle.UnpicklingError("it makes more bytes than the file has")
