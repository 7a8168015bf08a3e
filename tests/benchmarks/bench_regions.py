"""Forms of the last stage of ``faster-rcnn-36``: GFLOP/s of each in one thread, on the regions of one pass, by processor time."""

from __future__ import annotations

import argparse
import time

import torch
from processor import machine

from extractors.computing.devices import cast_layers
<<<<<<< HEAD
from extractors.computing.onednn import can_fuse_in
from extractors.regions.bottom_up.res5_head import GroupedStage, LastStage, MergedStage, PlainStage, ProductStage
from extractors.regions.bottom_up.network import build, fold_norms
from extractors.regions.faster_rcnn import _REGION, _REGIONS
=======
from extractors.computing.onednn import can_fuse_in
from extractors.options import RegionOptions
from extractors.regions.bottom_up.network import POOLED, build, fold_norms, pool, suppress
from extractors.regions.bottom_up.preprocessing import prepare, resized_wh, scale_of, send
from extractors.regions.bottom_up.res5_head import (
    GroupedStage,
    LastStage,
    MergedStage,
    PlainStage,
    ProductStage,
    distinct_bins,
    pool_bins,
)
from extractors.regions.boxes import STRIDE
from extractors.regions.faster_rcnn import _BINS, _REGION, _REGIONS, FasterRCNNRegions
from extractors.regions.selection import Detections, gather_regions
from pipelines.features.extraction import extract_features
from pipelines.inputs.images import open_images
from pipelines.jobs import FeaturesJob
>>>>>>> 23322f9 (Give the modules of extractors the names of the field)

STAGE_FLOP = 2 * 14 * 14 * (1024 * (512 + 2048) + 3 * (9 * 512 * 512 + 512 * 2048) + 2 * 2048 * 512)
RUNS = 5


def main() -> None:
    """Print the rates."""
    parser = argparse.ArgumentParser(description=__doc__)
<<<<<<< HEAD
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    precision = parser.parse_args().precision
    print(machine(), f"torch {torch.__version__}", flush=True)
=======
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
        timed("selection", lambda: gather_regions(found, RegionOptions()))
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
>>>>>>> 23322f9 (Give the modules of extractors the names of the field)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = build().head.eval().requires_grad_(False)
    fold_norms(head)
    head.dtype = cast_layers(head.layer4, precision)
    head = head.to(memory_format=torch.channels_last)
<<<<<<< HEAD
    forms: dict[str, LastStage] = {"convolutions": PlainStage(head)}
    if can_fuse_in(head.dtype):
        forms["merged convolutions"] = MergedStage(head.layer4, _REGIONS)
=======
    compared: dict[str, LastStage] = {"convolutions": PlainStage(head)}
    if can_fuse_in(head.dtype):
        compared["merged convolutions"] = MergedStage(head.layer4, _REGIONS)
>>>>>>> 23322f9 (Give the modules of extractors the names of the field)
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
