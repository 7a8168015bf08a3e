"""Decoding and preprocessing in processes, where the GIL would limit threads.

Each thread sends the bytes of an image to a worker process and waits for its pixels without the GIL
(``docs/internals/optimizations.md``). A process loads torch only for transforms that need it (timm transforms
beyond resize and centre crop).
"""

from __future__ import annotations

import pickle
import signal
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from extractors.images.decoding import DecodeError, decode_image
from pipelines.running.process_pool import LostWorkerError, Worker
from schemas.errors import ImagepivotError

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from torch import Tensor

Preprocessor: TypeAlias = "Callable[[Image.Image], np.ndarray]"

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


class DecodingProcesses:
    """Pool of decoding processes, which start on first use and after a crash.

    An image that crashes a process is tried once more while no other is decoded, as a decoder may have lacked memory.

    Args:
        preprocess: picklable function from a decoded image to pixels, uint8 ``[3, H, W]``, see `extractors.Extractor.preprocessor`.
    """

    def __init__(self, preprocess: Preprocessor, num_processes: int) -> None:
        self.num_processes = num_processes
        self._function = pickle.dumps(partial(_decode_pixels, preprocess))
        self._workers: list[Worker | None] = [None] * num_processes
        self._idle = SimpleQueue[int]()
        for index in range(num_processes):
            self._idle.put(index)
        self._alone = Lock()
        weakref.finalize(self, _kill, self._workers)

    def pixels(self, data: bytes) -> Tensor:
        """Decode and preprocess an image in an idle process; call it from as many threads.

        Returns:
            uint8 ``[3, H, W]`` in channels-last layout.

        Raises:
            DecodeError: error of `extractors.decode_image` or ``preprocess``, or the image crashed two processes.
            ImagepivotError: the process was killed or has exited.
        """
        index = self._idle.get()
        try:
            return self._call(index, data)
        except DecodeError as error:
            if error.reason != "crashed":
                raise
        finally:
            self._idle.put(index)
        with self._alone:
            indices = [self._idle.get() for _ in self._workers]
            try:
                return self._call(indices[0], data)
            finally:
                for index in indices:
                    self._idle.put(index)

    def _call(self, index: int, data: bytes) -> Tensor:
        import torch

        earlier = self._workers[index]
        worker = self._workers[index] = earlier or Worker(index)
        try:
            if earlier is None:
                worker.send(self._function)
            worker.send(pickle.dumps(data))
            return torch.from_numpy(worker.receive()).permute(2, 0, 1)
        except LostWorkerError:
            self._workers[index] = None
            raise _lost(worker.kill()) from None


def _decode_pixels(preprocess: Preprocessor, data: bytes) -> np.ndarray:
    """Decode and preprocess an image in a process: ``[H, W, 3]``."""
    return preprocess(decode_image(data)).transpose(1, 2, 0)


def _kill(workers: list[Worker | None]) -> None:
    for worker in workers:
        if worker is not None:
            worker.kill()


def _lost(code: int) -> ImagepivotError:
    """Return the error for an exit code, which is negative for a signal."""
    if -code in _CRASHES:
        return DecodeError("crashed", f"a decoder crashed twice with {signal.Signals(-code).name}")
    advice = "Finished shards are kept; run the same command again"
    if code == -signal.SIGKILL:
        return ImagepivotError(
            f"a process that decodes images was killed, probably because memory ran out. {advice}, with "
            "more memory, or with fewer cores: there is a process per core"
        )
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return ImagepivotError(f"a process that decodes images {how}; the log has its error. {advice}")
