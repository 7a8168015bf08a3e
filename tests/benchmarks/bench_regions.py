"""``faster-rcnn-36``: end to end against the bare extractor, and the extractor against the detector run layer by layer.

The second yardstick is the computation as ports of the original do it: all regions of an image through the last stage at once,
as convolutions, with all threads at each layer, and 1,600 calls of torchvision's suppression. The rate of the last stage is
given in its 1.76 TFLOP an image, against the rate of a matrix product in the same run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from aims import floor
from bench_extraction import make_photographs
from measuring import PeakMemory, machine, ratio

import extractors
from extractors.base import Extractor
from extractors.computing.devices import cast_layers
from extractors.computing.onednn import is_merged_in
from extractors.regions.bottom_up.input import prepare, resized_wh, scale_of, send
from extractors.regions.bottom_up.last_stage import GroupedStage, LastStage, MergedStage, PlainStage, ProductStage
from extractors.regions.bottom_up.network import POOLED, build, fold_norms, pool, suppress
from extractors.regions.bottom_up.pooling import distinct_bins, pool_bins
from extractors.regions.boxes import STRIDE
from extractors.regions.faster_rcnn import _BINS, _REGION, _REGIONS, FasterRCNNRegions
from extractors.regions.selection import Detections, choose
from extractors.settings import RegionOptions
from pipelines.features.extraction import extract_features
from pipelines.inputs.images import open_images
from pipelines.jobs import FeaturesJob

STAGE_FLOP = 2 * 14 * 14 * (1024 * (512 + 2048) + 3 * (9 * 512 * 512 + 512 * 2048) + 2 * 2048 * 512)
BATCH = 2
CPU = torch.device("cpu")
FEW = 4  # images for the slower yardstick


def main() -> None:
    """Prints ratios, rates and peak memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=16, help="images of a run; few let the start-up show")
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs of each ratio")
    parser.add_argument("--precision", default="fp32", help="of the extractor")
    parser.add_argument("--forms", action="store_true", help="only compare the forms of the last stage, which takes a minute")
    arguments = parser.parse_args()
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    if arguments.forms:
        forms(arguments.precision)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_photographs(Path(folder), arguments.images)
        pixels = ready(folder)
        with PeakMemory(os.getpid()) as memory:
            extractor = extractors.load("faster-rcnn-36", weights="random:0", precision=arguments.precision)
            bare(extractor, pixels)
        print(f"peak memory of the extractor with {BATCH} images at once: {memory.peak / 1e9:.2f} GB", flush=True)
        threads = torch.get_num_threads()
        stages(extractor, pixels[0])
        torch.set_num_threads(threads)
        forms(arguments.precision)
        ratio(
            f"end to end against the bare extractor, {len(pixels)} images",
            lambda: end_to_end(folder, len(pixels), arguments.precision),
            lambda: bare(extractor, pixels),
            unit="images/min",
            at_least=floor("regions end to end"),
            runs=arguments.runs,
        )
        plain = layer_by_layer()
        ratio(
            f"the extractor ({arguments.precision}) against the detector layer by layer (fp32)",
            lambda: bare(extractor, pixels[:FEW]),
            lambda: plain(pixels[:FEW]),
            unit="images/min",
            at_least=floor("regions alone, fp32") if arguments.precision == "fp32" else floor("regions alone, bf16"),
            runs=arguments.runs,
        )


def ready(folder: str) -> list[torch.Tensor]:
    """Decodes the images."""
    return [
        torch.from_numpy(np.array(extractors.decode(path.read_bytes()))).permute(2, 0, 1)
        for path in sorted(Path(folder).iterdir())
    ]


def end_to_end(folder: str, count: int, precision: str) -> float:
    """Runs the job into a new folder; images per minute, start-up and loading counted."""
    with tempfile.TemporaryDirectory() as output:
        job = FeaturesJob(
            images=open_images(folder),
            output=output,
            extractor=extractors.ExtractorRequest("faster-rcnn-36", weights="random:0", precision=precision),
            device="cpu",
            batch_size=BATCH,
            shards=2,
        )
        started = time.perf_counter()
        extract_features(job)
        return 60 * count / (time.perf_counter() - started)


def bare(extractor: Extractor, pixels: list[torch.Tensor]) -> float:
    """Runs the extractor over decoded images; images per minute."""
    started = time.perf_counter()
    for start in range(0, len(pixels), BATCH):
        extractor.extract_columns(pixels[start : start + BATCH])
    return 60 * len(pixels) / (time.perf_counter() - started)


def layer_by_layer() -> Callable[[list[torch.Tensor]], float]:
    """Makes the yardstick: the plain detector in float32, one image after the other."""
    torch.manual_seed(0)
    detector = build().eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def detect(image: torch.Tensor) -> None:
        height, width = image.shape[1:]
        scale = scale_of(width, height)
        maps = detector.backbone(prepare(send(image, CPU)).contiguous(memory_format=torch.channels_last))
        candidates = detector.rpn.propose(maps, *resized_wh(width, height), torch.tensor([scale]))
        boxes, are_kept = suppress(*candidates)
        boxes = boxes[0, : int(are_kept.sum())]
        features = detector.head(pool(maps, boxes[None]))
        classes, _ = detector.head.classify(features)
        corners = boxes / scale + torch.tensor([0, 0, 1, 1])
        best = torch.zeros(len(boxes))
        for scores in classes[:, 1:].t():
            kept = torchvision.ops.nms(corners, scores, 0.3)
            best[kept] = torch.maximum(best[kept], scores[kept])
        best.topk(min(36, len(best)))

    def run(pixels: list[torch.Tensor]) -> float:
        with torch.inference_mode():
            started = time.perf_counter()
            for image in pixels:
                detect(image)
            return 60 * len(pixels) / (time.perf_counter() - started)

    return run


def stages(extractor: FasterRCNNRegions, image: torch.Tensor) -> None:
    """Prints the seconds of each stage of one image in one thread, and the last stage's rate against a matrix product's."""
    torch.set_num_threads(1)
    height, width = image.shape[1:]
    with torch.inference_mode():
        maps = timed("resizing and backbone", lambda: extractor._maps([send(image, CPU)]))
        original = send(image, CPU)
        boxes, are_kept = timed("proposals", lambda: suppress(*extractor._propose(maps, [original])))
        boxes = boxes[:, : int(are_kept.sum())]
        cells, stage = maps.to(extractor._model.head.dtype), extractor._stage

        def pooled() -> tuple[list[torch.Tensor], torch.Tensor]:
            bins, index = distinct_bins(boxes[0], POOLED, 1 / STRIDE, *maps.shape[2:])
            return [pool_bins(cells, some) for some in bins.split(_BINS)], index

        bins, index = timed("pooling of the distinct bins", pooled)
        print(f"  {sum(map(len, bins))} of {index.numel()} bins are distinct", flush=True)
        started = time.perf_counter()
        parts = timed("what regions share of the last stage", lambda: [stage.share(some) for some in bins])
        shared = tuple(torch.cat(tables) for tables in zip(*parts, strict=True))
        finished = timed("last stage", lambda: [stage.finish(shared, some) for some in index.split(_REGIONS)])
        features = torch.cat(finished)
        rate = STAGE_FLOP * boxes.shape[1] / (time.perf_counter() - started) / 1e9
        labels = timed("classes and attributes", lambda: extractor._model.head.classify(features))
        rows = (boxes[0] / scale_of(width, height), torch.ones(boxes.shape[1], dtype=torch.bool), features, *labels)
        found = Detections(*(values[None] for values in rows))
        timed("selection", lambda: choose(found, RegionOptions()))
        left, right = torch.randn(4900, 2048), torch.randn(2048, 512)
        started = time.perf_counter()
        for _ in range(10):
            left @ right
        product = 10 * 2 * 4900 * 2048 * 512 / (time.perf_counter() - started) / 1e9
    print(
        f"last stage: {rate:.0f} GFLOP/s of plain convolutions, where a matrix product has {product:.0f}, one thread",
        flush=True,
    )


def forms(precision: str) -> None:
    """Prints the rate of each form of the last stage in one thread, on the regions of one pass, by processor time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = build().head.eval().requires_grad_(False)
    fold_norms(head)
    head.dtype = cast_layers(head.layer4, precision)
    head = head.to(memory_format=torch.channels_last)
    compared: dict[str, LastStage] = {"convolutions": PlainStage(head)}
    if is_merged_in(head.dtype):
        compared["merged convolutions"] = MergedStage(head.layer4, _REGIONS)
    if precision == "fp32":
        compared["matrix products"] = ProductStage(head.layer4)
        compared["convolutions of single pixels"] = GroupedStage(head.layer4, _REGIONS)
    pooled = torch.rand(_REGIONS, *_REGION).to(head.dtype)
    with torch.inference_mode():
        for form, apply in compared.items():
            taken = []
            for _ in range(1 + FEW):
                started = time.process_time()
                apply(pooled)
                taken.append(time.process_time() - started)
            seconds = min(taken[1:]) / _REGIONS
            print(f"  last stage as {form}, {precision}: {1e3 * seconds:.0f} ms a region, ", end="")
            print(f"{STAGE_FLOP / seconds / 1e9:.0f} GFLOP/s of plain convolutions", flush=True)
    torch.set_num_threads(threads)


def timed(what: str, function: Callable[[], Any]) -> Any:
    """Runs once; prints the seconds."""
    started = time.perf_counter()
    result = function()
    print(f"  {what}: {time.perf_counter() - started:.2f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
