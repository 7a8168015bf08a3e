"""Every step from captions and images to datasets, on scenes that are drawn on the spot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.rule import Rule

from extractors import ExtractorRequest
from pipelines.datasets.inspection import describe
from pipelines.datasets.viewing import ViewJob, draw_view
from pipelines.demo.writing import write_scenes
from pipelines.features.extract import extract_features, list_images
from pipelines.features.job import FeaturesJob
from pipelines.inputs.captions import open_source
from pipelines.inputs.images import ImagesInFolder, open_images
from pipelines.running.progress import show_progress
from pipelines.running.runner import Execution
from pipelines.text.captions import CaptionsJob, prepare_captions
from pipelines.text.encoding import EncodeJob, encode_captions
from pipelines.text.vocabulary import VocabularyJob, build_vocabulary
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.manifest import Manifest
from schemas.storage import Folder
from schemas.survey import Update

__all__ = ["run_demo"]

WEIGHTS = "random:0"
SHARDS = 4


def run_demo(output: Path, *, scenes: int, console: Console, notes: Console) -> None:
    """Draw scenes with captions in four languages, make every dataset from them and show each.

    Args:
        output: folder for ``scenes``, ``captions``, ``vocabulary``, ``encoded``, ``features``, ``regions`` of the first few
            scenes, and ``regions.png``.
        scenes: number of scenes.
        console: prints the results.
        notes: prints progress.
    """
    # One worker: with so little data, starting a second process costs more than it saves.
    execution = Execution(workers=1)
    folder = {name: output / name for name in ("scenes", "captions", "vocabulary", "encoded", "features", "regions")}
    with notes.status(f"drawing {scenes} scenes"):
        write_scenes(folder["scenes"], count=scenes)
    source = open_source("table", folder["scenes"] / "captions.tsv")
    with show_progress(notes, "captions", unit="captions") as meter:
        _make(prepare_captions, CaptionsJob(source=source, output=str(folder["captions"]), shards=SHARDS), execution, meter)
    with notes.status("counting tokens"):
        job = VocabularyJob(captions=str(folder["captions"]), output=str(folder["vocabulary"]))
        _make(build_vocabulary, job, execution)
    encode = EncodeJob(captions=str(folder["captions"]), vocabulary=str(folder["vocabulary"]), output=str(folder["encoded"]))
    with show_progress(notes, "encode", unit="captions") as meter:
        _make(encode_captions, encode, execution, meter)
    notes.print(f"[yellow]features with weights {WEIGHTS}: untrained, they only show that everything works[/yellow]")
    _extract(folder, execution, notes)
    for name in ("captions", "vocabulary", "encoded", "features", "regions"):
        console.print(Rule(name))
        console.print(describe(open_dataset(folder[name]), rows=3))


def _make(run: Callable[..., Manifest], job: Any, *arguments: Any, **options: Any) -> Manifest:
    """Run a job, in place of whatever an earlier demo left: what is the same is kept."""
    try:
        return run(job, *arguments, **options)
    except DatasetError:
        anew = {"overwrite": True} | ({"update": None} if isinstance(job, FeaturesJob) else {})
        return run(replace(job, **anew), *arguments, **options)


def _extract(folder: Mapping[str, Path], execution: Execution, notes: Console) -> None:
    """Extract one feature of every scene, and regions, which take seconds per image, of the first four."""
    images = folder["scenes"] / "images"
    few = ImagesInFolder(Folder(str(images.absolute())), pattern=r"scene-0000[0-3]\.jpg")
    for name, extractor, source in (("features", "resnet50-pool", open_images(images)), ("regions", "faster-rcnn-36", few)):
        job = FeaturesJob(
            images=source,
            output=str(folder[name]),
            extractor=ExtractorRequest(extractor, weights=WEIGHTS),
            device="cpu",
            shards=SHARDS,
            update=Update(),
        )
        listing = list_images(job)
        with show_progress(notes, extractor, unit="images", total=listing.count) as meter:
            _make(extract_features, job, execution, meter, listing=listing)
    drawing = folder["regions"].with_suffix(".png")
    draw_view(ViewJob(str(folder["regions"]), few, "scene-00000", str(drawing), overwrite=True))
