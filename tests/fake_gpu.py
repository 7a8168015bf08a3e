"""A fake GPU: tensors whose values are in memory and that report ``cuda:0``, to count without a GPU what code does on one.

Inside the block of `fake_gpu`, and in threads that start there, torch finds one GPU. Operations on its tensors go through torch
as on a real one, are carried out on the CPU, and are counted:

- **launches**: operations that start kernels, by name; views, reserved memory and operations on nothing start none.
- **waits**: what makes the host wait for the GPU, with the line of the project that does it, as in
  ``torch.cuda.set_sync_debug_mode``: values, masks or positions of nonzero values that are read, blocking copies, events.
- **copies**: copies without a wait, from pinned memory or to the CPU. One from pageable memory is a wait, as in CUDA.

Tensors of two devices in one operation are a `DeviceMismatchError` with its name and line.

    with fake_gpu() as gpu:
        extractor = extractors.load_extractor("resnet50-pool", weights="random:0", device="cuda")
        gpu.reset()
        extractor.extract(pixels)
    assert gpu.waits.total() == 1
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.cuda.amp.common
import torch.utils._foreach_utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.fake_backward import run_backward

_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).parents[1]
_PROJECT = tuple(f"{_ROOT / name}/" for name in ("extractors", "pipelines", "schemas", "tests", "train"))
_TOOLS = (__file__, str(Path(__file__).with_name("fake_backward.py")))

_aten = torch.ops.aten
_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd
# The host needs to know what comes out, or how large it is.
_READ = {
    *(_aten._local_scalar_dense, _aten.nonzero, _aten.equal, _aten.masked_select, _aten.bincount),
    *(_aten._unique, _aten._unique2, _aten.unique_dim, _aten.unique_consecutive, _aten.unique_dim_consecutive),
}
_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index}
# Reserve memory, or are views although their schema does not say so.
_NO_KERNEL = {
    _aten.detach_,
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._local_scalar_dense),
    *(_aten._unsafe_view, _aten.unsafe_split, _aten.unsafe_split_with_sizes, _aten.unsafe_chunk),
}
# Composed for torch, but one kernel on a GPU.
_ONE_KERNEL = {_aten.scaled_dot_product_attention}
# Take some of their arguments on the CPU.
_MIXED = {*_INDEXED, _aten._pack_padded_sequence}
_TAKES_NUMBERS = {_aten.masked_fill, _aten.masked_fill_, _aten.fill, _aten.fill_, _aten._fused_adam_, _aten._fused_adamw_}
_FUSED_CONVOLUTIONS = {_aten.cudnn_convolution_relu, _aten.cudnn_convolution_add_relu}


class DeviceMismatchError(AssertionError):
    """An operation got tensors of the GPU and of the CPU."""


class Event(NamedTuple):
    """What happened, and the line of the project that caused it, e.g. ``extractors/fixed_size.py:72``."""

    operation: str
    line: str


class OnGPU(Tensor):
    """A tensor that reports ``cuda:0``; ``value`` is on the CPU."""

    value: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, value: Tensor) -> OnGPU:
        with torch.inference_mode(value.is_inference()):  # Views of parameters are ordinary tensors in inference mode, too.
            made = Tensor._make_wrapper_subclass(
                cls, value.size(), strides=value.stride(), storage_offset=value.storage_offset(), dtype=value.dtype, device=_GPU
            )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeGPU.current.__torch_dispatch__(func, types, args, kwargs)  # In other threads, and inside that method.

    def __reduce_ex__(self, protocol: Any) -> Any:  # Files hold what is on the CPU.
        return self.value.detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()


class FakeGPU(TorchDispatchMode):
    """Counts of a block, and ``device``, the number of the GPU that ``torch.cuda`` has chosen; None if it has chosen none."""

    current: FakeGPU

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and importing what would takes seconds.

    def __init__(self, *, hollow: bool = False) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[Event] = Counter()
        self.copies: Counter[Event] = Counter()
        self.device: int | None = None
        self._home = torch.device("meta") if hollow else _CPU
        self._pinned: dict[int, Tensor] = {}

    def reset(self) -> None:
        """Forget what was counted."""
        for counter in (self.launches, self.waits, self.copies):
            counter.clear()

    def report(self) -> str:
        """Return all counts, the greatest first, for the message of a test that fails."""
        lines = []
        for name, counter in (("waits", self.waits), ("copies", self.copies), ("launches", self.launches)):
            lines += [f"{counter.total()} {name}", *(f"  {count} × {key}" for key, count in counter.most_common())]
        return "\n".join(lines)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        # In inference mode nobody has taken composed operations apart yet.
        is_composed = packet not in _ONE_KERNEL and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED)
        if is_composed and torch.is_inference_mode_enabled():
            with self:
                return func._op_dk(_COMPOSED, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
        device = kwargs.get("device")
        goes_here = bool(here) if device is None else torch.device(device).type == "cuda"
        if not here and not goes_here:
            is_pinned = kwargs.get("pin_memory")
            return self.pin(func(*args, **{**kwargs, "pin_memory": False})) if is_pinned else func(*args, **kwargs)
        if packet is _aten._to_copy:
            return self._move(func, args, kwargs, goes_here)
        self._check_devices(func, tensors)
        self._count_waits(packet, args, kwargs, tensors)
        found = self._compute(func, packet, args, kwargs)
        known = {id(tensor.value): tensor for tensor in here}
        self._count_launch(func, packet, found)
        if packet is _aten._pack_padded_sequence:  # The sizes of its steps stay on the CPU.
            return OnGPU(found[0]), found[1]
        return tree_map(lambda leaf: _placed(leaf, known) if goes_here else leaf, found)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], goes_here: bool) -> Tensor:
        (tensor,) = args
        was_here = isinstance(tensor, OnGPU)
        value, kwargs = tree_map(self._inside, (tensor, kwargs))
        if self._home != _CPU and was_here != goes_here:
            value, kwargs = torch.zeros(value.shape, dtype=value.dtype), {**kwargs, "device": self._home if goes_here else _CPU}
        found = func(value, **kwargs)
        if was_here == goes_here:
            self._count_launch(func, func.overloadpacket, found)
        else:
            self._count_copy(tensor, to_gpu=goes_here, blocking=not kwargs.get("non_blocking", False))
        return OnGPU(found) if goes_here else found

    def _count_copy(self, source: Tensor, *, to_gpu: bool, blocking: bool) -> None:
        name = "copy to the GPU" if to_gpu else "copy to the CPU"
        if blocking:
            self.wait(name)
        elif to_gpu and not self.is_pinned(source):
            self.wait(f"{name} from pageable memory")
        else:
            self.copies[Event(name, _line())] += 1

    def _check_devices(self, func: Any, tensors: Sequence[Tensor]) -> None:
        packet = func.overloadpacket
        if packet is _aten.copy_ or (packet in _MIXED and isinstance(tensors[0], OnGPU)):
            return
        there = [tensor for tensor in tensors if not isinstance(tensor, OnGPU)]
        if torch.Tag.pointwise in func.tags or packet in _TAKES_NUMBERS:
            there = [tensor for tensor in there if tensor.dim()]
        if there:
            devices = ", ".join(f"{tensor.device} {list(tensor.shape)}" for tensor in tensors)
            raise DeviceMismatchError(f"{func} in {_line()} got tensors of several devices: {devices}")

    def _count_waits(self, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        if packet in _READ or (packet is _aten.repeat_interleave and kwargs.get("output_size") is None):
            self.wait(str(packet).removeprefix("aten."))
        if packet is _aten.copy_ and isinstance(args[0], OnGPU) != isinstance(args[1], OnGPU):
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            self._count_copy(args[1], to_gpu=isinstance(args[0], OnGPU), blocking=blocking)
        if packet in _INDEXED:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("boolean mask")
            for index in indices:
                if not isinstance(index, OnGPU):
                    self._count_copy(index, to_gpu=True, blocking=True)

    def _count_launch(self, func: Any, packet: Any, found: Any) -> None:
        results = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
        if not func.is_view and packet not in _NO_KERNEL and (not results or any(result.numel() for result in results)):
            self.launches[str(packet).removeprefix("aten.")] += 1

    def _compute(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(self._inside, (args, kwargs))
        if packet is _aten.equal and self._home != _CPU:
            return True  # A loop that goes on until nothing changes ends.
        if packet is _aten.cudnn_batch_norm:
            return (*_aten.native_batch_norm(*args), args[0].new_empty(0, dtype=torch.uint8))  # The last is cuDNN's own.
        if packet in _FUSED_CONVOLUTIONS:
            return _fused_convolution(*args)
        return func(*args, **kwargs)

    def _inside(self, leaf: Any) -> Any:
        """Return what an operation gets in place of an argument: the value of a tensor, and where such values lie."""
        if isinstance(leaf, torch.device) and leaf.type == "cuda":
            return self._home
        return leaf.value if isinstance(leaf, OnGPU) else leaf

    def wait(self, name: str) -> None:
        """Count a wait of the host."""
        self.waits[Event(name, _line())] += 1

    def pin(self, tensor: Tensor) -> Tensor:
        """Take the memory of a tensor on the CPU for page-locked."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one that `pin` returned, or a view of it."""
        return not isinstance(tensor, OnGPU) and tensor.untyped_storage().data_ptr() in self._pinned

    def set_device(self, device: torch.device | str | int) -> None:
        """Choose a GPU, as ``torch.cuda.set_device`` does."""
        self.device = device if isinstance(device, int) else torch.device(device).index or 0

    def exchange_device(self, number: int) -> int:
        """Choose a GPU, and return which one was chosen before; -1 stands for none."""
        before, self.device = self.device, None if number < 0 else number
        return -1 if before is None else before


def _fused_convolution(values: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """Return what cuDNN's convolution with a ReLU makes, as torch computes it layer by layer."""
    *added, bias, stride, padding, dilation, groups = rest
    found = _aten.convolution(values, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)
    if added:
        other, alpha = added
        found.add_(other, alpha=1 if alpha is None else alpha)
    return found.relu_()


def _line() -> str:
    """Return the innermost line of the project that is being carried out."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _TOOLS and name.startswith(_PROJECT):
            return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _placed(leaf: Any, known: dict[int, OnGPU]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return known[id(leaf)] if id(leaf) in known else OnGPU(leaf)


@contextmanager
def fake_gpu(*, hollow: bool = False) -> Iterator[FakeGPU]:
    """Let torch find a fake GPU inside the block.

    Args:
        hollow: nothing is computed, which saves most of the time: what is read from the GPU is zeros. Counts that do not depend on
            values are the same.
    """
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        pytest.skip(f"the fake GPU needs a later torch than {torch.__version__}")
    gpu = FakeGPU.current = FakeGPU(hollow=hollow)
    torch._C._ensureCUDADeviceGuardSet()
    lifted = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for owner, name, value in _patches(gpu):
            stack.enter_context(mock.patch.object(owner, name, value))
        torch._C._set_only_lift_cpu_tensors(True)  # A tensor made of numbers is made on the CPU, and then copied.
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        stack.enter_context(gpu)
        yield gpu


def _patches(gpu: FakeGPU) -> list[tuple[Any, str, Any]]:
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
        (cuda, "is_bf16_supported", always(True)),
        (cuda, "synchronize", waited("synchronize")),
        (cuda, "Event", lambda **options: SimpleNamespace(record=always(None), synchronize=waited("event"))),
        (threading.Thread, "run", _with_gpu(gpu, threading.Thread.run)),
        (torch.backends.cudnn, "is_acceptable", always(False)),  # Only asked before weights are put into one piece of memory.
        (torch.utils._foreach_utils, "_foreach_supported_types", foreach),
        (sys.modules["torch.optim.optimizer"], "_foreach_supported_types", foreach),  # The attribute is removed again.
        # Module.to gives a module new parameters, instead of new values to old ones of another class.
        (torch.__future__, "_overwrite_module_params_on_conversion", True),
        (torch, "Generator", _Generator),
        (torch.autograd, "_engine_run_backward", _backward(torch.autograd._engine_run_backward)),
        (torch._VF, "lstm", _with_cudnn(torch.lstm)),
        (torch._VF, "gru", _with_cudnn(torch.gru)),
        (Tensor, "pin_memory", lambda tensor, *args: gpu.pin(tensor.clone())),
        (Tensor, "is_pinned", lambda tensor, *args: gpu.is_pinned(tensor)),
    ]


class _Generator(torch.Generator):
    """One of the CPU, whatever is asked for; a class, since modules that torch imports later name it in annotations."""

    def __new__(cls, device: object = "cpu") -> torch.Generator:
        return super().__new__(cls)


def _with_gpu(gpu: FakeGPU, run: Callable[[Any], None]) -> Callable[[Any], None]:
    def run_with_gpu(thread: Any) -> None:
        with gpu:
            run(thread)

    return run_with_gpu


def _backward(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda outputs, *args, **kwargs: (run_backward if isinstance(outputs[0], OnGPU) else run)(outputs, *args, **kwargs)


class _Recurrent(torch.autograd.Function):
    """A recurrent network of torch as one operation, as which cuDNN carries it out."""

    @staticmethod
    def forward(ctx: Any, read: Callable[..., tuple[Tensor, ...]], places: Any, *leaves: Any) -> tuple[Tensor, ...]:
        FakeGPU.current.launches["recurrent network"] += 1
        values = [
            leaf.value.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, OnGPU) else leaf for leaf in leaves
        ]
        with torch.enable_grad():
            ctx.results = read(*tree_unflatten(values, places))
        ctx.inputs = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
        return tuple(OnGPU(result.detach()) for result in ctx.results)

    @staticmethod
    def backward(ctx: Any, *gradients: OnGPU) -> tuple[Tensor | None, ...]:
        FakeGPU.current.launches["recurrent network backward"] += 1
        found = iter(torch.autograd.grad(ctx.results, ctx.inputs, [gradient.value for gradient in gradients]))
        return (None, None, *(OnGPU(next(found)) if needed else None for needed in ctx.needs_input_grad[2:]))


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
