from __future__ import annotations

import copy

import pytest
import torch
from torchvision.ops import roi_pool

from extractors.regions.bottom_up.network import Head, fold_frozen_norms
from extractors.regions.bottom_up.res5_head import GroupedStage, MergedStage, PlainStage, ProductStage, distinct_bins, pool_bins


@pytest.fixture(scope="module")
def head():
    """Only the last stage has values: drawing those of the whole detector takes seconds."""
    torch.manual_seed(0)
    with torch.device("meta"):
        head = Head().eval().requires_grad_(False)
    head.layer4.to_empty(device="cpu")
    for name, weight in head.layer4.named_parameters():
        torch.nn.init.kaiming_normal_(weight)
        if name.endswith("conv3.weight"):
            weight.mul_(0.25)
    for name, buffer in head.layer4.named_buffers():
        buffer.fill_(1)
        if "running_var" in name:
            buffer.uniform_(0.5, 2)
        elif "running_mean" in name or name.endswith("bias"):
            buffer.normal_()
    fold_frozen_norms(head.layer4)
    return head


FORMS = {
    "plain": PlainStage,
    "merged": lambda head: MergedStage(head.layer4, 2),
    "products": lambda head: ProductStage(head.layer4),
    "grouped": lambda head: GroupedStage(head.layer4, 2),
}
# Grouped convolutions take five times as long as the others.
EACH_FORM = [pytest.param(form, marks=[pytest.mark.cluster] * (form == "grouped")) for form in FORMS]


@pytest.mark.slow
@pytest.mark.parametrize("form", EACH_FORM)
def test_stage_equals_convolutions(head, form):
    pooled = torch.randn(3, 1024, 14, 14).relu_()
    exact = copy.deepcopy(head.layer4).double()
    stage, given = FORMS[form](head), pooled.clone()
    with torch.inference_mode():
        expected = exact(pooled.double()).mean(dim=(2, 3))
        found, first = stage(pooled), stage(pooled[:1])
        plain = head(pooled)
    assert torch.equal(pooled, given)
    assert (found.shape, first.shape) == ((3, 2048), (1, 2048))
    assert found.dtype == torch.float32
    size = expected.abs().max()
    assert (found - expected).abs().max() < 1e-6 * size
    assert (first - expected[:1]).abs().max() < 1e-6 * size
    assert (plain - expected).abs().max() < 1e-6 * size


@pytest.mark.slow
@pytest.mark.parametrize("form", EACH_FORM)
def test_stage_shared_bins_equal_separate_regions(head, form):
    """The bins of three regions, some in all of them and in any order; what is shared is read alone."""
    generator = torch.Generator().manual_seed(0)
    bins = torch.randn(50, 1024, generator=generator).relu_()
    index = torch.randint(50, (3, 14, 14), generator=generator)
    stage = FORMS[form](head)
    with torch.inference_mode():
        parts = [stage.share(some) for some in bins.split(30)]
        shared = tuple(torch.cat(tables) for tables in zip(*parts, strict=True))
        kept = [table.clone() for table in shared]
        found = torch.cat([stage.finish(shared, some) for some in index.split(2)])
        expected = head(bins[index].permute(0, 3, 1, 2))
    assert all(map(torch.equal, shared, kept))
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()


SCALE = 1 / 16


def random_maps(channels: int, height: int, width: int, seed: int = 0) -> torch.Tensor:
    """Make maps as behind a ReLU: half of the cells are zero."""
    values = torch.randn(1, channels, height, width, generator=torch.Generator().manual_seed(seed)).relu_()
    return values.contiguous(memory_format=torch.channels_last)


def random_boxes(count: int, width: int, height: int, seed: int = 0) -> torch.Tensor:
    """Make boxes of all sizes in an image, on whole pixels and between them."""
    ends = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(seed)).sort(dim=1).values
    boxes = (ends * torch.tensor([width - 1, height - 1])).flatten(1)
    boxes[::2] = boxes[::2].round()
    return boxes


def pool_cells(maps: torch.Tensor, boxes: torch.Tensor, side: int, scale: float) -> torch.Tensor:
    """Pool regions as the extractor does, and put the bins of each together."""
    bins, index = distinct_bins(boxes, side, scale, *maps.shape[2:])
    assert len(bins.unique(dim=0)) == len(bins)
    return pool_bins(maps, bins)[index].permute(0, 3, 1, 2)


def by_torchvision(maps: torch.Tensor, boxes: torch.Tensor, side: int) -> torch.Tensor:
    return roi_pool(maps.contiguous(), [boxes], side, SCALE)


@pytest.mark.parametrize(("height", "width"), [(38, 50), (50, 38), (1, 63), (7, 9), (2, 2)])
@pytest.mark.parametrize("side", [14, 7, 1])
def test_pool_bins_equals_torchvision(height, width, side):
    maps = random_maps(24, height, width)
    boxes = random_boxes(120, 16 * width, 16 * height)
    found = pool_cells(maps, boxes, side, SCALE)
    assert torch.equal(found, by_torchvision(maps, boxes, side))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pool_bins_16_bits_equal_rounded_float32(dtype):
    maps = random_maps(32, 38, 50)
    boxes = random_boxes(60, 800, 600)
    assert torch.equal(pool_cells(maps.to(dtype), boxes, 14, SCALE), by_torchvision(maps, boxes, 14).to(dtype))


def test_pool_bins_boxes_at_and_beyond_edges_equal_torchvision():
    maps = random_maps(8, 38, 50)
    boxes = torch.tensor(
        [
            *[[0, 0, 799, 599], [0, 0, 0, 0], [799, 599, 799, 599], [792, 592, 799, 599], [791.9, 591.9, 799, 599]],
            *[[8, 8, 24, 24], [7.99, 8.01, 23.99, 24.01], [300, 0, 310, 599], [0, 300, 799, 310]],
            *[[900, 100, 950, 200], [100, 700, 200, 750], [780, 580, 900, 700], [500, 400, 450, 380]],
        ]
    )
    expected = by_torchvision(maps, boxes, 14)
    assert (expected[9:11] == 0).all()
    assert torch.equal(pool_cells(maps, boxes, 14, SCALE), expected)
    # Halves are rounded up.
    half = torch.tensor([16 * cell + 8.0 for cell in range(2, 46)])
    for near in (half, half.nextafter(torch.tensor(0.0)), half.nextafter(torch.tensor(9e9))):
        boxes = torch.stack((near - 24, torch.full_like(near, 24), near, torch.full_like(near, 200)), dim=1)
        assert torch.equal(pool_cells(maps, boxes, 14, SCALE), by_torchvision(maps, boxes, 14))
