"""Counts of the fake GPU and its errors, compared with CUDA's documented behaviour."""

from collections import Counter

import pytest
import torch

from tests.fake_gpu import DeviceMismatchError, fake_gpu

GPU = torch.device("cuda", 0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x, y: y.add_(x), "aten.add_.Tensor"),
        (lambda x, y: y[torch.tensor([0], device=GPU)], "aten.index.Tensor"),
    ],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_operation_tensors_of_two_devices_raise(function, operation, context):
    with fake_gpu(), context():
        x, y = random(4, 3).to(GPU), random(4, 3)
        with pytest.raises(DeviceMismatchError, match=rf"{operation} in tests/test_fake_gpu.py:\d+ got .*cuda:0 \["):
            function(x, y)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x, mask: x[0, 0].item(), {"_local_scalar_dense": 1}),
        (lambda x, mask: x.cpu(), {"copy to the CPU": 1}),
        (lambda x, mask: mask.nonzero(), {"nonzero": 1}),
        (lambda x, mask: x[mask], {"boolean mask": 1}),
        (lambda x, mask: x[[1, 2]], {"copy to the GPU": 1}),
        (lambda x, mask: torch.equal(x, x), {"equal": 1}),
        (lambda x, mask: torch.tensor([1.0, 2.0], device=GPU), {"copy to the GPU": 1}),
        (lambda x, mask: torch.cuda.synchronize(), {"synchronize": 1}),
        (lambda x, mask: x.repeat_interleave(mask.long(), dim=0), {"repeat_interleave": 1}),
        (lambda x, mask: x.masked_fill(mask[:, None], 0).relu().sum(), {}),
    ],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_waits(function, expected, context):
    with fake_gpu() as gpu, context():
        values, mask = random(4, 3).to(GPU), torch.tensor([True, False, True, False]).to(GPU)
        gpu.reset()
        function(values, mask)
    assert Counter({operation: count for (operation, _), count in gpu.waits.items()}) == expected


def test_copies_non_blocking_wait_for_pageable_memory_only():
    with fake_gpu() as gpu:
        pinned = random(8, 3).pin_memory()
        assert [tensor.is_pinned() for tensor in (pinned, pinned[2:], random(8, 3))] == [True, True, False]
        there = pinned[2:].to(GPU, non_blocking=True)
        there.to("cpu", non_blocking=True)
        there.copy_(pinned[2:], non_blocking=True)
        assert not gpu.waits
        assert Counter(event.operation for event in gpu.copies.elements()) == {"copy to the GPU": 2, "copy to the CPU": 1}
        random(2).to(GPU, non_blocking=True)
        assert [event.operation for event in gpu.waits] == ["copy to the GPU from pageable memory"]
