"""``resnet50-pool`` end to end (files to shards, through Beam) against the bare model's forward over ready tensors.

The yardstick is torchvision's model as anybody would run it: same weights, threads, batch size and precision, channels-last,
inference mode, tensors that are decoded and normalised beforehand.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torchvision
from measuring import machine, ratio

from pipelines.features import FeaturesJob, extract_features
from pipelines.images import open_images
from pipelines.scenes import draw, make_scenes

BATCH = 16


def main() -> None:
    """Prints the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=192)
    count = parser.parse_args().images
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images")
        images.mkdir()
        for name, scene in make_scenes(count):
            picture = draw(scene)
            # As large as a photograph of Flickr30k.
            picture.resize((500, 500 * picture.height // picture.width)).save(images / f"{name}.jpg", quality=90)
        torch.manual_seed(0)
        model = torchvision.models.resnet50(weights=None).eval().to(memory_format=torch.channels_last)
        model.fc = torch.nn.Identity()
        batch = torch.randn(BATCH, 3, 224, 224).contiguous(memory_format=torch.channels_last)

        def ours() -> float:
            with tempfile.TemporaryDirectory() as output:
                job = FeaturesJob(
                    images=open_images(images), output=output, weights="random:0", device="cpu", batch_size=BATCH, shards=4
                )
                started = time.perf_counter()
                extract_features(job)
                return count / (time.perf_counter() - started)

        def bare() -> float:
            with torch.inference_mode():
                model(batch)
                started = time.perf_counter()
                for _ in range(count // BATCH):
                    model(batch)
                return count // BATCH * BATCH / (time.perf_counter() - started)

        ratio("resnet50-pool end to end, against the bare model", ours, bare, unit="images/s", at_least=0.95)


if __name__ == "__main__":
    main()
