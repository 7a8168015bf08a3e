"""The batches of a training with the inputs of the model, in the order of the sampler, some of them prefetched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from train.data.sampling import Batch, Sampler
from train.distributed import DistributedContext
from train.losses import Inputs
from train.training_data import TrainingMaterial

_CPU = torch.device("cpu")
_AHEAD = 2  # Batches that are read, or wait to be read, while the caller works on another.


@dataclass(frozen=True)
class _Drawn:
    """A batch, and where the sampler stands after it."""

    batch: Batch
    state: dict[str, Any]
    epoch: int


class BatchLoader:
    """Batches for one process, and where the training stands in them.

    Where an image has several features, a thread reads the next batches into pinned memory. A batch of single vectors is read
    faster than it is handed over. Prefetching changes neither the batches nor `state` and `epoch`, which are those of the batch
    that was returned last.
    """

    def __init__(
        self, material: TrainingMaterial, sampler: Sampler, processes: DistributedContext, device: torch.device
    ) -> None:
        self._material, self._sampler, self._processes, self._device = material, sampler, processes, device
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[_Drawn, Future[Inputs]]] = deque()
        self._last: _Drawn | None = None

    @property
    def epoch_steps(self) -> int:
        """Number of batches in an epoch."""
        return self._sampler.epoch_steps

    @property
    def epoch(self) -> int:
        """Number of complete epochs."""
        return self._sampler.epoch if self._last is None else self._last.epoch

    def state(self) -> dict[str, Any]:
        """Return the state of the sampler, from which the training goes on."""
        return self._sampler.state() if self._last is None else self._last.state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a sampler that was built with the same arguments; not inside `prefetching`."""
        self._sampler.restore(state)
        self._last = None

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """Read ahead inside the block, where that pays; leaving it waits for what is being read, and drops the rest."""
        if len(self._material.dimensions.feature_shape) == 1:
            yield
            return
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetching")
        try:
            yield
        finally:
            self._thread.shutdown(cancel_futures=True)

    def next(self) -> tuple[Batch, Inputs]:
        """Return the next batch, and the inputs of this process's rows of it, on the device.

        Batches are drawn here, so that the sampler needs no lock, and the thread reads them in their order: its error is raised
        in the turn of its batch.
        """
        if self._thread is None:
            self._last = self._draw()
            inputs = self._inputs(self._last, self._device)
        else:
            while len(self._pending) <= _AHEAD:
                drawn = self._draw()
                self._pending.append((drawn, self._thread.submit(self._read_ahead, drawn)))
            self._last, future = self._pending.popleft()
            inputs = future.result()
        return self._last.batch, _each(inputs, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _draw(self) -> _Drawn:
        batch = self._sampler.next()
        return _Drawn(batch, self._sampler.state(), self._sampler.epoch)

    def _inputs(self, drawn: _Drawn, device: torch.device) -> Inputs:
        return self._material.inputs(drawn.batch, device, self._processes.rows(len(drawn.batch.images)))

    def _read_ahead(self, drawn: _Drawn) -> Inputs:
        inputs = self._inputs(drawn, _CPU)
        if self._device.type != "cuda":
            return inputs
        with torch.cuda.device(self._device):  # A thread begins with the first GPU, and would open a context there.
            return _each(inputs, Tensor.pin_memory)


def _each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Return inputs with each tensor changed."""
    images = inputs.images
    if images is not None:
        mask = None if images.mask is None else change(images.mask)
        images = replace(images, features=change(images.features), mask=mask)
    return replace(inputs, numbers=change(inputs.numbers), images=images)
