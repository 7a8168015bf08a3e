"""Decoding and preprocessing in processes, where the GIL would limit threads.

Each thread sends the bytes of an image to a process and waits for its pixels without the GIL (``docs/internals/optimizations.md``).

- Bytes go through a pipe; pixels come back in shared memory, and are copied once.
- Processes are started, not forked, which is unsafe with threads or a CUDA context. They have their own session (without Ctrl-C),
  and exit when their pipe closes, even if the worker is killed.
- A process loads torch only for transforms that need it (timm transforms beyond resize and centre crop).
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
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, cast

from extractors.images.decoding import DecodeError
from schemas.errors import ImagepivotError
from schemas.process.startup import keep_freed_memory

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

Preprocessor: TypeAlias = "Callable[[Image.Image], np.ndarray]"

_SHARED = 2**24
"""Bytes of shared memory per process, allocated on first use; larger pixels go through the pipe."""

_START = "import sys; sys.path[:] = {!r}; import imagepivot; from pipelines.features.decoding_processes import main; main({})"
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_EXIT_SECONDS = 5.0  # For a process to finish its image after its pipe is closed.


class DecodingProcesses:
    """Pool of decoding processes, which start on first use and after a crash.

    An image that crashes a process is tried once more while no other is decoded, as a decoder may have lacked memory.

    Args:
        preprocess: picklable function from a decoded image to pixels, uint8 ``[3, H, W]``, see `extractors.Extractor.preprocessor`.
    """

    def __init__(self, preprocess: Preprocessor, num_processes: int) -> None:
        self.num_processes = num_processes
        pickled = pickle.dumps(preprocess)
        self._processes = [_Process(pickled) for _ in range(num_processes)]
        self._idle: SimpleQueue[_Process] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._alone = Lock()
        weakref.finalize(self, _end, self._processes)

    def pixels(self, data: bytes) -> Tensor:
        """Decode and preprocess an image in an idle process; call it from as many threads.

        Raises:
            DecodeError: error of `extractors.decode_image` or ``preprocess``, or the image crashed two processes.
            ImagepivotError: the process was killed or has exited.
        """
        process = self._idle.get()
        try:
            return process.pixels(data)
        except DecodeError as error:
            if error.reason != "crashed":
                raise
        finally:
            self._idle.put(process)
        with self._alone:
            processes = [self._idle.get() for _ in self._processes]
            try:
                return processes[0].pixels(data)
            finally:
                for process in processes:
                    self._idle.put(process)


class _Process:
    """A process with a pickled preprocessor, and shared memory; `pixels` starts it."""

    def __init__(self, preprocessor: bytes) -> None:
        self._preprocessor = preprocessor
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self) -> subprocess.Popen[bytes]:
        import torch

        with _file() as file:
            file.truncate(_SHARED)
            self._shared = torch.frombuffer(mmap.mmap(file.fileno(), _SHARED), dtype=torch.uint8)
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(sys.path, file.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(file.fileno(),),
                start_new_session=True,
            )
        self._requests, self._replies = (cast(BinaryIO, pipe) for pipe in (process.stdin, process.stdout))
        return process

    def pixels(self, data: bytes) -> Tensor:
        import torch

        is_new = self._process is None
        self._process = self._process or self._start()
        try:
            if is_new:
                self._requests.write(self._preprocessor)
            pickle.dump(data, self._requests)
            self._requests.flush()
            reply = pickle.load(self._replies)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise _lost(self.end()) from None
        if isinstance(reply, Exception):
            raise reply
        shape, is_innermost, values = reply
        # The copy releases the GIL.
        pixels = (self._shared[: math.prod(shape)].clone() if values is None else torch.from_numpy(values)).view(shape)
        return pixels.permute(2, 0, 1) if is_innermost else pixels

    def end(self) -> int:
        """Stop the process, and return its exit code; 0 if it was not started."""
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (self._requests, self._replies):
            with suppress(OSError):
                pipe.close()
        try:
            return process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


def _file() -> Any:
    """Open an anonymous file in memory."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("imagepivot"), "r+b")
    return tempfile.TemporaryFile()


def _end(processes: list[_Process]) -> None:
    for process in processes:
        process.end()


def _lost(code: int) -> ImagepivotError:
    """Return the error for an exit code, which is negative for a signal."""
    if -code in _CRASHES:
        return DecodeError("crashed", f"a decoder crashed twice with {signal.Signals(-code).name}")
    advice = "Finished shards are kept; run the same command again"
    if code == -signal.SIGKILL:
        return ImagepivotError(
            f"a process that decodes images was killed, probably because memory ran out. {advice}, with more memory, or with fewer "
            "cores: there is a process per core"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ImagepivotError(f"a process that decodes images {how}; the log has its error. {advice}")


def main(memory_fd: int) -> None:
    """Decode images until the pipe closes; entry point of the processes."""
    keep_freed_memory()
    with os.fdopen(0, "rb", closefd=False) as requests, os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # Output of libraries must not mix with replies.
        shared = mmap.mmap(memory_fd, 0)
        os.close(memory_fd)
        with suppress(EOFError, BrokenPipeError):
            preprocess = pickle.load(requests)
            while True:
                pickle.dump(_reply(pickle.load(requests), preprocess, shared), replies)
                replies.flush()
    os._exit(0)  # Without torch's shutdown.


def _reply(data: bytes, preprocess: Preprocessor, shared: mmap.mmap) -> Any:
    """Return an error, or shape, whether channels are last, and too large pixels."""
    import numpy as np

    import extractors

    try:
        pixels = preprocess(extractors.decode_image(data))
    except ImagepivotError as error:  # The waiting thread raises it. Any other error is a bug and ends this process.
        return error
    is_innermost = pixels.transpose(1, 2, 0).flags.c_contiguous
    values = pixels.transpose(1, 2, 0) if is_innermost else pixels
    if values.size > len(shared):
        return values.shape, is_innermost, values.flatten()
    np.frombuffer(shared, np.uint8, values.size).reshape(values.shape)[...] = values
    return values.shape, is_innermost, None
