"""A pretended GPU: tensors whose values lie in memory and that report ``cuda:0``, to test without a GPU what runs on one.

Inside the block of `pretended_gpu` torch finds one GPU. What is moved to it goes through torch as it would on a real one, down to
the operations that a device carries out; these are carried out on the CPU, and counted:

- **launches**: operations that start kernels. A real GPU starts one kernel for most of them, for some a few (sorting, cuDNN's
  networks). Views, memory that is only reserved, and operations on nothing start none.
- **waits**: what makes the host wait for the GPU, with the line of the project that does it: a value, a mask or the positions of
  nonzero values that are read, blocking copies in both directions. They are those of ``torch.cuda.set_sync_debug_mode``.
- **copies**: copies that nobody waits for. From memory that is not page-locked they are staged, which may wait after all. They end
  when somebody waits for the GPU, or for an event behind them: until then what came from the GPU is not there (not a number), and
  page-locked memory that something else is written to is an error.

Tensors of two devices in one operation are a `DeviceMismatchError` with its name and line. A division by a number of the host is
a multiplication by its reciprocal, as in CUDA's kernels (``aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu``).

Not pretended: time, memory, the rounding of CUDA's sums and products, what two streams do at once, more than one GPU.

Threads that are started inside the block find the GPU, too.

    with pretended_gpu() as gpu:
        extractor = extractors.load("resnet50-pool", weights="random:0", device="cuda")
        gpu.reset()
        extractor.extract(pixels)
    assert gpu.waits.total() == 1
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.cuda.amp.common
import torch.utils._foreach_utils
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.pretended_backward import run_backward
from tests.pretended_operations import DeviceMismatchError, Event, OnGPU, PretendedGPU, value_of

__all__ = ["DeviceMismatchError", "Event", "PretendedGPU", "pretended_gpu"]


@contextmanager
def pretended_gpu(*, hollow: bool = False) -> Iterator[PretendedGPU]:
    """Pretend that there is a GPU inside the block.

    Args:
        hollow: nothing is computed, which saves most of the time: what is read from the GPU is zeros. Counts that do not depend on
            values are the same.
    """
    gpu = PretendedGPU.current = PretendedGPU(hollow=hollow)
    torch._C._ensureCUDADeviceGuardSet()
    lifted = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for owner, name, value in _patches(gpu):
            stack.enter_context(mock.patch.object(owner, name, value))
        torch._C._set_only_lift_cpu_tensors(True)  # A tensor made of numbers is made on the CPU, and then copied.
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        # Module.to gives a module new parameters, instead of new values to old ones of another class.
        overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwritten)
        stack.enter_context(gpu)
        yield gpu


def _patches(gpu: PretendedGPU) -> list[tuple[Any, str, Any]]:
    cuda, foreach = torch.cuda, [Tensor, torch.nn.Parameter, OnGPU]

    def always(value: object) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    def waited(name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: gpu.wait(name)

    return [
        (cuda, "_lazy_init", always(None)),
        (cuda, "is_available", always(True)),
        (cuda, "device_count", always(1)),
        (cuda, "current_device", lambda: gpu.device or 0),
        (cuda, "set_device", gpu.set_device),
        (cuda, "_exchange_device", gpu.exchange_device),
        (cuda, "_maybe_exchange_device", gpu.exchange_device),
        (cuda, "empty_cache", always(None)),
        (cuda, "is_current_stream_capturing", always(False)),
        (cuda, "is_bf16_supported", always(True)),
        (cuda, "synchronize", waited("synchronize")),
        (cuda, "Event", lambda **options: _Event(gpu)),
        (threading.Thread, "run", _with_gpu(gpu, threading.Thread.run)),
        (torch.cuda.amp.common, "amp_definitely_not_available", always(False)),
        (torch.backends.cudnn, "is_acceptable", always(False)),  # Only asked before weights are put into one piece of memory.
        (torch.utils._foreach_utils, "_foreach_supported_types", foreach),
        (sys.modules["torch.optim.optimizer"], "_foreach_supported_types", foreach),  # The attribute is removed again.
        (torch, "Generator", _Generator),
        (torch.autograd, "_engine_run_backward", _backward(torch.autograd._engine_run_backward)),
        (torch._VF, "lstm", _with_cudnn(torch.lstm)),
        (torch._VF, "gru", _with_cudnn(torch.gru)),
        (Tensor, "pin_memory", lambda tensor, *args: gpu.pin(tensor)),
        (Tensor, "is_pinned", lambda tensor, *args: gpu.is_pinned(tensor)),
    ]


class _Generator(torch.Generator):
    """One of the CPU, whatever is asked for; a class, since modules that torch imports later name it in annotations."""

    def __new__(cls, device: object = "cpu") -> torch.Generator:
        return super().__new__(cls)


class _Event:
    """``torch.cuda.Event`` of the only stream."""

    def __init__(self, gpu: PretendedGPU) -> None:
        self._gpu = gpu
        self._started = 0

    def record(self) -> None:
        self._started = self._gpu.started()

    def synchronize(self) -> None:
        self._gpu.wait("event", self._started)


def _with_gpu(gpu: PretendedGPU, run: Callable[[Any], None]) -> Callable[[Any], None]:
    def run_with_gpu(thread: Any) -> None:
        with gpu:
            run(thread)

    return run_with_gpu


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda outputs, *args, **kwargs: (run_backward if isinstance(outputs[0], OnGPU) else run)(outputs, *args, **kwargs)


class _Recurrent(torch.autograd.Function):
    """A recurrent network of torch as one operation, as which cuDNN carries it out; backward the states are computed again."""

    @staticmethod
    def forward(ctx: Any, read: Callable[..., tuple[Tensor, ...]], places: Any, *leaves: Any) -> tuple[Tensor, ...]:
        ctx.read, ctx.places, ctx.leaves = read, places, [value_of(leaf) for leaf in leaves]
        PretendedGPU.current.count_launch("recurrent network")
        return tuple(map(OnGPU, read(*tree_unflatten(ctx.leaves, places))))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        PretendedGPU.current.count_launch("recurrent network backward")
        wanted = list(ctx.needs_input_grad[2:])
        leaves = [leaf.detach().requires_grad_() if needed else leaf for leaf, needed in zip(ctx.leaves, wanted, strict=True)]
        with torch.enable_grad():
            results = ctx.read(*tree_unflatten(leaves, ctx.places))
        inputs = [leaf for leaf, needed in zip(leaves, wanted, strict=True) if needed]
        found = iter(torch.autograd.grad(results, inputs, [value_of(gradient) for gradient in gradients]))
        return (None, None, *(OnGPU(next(found)) if needed else None for needed in wanted))


def _with_cudnn(read: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Return ``torch.lstm`` or ``torch.gru`` with cuDNN; torch's own way there asks for a GPU."""

    def on_gpu(inputs: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        if not isinstance(inputs, OnGPU):
            return read(inputs, *rest)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else inputs.dtype
        leaves, places = tree_flatten((inputs, *rest))
        leaves = [leaf.to(dtype) if isinstance(leaf, OnGPU) else leaf for leaf in leaves]
        return _Recurrent.apply(read, places, *leaves)

    return on_gpu
