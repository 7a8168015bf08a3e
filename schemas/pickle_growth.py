"""Memory that files of ``torch.save`` take: checked before torch reads them.

torch's restricted reader refuses unknown functions, but not calls that fill memory: the same list for ``OrderedDict`` thousands of
times, or a number for ``bytearray``. Here the pickles run with stand-ins that only count the arguments of calls.
"""

import io
import pickle
import pickletools
import tarfile
import zipfile
from collections.abc import Iterator, Sized
from typing import IO, Any, BinaryIO, Self

MAX_EXPANSION = 8
"""Bytes in a zip archive for one of the file; ``torch.save`` does not compress."""

ELEMENT_BYTES = 4
"""Bytes of a pickle for one element of an argument, at least; less if an argument is used again."""

# Pickles in a file of torch before version 1.6: magic number, version, system, content, keys of storages.
_NUM_PICKLES = 5
_MAGIC = 0x1950A86A20F9469CFC6C
_PUTS = frozenset({"BINPUT", "LONG_BINPUT"})


def check_growth(file: BinaryIO) -> None:
    """Refuse a file of ``torch.save`` that would fill memory, and rewind it.

    Raises:
        pickle.UnpicklingError: an archive or the calls of a pickle would fill memory.
        Exception: as `zipfile` and `pickle` raise for a corrupt file.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    start = file.read(4)
    file.seek(0)
    if start == b"PK\x03\x04":
        with zipfile.ZipFile(file) as archive:
            if sum(part.file_size for part in archive.infolist()) > MAX_EXPANSION * size:
                raise pickle.UnpicklingError(f"it expands to more than {MAX_EXPANSION} times its size")
            names = [name for name in archive.namelist() if name.endswith("data.pkl")]
            for name in names:
                _count(io.BytesIO(archive.read(name)))
    elif not _is_tar(file) and _count(file) == _MAGIC:  # Torch itself refuses other files.
        for _ in range(_NUM_PICKLES - 1):
            _count(file)
    file.seek(0)


def instructions(file: IO[bytes]) -> Iterator[tuple[str, int | None]]:
    """Yield name and position of each instruction of a pickle.

    Raises:
        pickle.UnpicklingError: a memo position is beyond the instructions before; Python would allocate all up to it.
    """
    for count, (instruction, argument, position) in enumerate(pickletools.genops(file)):
        if instruction.name in _PUTS and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"memo position {argument} after {count} instructions, at byte {position}")
        yield instruction.name, position


def _is_tar(file: BinaryIO) -> bool:
    try:
        with tarfile.open(fileobj=file, mode="r:"):
            return True
    except tarfile.TarError:
        return False
    finally:
        file.seek(0)


def _count(file: BinaryIO) -> Any:
    """Run a pickle with stand-ins; return its content, with the file at its end."""
    start = file.tell()
    for _ in instructions(file):
        pass
    end = file.tell()
    file.seek(start)
    return _Counter(file.read(end - start)).load()


class _Counter(pickle.Unpickler):
    """Unpickler without functions, which counts what their arguments hold."""

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program), encoding="bytes")
        self._bytes_left = 2 * len(program)

    def find_class(self, module: str, name: str) -> type:
        """Return a stand-in for a function or class."""
        is_filled = name == "bytearray"  # `bytearray(n)` holds n zeros.

        def count(*arguments: Any) -> None:
            numbers = sum(item for item in arguments if isinstance(item, int)) if is_filled else 0
            elements = sum(len(item) for item in arguments if isinstance(item, Sized))
            self._bytes_left -= numbers + ELEMENT_BYTES * elements
            if self._bytes_left < 0:
                raise pickle.UnpicklingError(f"calls of {module}.{name} make more than the file holds")

        class StandIn:
            def __new__(cls, *arguments: Any) -> Self:
                count(*arguments)
                return super().__new__(cls)

            def __call__(self, *arguments: Any) -> Self:
                return type(self)(*arguments)

            def __setstate__(self, state: Any) -> None:
                count(state)

            def __setitem__(self, key: Any, value: Any) -> None:
                pass

        return StandIn

    def persistent_load(self, pid: Any) -> None:
        """Return no numbers of tensors."""
