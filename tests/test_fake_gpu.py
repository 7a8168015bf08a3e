"""Counts of the fake GPU and its errors, compared with CUDA's documented behaviour."""

from collections import Counter

import pytest
import torch

from tests.fake_gpu import DeviceMismatchError, fake_gpu

GPU = torch.device("cuda", 0)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def waits_of(function):
    """Return the waits of a function of tensors on the GPU, and the launches."""
    with fake_gpu() as gpu:
        values, mask = random(4, 3).to(GPU), torch.tensor([True, False, True, False]).to(GPU)
        gpu.reset()
        function(values, mask)
    return Counter({operation: count for (operation, _), count in gpu.waits.items()}), gpu.launches.total()


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda x, y: y.add_(x), "aten.add_.Tensor"),
        (lambda x, y: torch.cat([x, y]), "aten.cat.default"),
        (lambda x, y: torch.stack([x[0, 0], y[0, 0]]), "aten.stack.default"),
        (lambda x, y: y[torch.tensor([0], device=GPU)], "aten.index.Tensor"),
        (lambda x, y: y * x[0, 0], "aten.mul.Tensor"),
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
        (lambda x, mask: x.tolist(), {"copy to the CPU": 1}),
        (lambda x, mask: mask.nonzero(), {"nonzero": 1}),
        (lambda x, mask: x[mask], {"boolean mask": 1}),
        (lambda x, mask: x.masked_select(x > 0), {"masked_select": 1}),
        (lambda x, mask: x[[1, 2]], {"copy to the GPU": 1}),
        (lambda x, mask: x[torch.tensor([1, 2])], {"copy to the GPU": 1}),
        (lambda x, mask: torch.equal(x, x), {"equal": 1}),
        (lambda x, mask: torch.tensor([1.0, 2.0], device=GPU), {"copy to the GPU": 1}),
        (lambda x, mask: x.copy_(torch.zeros(4, 3)), {"copy to the GPU": 1}),
        (lambda x, mask: torch.zeros(4, 3).copy_(x), {"copy to the CPU": 1}),
        (lambda x, mask: torch.cuda.synchronize(), {"synchronize": 1}),
        (lambda x, mask: x.long().unique(), {"_unique2": 1}),
        (lambda x, mask: mask.long().bincount(), {"bincount": 1}),
        (lambda x, mask: x.repeat_interleave(mask.long(), dim=0), {"repeat_interleave": 1}),
        (lambda x, mask: x.masked_fill(mask[:, None], 0).relu().sum(), {}),
        (lambda x, mask: torch.where(mask[:, None], x, 0), {}),
        (lambda x, mask: torch.arange(5, device=GPU) + torch.zeros(5, device=GPU), {}),
        (lambda x, mask: x.sort(dim=1), {}),
    ],
)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_waits(function, expected, context):
    with context():
        assert waits_of(function)[0] == expected


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


@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_launches_views_and_empty_tensors_are_not_counted(context):
    def look(x, mask):
        x.view(3, 4), x[1:, :2].T.unsqueeze(0).expand(5, -1, -1).permute(1, 0, 2), x.split(2), x.unbind(), x.flatten()
        torch.empty(9, device=GPU), torch.empty_like(x), x.detach(), x.unflatten(1, (3, 1)).squeeze(2), x.to(GPU)
        x[:0] + 1, torch.zeros(0, device=GPU)

    with context():
        waits, launches = waits_of(look)
    assert (waits, launches) == ({}, 0)
