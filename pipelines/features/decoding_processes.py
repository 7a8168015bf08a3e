"""Decoding and preprocessing in processes of their own, for a worker with more cores than the threads of one process can use.

A thread that decodes holds Python's lock for 16 to 27 % of its processor time (``docs/internals/performance.md``), so that the
threads of a process together never do more than four to six cores' work, however many they are. Here each of them hands the bytes
of an image to a process, and waits for its pixels without the lock.

The bytes go through a pipe; the pixels come back in memory that both processes map, from which they are copied once. A process is
started anew, never forked: a copy of a process with threads, or with a GPU, is none that works. It has a session of its own, so
that Ctrl-C does not reach it, and it ends when its pipe does: with this object, or with the worker, also if that is killed. It
loads torch only for what needs it (transforms of timm that do more than resize and cut out the centre), since it then takes 340 MB
of memory and not 28.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from schemas.errors import ImagepivotError
from schemas.process.resources import keep_freed_memory

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

Preprocessor: TypeAlias = "Callable[[Image.Image], np.ndarray]"

_SHARED = 2**24
"""Bytes of the memory that a process shares; larger pixels come through the pipe. Only what is written to takes memory."""

_START = "import sys; sys.path[:] = {!r}; import imagepivot; from pipelines.features.decoding_processes import main; main({})"
_SECONDS = 5.0  # For a process to finish its image when its pipe has ended.


class DecodingProcesses:
    """Processes that turn the bytes of images into pixels. Each is started when it is first needed, and after it was lost.

    Args:
        preprocess: from a decoded image to pixels, uint8 ``[3, H, W]``, see `extractors.Extractor.preprocessor`; it is pickled.
        number: number of processes.
    """

    def __init__(self, preprocess: Preprocessor, number: int) -> None:
        self.number = number
        self._preprocess = preprocess
        self._idle: SimpleQueue[_Process | None] = SimpleQueue()
        for _ in range(number):
            self._idle.put(None)
        self._processes: list[_Process] = []
        weakref.finalize(self, _end, self._processes)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that have been started and not been lost."""
        return [process.pid for process in self._processes]

    def pixels(self, data: bytes) -> Tensor:
        """Decode and preprocess an image in a process that is idle; may be called in as many threads as there are processes.

        Raises:
            DecodeError: as `extractors.decode` and the extractor's ``preprocess`` raise it.
            ImagepivotError: the process was killed, or ended by itself.
        """
        process = self._idle.get()
        try:
            if process is None:
                process = _Process(self._preprocess)
                self._processes.append(process)
            return process.pixels(data)
        except _LostError:
            assert process is not None
            self._processes.remove(process)
            code, process = process.end(), None
            raise _lost(code) from None
        finally:
            self._idle.put(process)


class _LostError(Exception):
    """A process does not answer."""


class _Process:
    """A process, and the memory that is shared with it."""

    def __init__(self, preprocess: Preprocessor) -> None:
        import torch

        with _file() as file:
            file.truncate(_SHARED)
            self._shared = torch.frombuffer(mmap.mmap(file.fileno(), _SHARED), dtype=torch.uint8)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START.format(sys.path, file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(file.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._requests, self._replies = (cast(BinaryIO, pipe) for pipe in (self._process.stdin, self._process.stdout))
        self._preprocess: Preprocessor | None = preprocess

    def pixels(self, data: bytes) -> Tensor:
        import torch

        try:
            if self._preprocess is not None:
                pickle.dump(self._preprocess, self._requests)
                self._preprocess = None
            pickle.dump(data, self._requests)
            self._requests.flush()
            reply = pickle.load(self._replies)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise _LostError from error
        if isinstance(reply, Exception):
            raise reply
        shape, is_innermost, values = reply
        # The copy is made without Python's lock.
        pixels = (self._shared[: math.prod(shape)].clone() if values is None else torch.from_numpy(values)).view(shape)
        return pixels.permute(2, 0, 1) if is_innermost else pixels

    def end(self) -> int:
        """End the process, and return its exit code."""
        for pipe in (self._requests, self._replies):
            with suppress(OSError):
                pipe.close()
        try:
            return self._process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _file() -> Any:
    """Return a file in memory, without a name that could be left behind."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("imagepivot"), "r+b")
    return tempfile.TemporaryFile()


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


def _lost(code: int) -> ImagepivotError:
    """Describe the end of a process by its exit code, which is minus the number of a signal."""
    kept = "Finished shards are kept; run the same command again"
    if code == -signal.SIGKILL:
        return ImagepivotError(
            f"a process that decodes images was killed, probably because memory ran out. {kept}, with more memory, or with fewer "
            "cores, each of which has such a process"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ImagepivotError(f"a process that decodes images {how}; what it wrote to the log says why. {kept}")


def main(memory: int) -> None:
    """Decode images until the requests end: the process of a `_Process`.

    Args:
        memory: descriptor of the shared memory.
    """
    keep_freed_memory()
    with os.fdopen(0, "rb", closefd=False) as requests, os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # What others print must not get among the replies.
        shared = mmap.mmap(memory, 0)
        os.close(memory)
        with suppress(EOFError, BrokenPipeError):
            preprocess = pickle.load(requests)
            while True:
                pickle.dump(_reply(pickle.load(requests), preprocess, shared), replies)
                replies.flush()
    os._exit(0)  # Nobody waits for what torch does at the end.


def _reply(data: bytes, preprocess: Preprocessor, shared: mmap.mmap) -> Any:
    """Return an error, or shape of the pixels, whether channels come last there, and the pixels if they are not in the memory."""
    import numpy as np

    import extractors

    try:
        pixels = preprocess(extractors.decode(data))
    except ImagepivotError as error:  # The thread that waits raises it. Every other error is a bug, and ends this process.
        return error
    is_innermost = pixels.transpose(1, 2, 0).flags.c_contiguous
    values = pixels.transpose(1, 2, 0) if is_innermost else pixels
    if values.size > len(shared):
        return values.shape, is_innermost, values.flatten()
    np.frombuffer(shared, np.uint8, values.size).reshape(values.shape)[...] = values
    return values.shape, is_innermost, None
