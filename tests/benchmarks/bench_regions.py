"""Forms of the last stage of ``faster-rcnn-36``: GFLOP/s of each in one thread, on the regions of one pass, by processor time."""

import argparse
import time

import torch
from processor import machine

from extractors.computing.devices import cast_layers
from extractors.computing.fused_conv2d import can_fuse_in
from extractors.regions.bottom_up.network import build_detector, fold_frozen_norms
from extractors.regions.bottom_up.res5_head import GroupedStage, LastStage, MergedStage, PlainStage, ProductStage
from extractors.regions.faster_rcnn import _REGION, _REGIONS

STAGE_FLOP = 2 * 14 * 14 * (1024 * (512 + 2048) + 3 * (9 * 512 * 512 + 512 * 2048) + 2 * 2048 * 512)
RUNS = 5


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    precision = parser.parse_args().precision
    print(machine(), f"torch {torch.__version__}", flush=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = build_detector().head.eval().requires_grad_(False)
    fold_frozen_norms(head)
    head.dtype = cast_layers(head.layer4, precision)
    head = head.to(memory_format=torch.channels_last)
    forms: dict[str, LastStage] = {"convolutions": PlainStage(head)}
    if can_fuse_in(head.dtype):
        forms["merged convolutions"] = MergedStage(head.layer4, _REGIONS)
    if precision == "fp32":
        forms["matrix products"] = ProductStage(head.layer4)
        forms["convolutions of single pixels"] = GroupedStage(head.layer4, _REGIONS)
    pooled = torch.rand(_REGIONS, *_REGION).to(head.dtype)
    with torch.inference_mode():
        for form, apply in forms.items():
            apply(pooled)
            seconds = []
            for _ in range(RUNS):
                started = time.process_time()
                apply(pooled)
                seconds.append((time.process_time() - started) / _REGIONS)
            print(f"{form}, {precision}: {1e3 * min(seconds):.0f} ms a region, ", end="")
            print(f"{STAGE_FLOP / min(seconds) / 1e9:.0f} GFLOP/s of plain convolutions", flush=True)


if __name__ == "__main__":
    main()
