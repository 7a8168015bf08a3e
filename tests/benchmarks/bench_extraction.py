"""Extractors end to end (files to shards, through Beam, start-up counted) against the bare model's forward.

The baseline is the model as one would run it over ready tensors: same weights, threads, batch size and precision, channels-last,
inference mode, images decoded, cropped and normalised beforehand; of regions it is the extractor itself over decoded images.
``bench_speed.py`` measures the rate without the start-up, and as one process works by default, without Beam.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from baselines import BATCH, bare, inputs, make_photographs, ready
from measuring import rate_of, ratio
from processor import machine
from targets import REGIONS, floor

import extractors
from extractors import ExtractorRequest
from pipelines.features.extraction import extract_features
from pipelines.inputs.images.opening import open_images
from pipelines.jobs import FeaturesJob
from pipelines.running.execution import Execution

IMAGES = {"resnet50-pool": 192, "vgg19-10crop": 24, REGIONS: 16}
BY_BEAM = Execution(beam_flags=("--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner",))


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extractor", choices=IMAGES, help="measure only this extractor")
    parser.add_argument("--images", type=int, help="number of images of a run")
    arguments = parser.parse_args()
    print(machine(), f"torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for extractor in [arguments.extractor] if arguments.extractor else IMAGES:
        count = arguments.images or IMAGES[extractor]
        with tempfile.TemporaryDirectory() as folder:
            make_photographs(Path(folder), count)
            ratio(
                f"{extractor} end to end, against the bare model, {count} images",
                lambda extractor=extractor, folder=folder, count=count: end_to_end(extractor, folder, count),
                bare_regions(folder) if extractor == REGIONS else bare_model(extractor, count),
                unit="images/s",
                at_least=floor("regions end to end") if extractor == REGIONS else floor("extraction with its start-up"),
            )


def end_to_end(extractor: str, folder: str, count: int) -> float:
    """Run the job into a new folder; return images per second, with start-up and loading counted."""
    with tempfile.TemporaryDirectory() as output:
        job = FeaturesJob(
            images=open_images(folder),
            output=output,
            extractor=ExtractorRequest(extractor, weights="random:0"),
            device="cpu",
            batch_size=BATCH[extractor],
            shards=4,
        )
        return rate_of(lambda: extract_features(job, BY_BEAM), count)


def bare_model(extractor: str, count: int) -> Callable[[], float]:
    """Return images per second of torchvision's model over one ready batch, as often as the number of images needs."""
    model, batch = bare(extractor), inputs(extractor)

    def run() -> float:
        with torch.inference_mode():
            model(batch)
            batches = range(count // BATCH[extractor])
            return rate_of(lambda: [model(batch) for _ in batches], len(batches) * BATCH[extractor])

    return run


def bare_regions(folder: str) -> Callable[[], float]:
    """Return images per second of the extractor of regions over decoded images."""
    extractor, pixels = extractors.load_extractor(REGIONS, weights="random:0"), ready(folder)

    batches = [pixels[start : start + BATCH[REGIONS]] for start in range(0, len(pixels), BATCH[REGIONS])]
    return lambda: rate_of(lambda: [extractor.extract_columns(batch) for batch in batches], len(pixels))


if __name__ == "__main__":
    main()
