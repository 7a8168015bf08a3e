"""A reader of pickled arrays and tensors that runs nothing a file asks for.

A pickle is a program for a small stack machine, which may call any function of any installed package. The pickle of a state dict
needs only some of the instructions and a handful of functions: those of numpy and torch that make an array. Before anything is
made, the program is scanned: only instructions that make plain values, containers and calls pass, and lengths and memo positions
that the file does not back with bytes are refused, because Python would take memory for them. Then the program runs with
stand-ins for those functions, which check their arguments; any other function is refused by its name.

The names of instructions are those of Python's ``pickletools``. Numpy pickles arrays in ``ndarray.__reduce_ex__``,
``ndarray.__setstate__`` and ``dtype.__reduce__``, for protocol 5 in ``numpy._core.numeric._frombuffer`` (``numpy._core`` is
``numpy.core`` in numpy 1). Torch pickles tensors in ``torch.Tensor.__reduce_ex__``: a view of a storage, whose bytes are a file of
``torch.save`` before version 1.6.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor

from schemas.errors import InputError

OLD_TORCH_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of a file of ``torch.save`` before version 1.6: the pickle of a magic number."""

# fmt: off
_INSTRUCTIONS = frozenset({
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "APPEND", "APPENDS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD",
})
# fmt: on
_PUTS = frozenset({"BINPUT", "LONG_BINPUT"})
_NUMBERS = "biufc"
# Errors of the machine and of torch for a damaged program, or one that passes wrong arguments to a stand-in.
_FAULTS = (
    pickle.UnpicklingError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    EOFError,
    OverflowError,
    MemoryError,
    # Torch raises these for damaged storages and views that do not fit; Python raises RuntimeError for too deep containers.
    AssertionError,
    RuntimeError,
)


def read_pickle(path: Path) -> Any:
    """Read a pickle of arrays and plain containers (protocols 2 to 5, from Python 2 too).

    Returns:
        Numbers, strings, bytes, None, tuples, lists, dictionaries, tensors, and numpy arrays of numbers, which may be read-only.

    Raises:
        InputError: the file is damaged or not a pickle, or it asks for something else, which the message names.
    """
    size = path.stat().st_size
    if size == 0:
        raise InputError(f"the weights file {str(path)!r} is empty; fetch it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            _check_instructions(data)
            data.seek(0)
            return _Reader(data, safe_globals(2 * size)).load()
        except _FAULTS as error:
            raise InputError(
                f"the weights file {str(path)!r} is refused as a pickle ({_first_line(error)}): it is damaged, or holds more than "
                "arrays, tensors and plain containers, which could run code when read. Where you trust the file, save its arrays "
                "alone, best as .safetensors"
            ) from error


def safe_globals(allowance: int) -> dict[str, Any]:
    """Return stand-ins for the functions that a pickle of arrays or tensors calls.

    Args:
        allowance: bytes that may be made in all, so that the same bytes do not become an array again and again. The bytes of an
            array are made at most twice: once as text, once as an array.

    Returns:
        Stand-ins by the names that a pickle has for the functions (``numpy.dtype``). The last two are the classes whose
        ``__setstate__`` the machine must be willing to call; nothing that can be imported has their names.
    """
    makers = _Makers(allowance)
    functions: dict[str, Callable[..., Any]] = {
        "numpy.ndarray": makers.empty,
        "numpy.dtype": _Type,
        "collections.OrderedDict": OrderedDict,
        "builtins.bytes": makers.no_bytes,
        "__builtin__.bytes": makers.no_bytes,
        "_codecs.encode": makers.encoded,
        "torch.storage._load_from_bytes": makers.storage,
        "torch._utils._rebuild_tensor_v2": makers.tensor,
    }
    for core in ("numpy.core", "numpy._core"):
        functions[f"{core}.multiarray._reconstruct"] = makers.empty
        functions[f"{core}.multiarray.scalar"] = makers.scalar
        functions[f"{core}.numeric._frombuffer"] = makers.array
    return {name: _Function(call) for name, call in functions.items()} | {"<array>": _Array, "<type>": _Type}


def _check_instructions(data: mmap.mmap) -> None:
    """Scan the program without running it.

    Python's machine takes memory for a length or a memo position before it checks that the file is that long.
    """
    for count, (instruction, argument, position) in enumerate(pickletools.genops(cast("IO[bytes]", data))):
        if instruction.name not in _INSTRUCTIONS:
            raise pickle.UnpicklingError(f"it holds the instruction {instruction.name}, at byte {position}")
        if instruction.name in _PUTS and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"memo position {argument} after {count} instructions, at byte {position}")


class _Reader(pickle.Unpickler):
    """Python's machine, restricted to the stand-ins."""

    def __init__(self, file: mmap.mmap, functions: dict[str, Any]) -> None:
        super().__init__(file, encoding="latin1")  # Python 2's strings, the bytes of arrays among them
        self._functions = functions

    def find_class(self, module: str, name: str) -> Any:
        function = self._functions.get(f"{module}.{name}")
        if not isinstance(function, _Function):
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return function


class _Function:
    """A function that a pickle can call, but not otherwise touch: not even set an attribute of."""

    __slots__ = ("_call",)

    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise pickle.UnpicklingError(f"it sets {name} of a function")


class _Type:
    """The type of the numbers of an array, as ``numpy.dtype`` and its state describe it; only plain numbers are allowed.

    Called like ``numpy.dtype``; the arguments after the code do not matter.
    """

    __slots__ = ("numbers",)

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or not code.isalnum():
            raise pickle.UnpicklingError(f"an array's type is {code!r}, not a number's")
        self.numbers = np.dtype(code)
        if self.numbers.kind not in _NUMBERS:
            raise pickle.UnpicklingError(f"an array holds {self.numbers}, not numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take ``(version, byte order, ...)``; the rest describes records, which numbers are not."""
        order = state[1]
        if order not in ("<", ">", "|", "=") or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError(f"an array's type has the state {state!r}, not a number's")
        self.numbers = self.numbers.newbyteorder(order)


class _Array(np.ndarray):
    """An array that a pickle makes empty and fills later, as numpy does."""

    _makers: _Makers

    def __new__(cls) -> _Array:
        return np.ndarray.__new__(cls, (0,))

    def __setstate__(self, state: Any) -> None:
        """Take ``(version, shape, type, whether by columns, bytes)``; old files lack the version."""
        shape, kind, by_columns, content = state[-4:]
        content = content.encode("latin1") if isinstance(content, str) else content
        self._makers.array(content, kind, shape)
        full: Any = (1, shape, kind.numbers, bool(by_columns), bytes(content))
        super().__setstate__(full)


class _Makers:
    """The work of the stand-ins, until the bytes that they may make are used up."""

    def __init__(self, allowance: int) -> None:
        self._left = allowance

    def empty(self, *_: Any) -> _Array:
        """Stand in for numpy's ``_reconstruct``: make an array whose state follows."""
        made = _Array()
        made._makers = self
        return made

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
        """Make a plain number of a numpy number."""
        return self.array(content.encode("latin1") if isinstance(content, str) else content, kind, ()).item()

    def storage(self, content: Any) -> Any:
        """Read the numbers of tensors; torch's own reader refuses everything else in the bytes."""
        if not isinstance(content, bytes) or not content.startswith(OLD_TORCH_MAGIC):
            raise pickle.UnpicklingError("a tensor without bytes")
        self._spend(len(content))
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # Its text is advice to read without protection.
            raise pickle.UnpicklingError("numbers of a tensor that torch refuses") from error

    def tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
        """Make a view of a storage; torch raises an error if it would reach beyond the end."""
        if not isinstance(storage, torch.storage.TypedStorage):
            raise pickle.UnpicklingError("a tensor without numbers")
        # set_ with a shape, which torch's own function uses, would make the storage longer instead of raising.
        return torch.empty(0, dtype=storage.dtype).set_(storage).as_strided(shape, strides, offset)

    def encoded(self, text: Any, encoding: Any) -> bytes:
        """Make bytes, which protocols before 3 write as text."""
        if not isinstance(text, str) or encoding != "latin1":
            raise pickle.UnpicklingError(f"bytes of a {type(text).__name__} in {encoding!r}")
        self._spend(len(text))
        return text.encode("latin1")

    def no_bytes(self) -> bytes:
        """Make empty bytes, which protocols before 3 write as a call of ``bytes``."""
        return b""

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError("it makes more bytes than the file has")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
