"""Batch loader of one process, in the order of the sampler, with prefetching."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from train.data.sampling import Batch, Sampler
from train.loop.distributed import DistributedContext
from train.loop.training_data import TrainingInputs
from train.losses import Inputs

_CPU = torch.device("cpu")
_PREFETCHED_BATCHES = 2


class BatchLoader:
    """Batches with the inputs of a model, and the position of the training in them.

    `prefetching` reads the next batches in a thread, into pinned memory for a GPU, if an image has several features. Single
    vectors are read without a thread, which is faster. It changes neither the batches nor `position` and `epoch`.

    Attributes:
        position: position of the sampler after the last returned batch.
        epoch: number of complete epochs.
        epoch_steps: number of batches in an epoch.
    """

    def __init__(
        self,
        training_inputs: TrainingInputs,
        sampler: Sampler,
        processes: DistributedContext,
        device: torch.device,
    ) -> None:
        self._training_inputs, self._sampler, self._processes, self._device = training_inputs, sampler, processes, device
        self._thread: ThreadPoolExecutor | None = None
        self._pending: deque[tuple[Batch, dict[str, Any], int, Future[Inputs]]] = deque()
        self.position, self.epoch, self.epoch_steps = sampler.position(), sampler.epoch, sampler.epoch_steps

    def restore(self, position: Mapping[str, Any]) -> None:
        """Restore the position of an equal sampler; not inside `prefetching`."""
        self._sampler.restore(position)
        self.position, self.epoch = self._sampler.position(), self._sampler.epoch

    @contextmanager
    def prefetching(self) -> Iterator[None]:
        """Prefetch batches inside the block; its end discards the unused ones."""
        if len(self._training_inputs.dimensions.feature_shape) == 1:
            yield
            return
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetching")
        try:
            yield
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
            self._pending.clear()
            self.restore(self.position)

    def next(self) -> tuple[Batch, Inputs]:
        """Return the next batch, and the inputs of this process's rows on the device.

        The sampler is called here, so that it needs no lock. An error of the thread is raised for its own batch.
        """
        if self._thread is None:
            batch, self.position, self.epoch = self._draw()
            inputs = self._inputs(batch, self._device)
        else:
            while len(self._pending) <= _PREFETCHED_BATCHES:
                drawn = self._draw()
                self._pending.append((*drawn, self._thread.submit(self._prefetch, drawn[0])))
            batch, self.position, self.epoch, future = self._pending.popleft()
            inputs = future.result()
        return batch, _map_tensors(inputs, lambda tensor: tensor.to(self._device, non_blocking=True))

    def _draw(self) -> tuple[Batch, dict[str, Any], int]:
        return self._sampler.next(), self._sampler.position(), self._sampler.epoch

    def _inputs(self, batch: Batch, device: torch.device) -> Inputs:
        return self._training_inputs.inputs(batch, device, self._processes.rows(len(batch.images)))

    def _prefetch(self, batch: Batch) -> Inputs:
        inputs = self._inputs(batch, _CPU)
        if self._device.type != "cuda":
            return inputs
        with torch.cuda.device(self._device):  # A new thread would open a context on the first GPU.
            return _map_tensors(inputs, Tensor.pin_memory)


def _map_tensors(inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
    images = inputs.images
    if images is not None:
        mask = None if images.mask is None else function(images.mask)
        images = replace(images, features=function(images.features), mask=mask)
    return replace(inputs, numbers=function(inputs.numbers), images=images)
