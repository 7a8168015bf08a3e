"""Counting what an extractor asks of a GPU, without one: multiply-adds, bytes and launches, by the pretended GPU of the tests.

Nothing is computed. An operation that starts kernels is charged its multiply-adds, if it is a convolution or product, and all bytes
of its inputs and outputs once: as if every cache were empty before it and nothing were fused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

import extractors
from extractors.regions import faster_rcnn
from extractors.settings import Settings
from extractors.weights.finding import Weights
from tests.extractors.test_on_a_gpu import GPU, load
from tests.pretended_gpu import PretendedGPU, pretended_gpu

__all__ = ["Counting", "Counts", "Operation", "count", "load_zeros"]

_aten = torch.ops.aten
_TRANSFERS = (_aten._to_copy, _aten.copy_)
_FUSED_CONVOLUTIONS = (_aten.cudnn_convolution_relu, _aten.cudnn_convolution_add_relu)


@dataclass(frozen=True)
class Operation:
    """An operation that starts kernels.

    Attributes:
        name: its name in torch.
        macs: multiply-adds of a convolution or product, else 0.
        bytes: bytes of its inputs and outputs.
        bits: bits of a number of its first input.
    """

    name: str
    macs: int
    bytes: int
    bits: int


@dataclass
class Counts:
    """What a batch asks of a GPU.

    Attributes:
        operations: in the order in which they are launched; an entry may stand for several launches.
        launches: operations that start kernels.
        waits: how often the host waits.
        moved: bytes between host and GPU.
    """

    operations: list[Operation] = field(default_factory=list)
    launches: int = 0
    waits: int = 0
    moved: int = 0

    @property
    def macs(self) -> int:
        """All multiply-adds."""
        return sum(operation.macs for operation in self.operations)

    @property
    def bytes(self) -> int:
        """All bytes that operations read and write."""
        return sum(operation.bytes for operation in self.operations)


class Counting(TorchDispatchMode):
    """Charges what reaches the pretended GPU.

    A recurrent network is one operation there. Its products are those that it makes on the CPU instead; those that its backward
    pass makes to have its states once more, with gradients enabled, are left out, since cuDNN keeps them.
    """

    def __init__(self, gpu: PretendedGPU) -> None:
        super().__init__()
        self._gpu = gpu
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        # In inference mode nobody has taken composed operations apart yet.
        if torch.is_inference_mode_enabled() and packet is not _aten.scaled_dot_product_attention:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        before = self._gpu.launches.total()
        result = func(*args, **kwargs)
        inputs, outputs = (
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, Tensor)] for each in ((args, kwargs), result)
        )
        tensors = [*inputs, *outputs]
        if self._gpu.launches.total() > before:
            bits = 8 * inputs[0].element_size() if inputs else 32
            self.counts.operations.append(
                Operation(str(packet), _macs(packet, args, kwargs, result), sum(map(_bytes, tensors)), bits)
            )
        elif (
            packet in flop_registry
            and not torch.is_grad_enabled()
            and not any(tensor.device.type == "cuda" for tensor in tensors)
        ):
            bits = 8 * inputs[0].element_size()
            products = _macs(packet, args, kwargs, result)
            self.counts.operations.append(Operation("recurrent network", products, sum(map(_bytes, tensors)), bits))
        elif packet in _TRANSFERS and len({tensor.device.type for tensor in tensors}) == 2:
            self.counts.moved += _bytes(outputs[0])
        return result


def _macs(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if packet is _aten.scaled_dot_product_attention:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3]))) // 2
    if packet in _FUSED_CONVOLUTIONS:
        bias, stride, padding, dilation, _ = args[-5:]
        plain = (args[0], args[1], bias, stride, padding, dilation, False)
        return int(flop_registry[_aten.convolution](*plain, out_val=result)) // 2
    return int(flop_registry[packet](*args, **kwargs, out_val=result)) // 2 if packet in flop_registry else 0


def _bytes(tensor: Tensor) -> int:
    """Return the bytes in memory: a number that is repeated by a stride of 0 is there once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return prod(sizes) * tensor.element_size()


def load_zeros(name: str, precision: str) -> extractors.Extractor:
    """Load an extractor on the GPU with weights that are zeros: they are neither drawn nor hashed, which takes seconds."""
    if name != "faster-rcnn-36":
        return load(name, precision, GPU)
    with torch.device("meta"):
        model = faster_rcnn.ARCHITECTURE.build()
    weights = Weights({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in model.state_dict().items()})
    weights.__dict__["sha256"] = "0" * 64
    return faster_rcnn.load(Settings(extractors.spec(name), precision), weights, GPU)


def count(name: str, precision: str, size_hw: tuple[int, int], batches: Sequence[int]) -> tuple[int, dict[int, Counts]]:
    """Count what batches ask of a GPU.

    Args:
        name: the extractor.
        precision: its precision.
        size_hw: pixels of a preprocessed image.
        batches: images of each batch.

    Returns:
        Bytes of the weights as the GPU holds them, and the counts by batch.
    """
    found = {}
    with pretended_gpu(hollow=True) as gpu:
        extractor = load_zeros(name, precision)
        for images in batches:
            batch = extractor.collate([torch.zeros(3, *size_hw, dtype=torch.uint8) for _ in range(images)])
            gpu.reset()
            with Counting(gpu) as counting:
                extractor.extract_columns(batch)
            counts = found[images] = counting.counts
            counts.launches, counts.waits = gpu.launches.total(), gpu.waits.total()
        weights = {id(tensor): tensor for tensor in _tensors(extractor)}
    return sum(map(_bytes, weights.values())), found


def _tensors(extractor: extractors.Extractor) -> list[Tensor]:
    modules = [value for value in vars(extractor).values() if isinstance(value, torch.nn.Module)]
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
