"""The operations of the pretended GPU: its tensors, and what carries them out on the CPU and counts them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DeviceMismatchError", "Event", "OnGPU", "PretendedGPU", "value_of"]

_GPU, _CPU = torch.device("cuda", 0), torch.device("cpu")
_ROOT = Path(__file__).parents[1]
_PROJECT = tuple(f"{_ROOT / name}/" for name in ("extractors", "pipelines", "schemas", "tests", "train"))
_TOOLS = tuple(str(Path(__file__).with_name(f"pretended_{name}.py")) for name in ("backward", "gpu", "operations"))

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
_DIVISIONS = {_aten.div, _aten.div_}
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
                cls,
                value.size(),
                strides=value.stride(),
                storage_offset=value.storage_offset(),
                dtype=value.dtype,
                device=_GPU,
            )
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return PretendedGPU.current.run(func, args, kwargs or {})  # In threads other than that of the block, and inside `run`.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: OnGPU) -> None:  # Module.to assigns so; torch would take over the shape and leave the value.
        Tensor.data.__set__(self, other)
        self.value = other.value

    def __reduce_ex__(self, protocol: Any) -> Any:  # Files hold what is on the CPU.
        return self.value.detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{list(self.shape)} {self.dtype} on the pretended GPU"


class PretendedGPU(TorchDispatchMode):
    """What the GPU of a block was asked to do.

    Attributes:
        launches: operations that start kernels, by name.
        launching: the same by line.
        waits: see the module.
        copies: likewise.
        device: number of the GPU that ``torch.cuda.set_device``, or a block of ``torch.cuda.device``, has chosen; None if none has.
    """

    current: PretendedGPU

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled here, and importing what would takes seconds.

    def __init__(self, *, hollow: bool = False) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.launching: Counter[str] = Counter()
        self.waits: Counter[Event] = Counter()
        self.copies: Counter[Event] = Counter()
        self.device: int | None = None
        self._home = torch.device("meta") if hollow else _CPU
        self._pinned: dict[int, Tensor] = {}
        self._copying: list[Callable[[], None]] = []
        self._ended = 0

    def reset(self) -> None:
        """Forget what was counted."""
        for counter in (self.launches, self.launching, self.waits, self.copies):
            counter.clear()

    def report(self) -> str:
        """Return all counts, the greatest first, for the message of a test that fails."""
        parts = [f"{self.launches.total()} launches, {self.waits.total()} waits, {self.copies.total()} copies"]
        parts += [f"{count} × wait: {event.operation} in {event.line}" for event, count in self.waits.most_common()]
        parts += [f"{count} × {event.operation} in {event.line}" for event, count in self.copies.most_common()]
        parts += [f"{count} × {name}" for name, count in (self.launches + self.launching).most_common()]
        return "\n".join(parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out an operation."""
        packet = func.overloadpacket
        # In inference mode nobody has taken composed operations apart yet.
        if torch.is_inference_mode_enabled() and packet not in _ONE_KERNEL and _is_composed(func):
            with self:
                return func._op_dk(_COMPOSED, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if isinstance(tensor, OnGPU)]
        device = kwargs.get("device")
        goes_here = bool(here) if device is None else torch.device(device).type == "cuda"
        if not here and not goes_here and kwargs.get("pin_memory"):
            return self._keep_pinned(func(*args, **{**kwargs, "pin_memory": False}))
        if not here and not goes_here:
            return func(*args, **kwargs)
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
            blocking = not kwargs.get("non_blocking", False)
            self._count_copy(tensor, to_gpu=goes_here, blocking=blocking)
            if not blocking and not goes_here:
                return self._arriving(found)
            if not blocking and self.is_pinned(tensor):
                self._copying.append(_unchanged(tensor, _line()))
        return OnGPU(found) if goes_here else found

    def _arriving(self, value: Tensor) -> Tensor:
        """Return page-locked memory that gets a value when the copy ends."""
        memory = self._keep_pinned(value.clone().fill_(float("nan") if value.is_floating_point() else 85))
        self._copying.append(lambda: memory.copy_(value))
        return memory

    def _count_copy(self, source: Tensor, *, to_gpu: bool, blocking: bool) -> None:
        name = "copy to the GPU" if to_gpu else "copy to the CPU"
        if blocking:
            self.wait(name)
        else:
            staged = to_gpu and not self.is_pinned(source)
            self.copies[Event(f"{name} from pageable memory" if staged else name, _line())] += 1

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
            self.wait(_name(packet))
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
            self.count_launch(_name(packet))

    def _compute(self, func: Any, packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        divides_by_number = packet in _DIVISIONS and not kwargs.get("rounding_mode") and _is_number(args[1])
        args, kwargs = tree_map(self._inside, (args, kwargs))
        if packet is _aten.equal and self._home != _CPU:
            return True  # A loop that goes on until nothing changes ends.
        if packet is _aten.cudnn_batch_norm:
            return (*_aten.native_batch_norm(*args), args[0].new_empty(0, dtype=torch.uint8))  # The last is cuDNN's own.
        if packet in _FUSED_CONVOLUTIONS:
            return _fused_convolution(*args)
        if divides_by_number and args[0].is_floating_point():
            wide = torch.float64 if args[0].dtype == torch.float64 else torch.float32
            reciprocal = torch.ones((), dtype=wide) / torch.as_tensor(args[1], dtype=wide)
            product = (args[0].to(wide) * reciprocal).to(args[0].dtype)
            return args[0].copy_(product) if packet is _aten.div_ else product
        return func(*args, **kwargs)

    def _inside(self, leaf: Any) -> Any:
        """Return what an operation gets in place of an argument: the value of a tensor, and where such values lie."""
        if isinstance(leaf, torch.device) and leaf.type == "cuda":
            return self._home
        return value_of(leaf)

    def count_launch(self, name: str) -> None:
        """Count an operation that starts a kernel."""
        self.launches[name] += 1
        self.launching[_line()] += 1

    def wait(self, name: str, started: int | None = None) -> None:
        """Count a wait, after which all copies have ended, or as many as had been started at some time."""
        self.waits[Event(name, _line())] += 1
        with torch.inference_mode():
            while self._copying and (started is None or self._ended < started):
                self._ended += 1
                self._copying.pop(0)()

    def started(self) -> int:
        """Return the number of copies that have been started without waiting."""
        return self._ended + len(self._copying)

    def _keep_pinned(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """Return a copy in memory that is taken for page-locked; what is there already is returned itself."""
        if self.is_pinned(tensor):
            return tensor
        if isinstance(tensor, OnGPU):
            raise RuntimeError("cannot pin a tensor of the GPU, only dense CPU tensors can be pinned")
        return self._keep_pinned(tensor.clone(memory_format=torch.preserve_format))

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


def _unchanged(memory: Tensor, line: str) -> Callable[[], None]:
    """Return what checks that page-locked memory holds what it held when its copy was started."""
    before = memory.clone()

    def check() -> None:
        assert torch.equal(memory, before), f"page-locked memory was written to before its copy in {line} had ended"

    return check


def _line() -> str:
    """Return the innermost line of the project that is being carried out."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name not in _TOOLS and name.startswith(_PROJECT):
            return f"{Path(name).relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _is_composed(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED)


def _name(packet: Any) -> str:
    return str(packet).removeprefix("aten.")


def value_of(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, OnGPU) else leaf


def _placed(leaf: Any, known: dict[int, OnGPU]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    tensor = known.get(id(leaf))
    if tensor is None:
        return OnGPU(leaf)
    assert tensor.shape == leaf.shape, "an operation changed the shape of its argument, which is not pretended"
    return tensor


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and not value.dim() and not isinstance(value, OnGPU))
