"""``resnet50-pool`` and ``vgg19-10crop`` end to end (files to shards, through Beam) against the bare model's forward.

The yardstick is torchvision's model as anybody would run it over ready tensors: same weights, threads, batch size and
precision, channels-last, inference mode, images that are decoded, cropped and normalised beforehand.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from measuring import machine, ratio

from extractors import ExtractorRequest
from pipelines.demo.scenes import draw, make_scenes
from pipelines.features.extract import extract_features
from pipelines.features.job import FeaturesJob
from pipelines.inputs.images import open_images

IMAGES = {"resnet50-pool": 192, "vgg19-10crop": 24}
BATCH = {"resnet50-pool": 16, "vgg19-10crop": 2}


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extractor", choices=IMAGES, help="only this one")
    parser.add_argument("--images", type=int, help="images of a run")
    arguments = parser.parse_args()
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for extractor in [arguments.extractor] if arguments.extractor else IMAGES:
        count = arguments.images or IMAGES[extractor]
        with tempfile.TemporaryDirectory() as folder:
            make_photographs(Path(folder), count)
            ratio(
                f"{extractor} end to end, against the bare model, {count} images",
                lambda extractor=extractor, folder=folder, count=count: end_to_end(extractor, folder, count),
                bare(extractor, count),
                unit="images/s",
                at_least=0.95,
            )


def make_photographs(folder: Path, count: int) -> None:
    """Draws scenes as large as a photograph of Flickr30k."""
    for name, scene in make_scenes(count):
        picture = draw(scene)
        picture.resize((500, 500 * picture.height // picture.width)).save(folder / f"{name}.jpg", quality=90)


def end_to_end(extractor: str, folder: str, count: int) -> float:
    """Runs the job into a new folder; images per second, start-up and loading counted."""
    with tempfile.TemporaryDirectory() as output:
        job = FeaturesJob(
            images=open_images(folder),
            output=output,
            extractor=ExtractorRequest(extractor, weights="random:0"),
            device="cpu",
            batch_size=BATCH[extractor],
            shards=4,
        )
        started = time.perf_counter()
        extract_features(job)
        return count / (time.perf_counter() - started)


def bare(extractor: str, count: int) -> Callable[[], float]:
    """Makes the yardstick: torchvision's model over one ready batch, as often as the images need."""
    torch.manual_seed(0)
    if extractor == "resnet50-pool":
        model = torchvision.models.resnet50(weights=None)
        model.fc = torch.nn.Identity()
        shape = (BATCH[extractor], 3, 224, 224)
    else:
        model = torchvision.models.vgg19(weights=None)
        model.classifier = model.classifier[:5]
        shape = (BATCH[extractor] * 10, 3, 224, 224)
    model = model.eval().to(memory_format=torch.channels_last)
    batch = torch.randn(shape).contiguous(memory_format=torch.channels_last)

    def run() -> float:
        with torch.inference_mode():
            model(batch)
            started = time.perf_counter()
            for _ in range(count // BATCH[extractor]):
                model(batch)
            return count // BATCH[extractor] * BATCH[extractor] / (time.perf_counter() - started)

    return run


if __name__ == "__main__":
    main()
