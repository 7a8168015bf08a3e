"""What an image costs before the model: milliseconds of one thread by stage, for each size and each extractor's preprocessing.

Photographs are those of the test data where they are (`measuring.test_data`), else scenes drawn as large as Flickr30K's.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from bench_extraction import make_photographs
from measuring import machine, test_data
from PIL import Image, features

import extractors
from extractors.images.preprocessing import Normalizer, Preprocessing
from schemas.process.resources import keep_freed_memory

RUNS = 5
NAMES = ("resnet50-pool", "vgg19-10crop", "vgg19-10crop-caffe", "vgg19-grid", "resnet152-grid", "faster-rcnn-36")
TIMM = "timm:resnet18.a1_in1k"  # Resizes with bicubic interpolation.
IMAGENET = Preprocessing(resize_short=256, crop=224, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def main() -> None:
    """Print the stages."""
    keep_freed_memory()
    print(machine())
    torch.set_num_threads(1)  # As where images are decoded.
    print(
        f"Pillow {Image.__version__}, libjpeg-turbo {features.version('libjpeg_turbo')}"
        if features.check_feature("libjpeg_turbo")
        else f"Pillow {Image.__version__} without libjpeg-turbo",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        data = photographs(Path(folder))
        images = [extractors.decode(one) for one in data]
        megapixels = sum(image.width * image.height for image in images) / 1e6 / len(images)
        print(f"{len(data)} JPEGs of {megapixels:.2f} megapixels on average; milliseconds of processor time per image")
        show("decoding", lambda: [extractors.decode(one) for one in data], len(data))
        show("  of it libjpeg", lambda: [Image.open(io.BytesIO(one)).load() for one in data], len(data))
        for name in (*NAMES, TIMM) if find_spec("timm") else NAMES:
            extractor = extractors.load(name, weights="random:0")
            show(f"{name}: preprocessing", lambda run=extractor.preprocess: [run(image) for image in images], len(images))
            if type(extractor).preprocess_single_threaded is not extractors.Extractor.preprocess_single_threaded:
                show(
                    "  by one thread alone",
                    lambda run=extractor.preprocess_single_threaded: [run(image) for image in images],
                    len(images),
                )
        normalised(len(images))


def photographs(folder: Path) -> Sequence[bytes]:
    """Return JPEG files: real ones, or drawn ones."""
    real = test_data("photos")
    paths = sorted((real / "images").glob("*.jpg")) if real else []
    if not paths:
        make_photographs(folder, 16)
        paths = sorted(folder.glob("*.jpg"))
    return [path.read_bytes() for path in paths]


def normalised(count: int) -> None:
    """Print what making floats of crops costs, which the model's threads do."""
    normalize = Normalizer.of(IMAGENET, torch.device("cpu"))
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), np.uint8)).permute(0, 3, 1, 2)
    show("normalising a crop of 224 pixels", lambda: [normalize(pixels) for _ in range(count)], count)


def show(what: str, run: Callable[[], object], images: int) -> None:
    """Print the least processor time of several runs, in milliseconds per image."""
    times = []
    for _ in range(RUNS):
        started = time.thread_time()
        run()
        times.append(time.thread_time() - started)
    print(f"{what}: {1000 * min(times) / images:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
