"""The part about training: steps a second of each kind of model at the sizes of its paper, on invented data."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from schemas.features import FeatureSpec
from tests.benchmarks.gpu.clocks import waits_of
from tests.benchmarks.gpu.reporting import Part, Row, Settings
from tests.builders import write_encoded, write_rows
from train.config.sections import load_config
from train.jobs import Corpus, TrainJob
from train.loop.training import train

PRESETS = {
    "vsepp": (2048,),
    "kadar2018/bilingual-c2c": (2048,),
    "huang2019/mha-d": (36, 2048),
    "scan/t2i-avg": (36, 2048),
    "dan": (196, 512),
    "mlmme": (2048,),
}
_SMALL = {"model.embed_dim": "8", "model.word_dim": "8", "schedule.batch_size": "8"}


class Sizes(NamedTuple):
    """An invented corpus: images to train on, words of each language, and tokens of a caption on average."""

    images: int
    words: int
    tokens: int


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that is there as long as the process is."""
    return tempfile.TemporaryDirectory()


@cache
def write_corpus(folder: Path, sizes: Sizes, shape: tuple[int, ...]) -> Corpus:
    """Write captions in English and German, five of each image, and features of a shape; words are as frequent as in a language."""
    rng = np.random.default_rng(0)
    splits = {**{f"train-{n:05d}": "train" for n in range(sizes.images)}, **{f"val-{n:05d}": "val" for n in range(8)}}
    captions = []
    for image_id, split in splits.items():
        for language in ("en", "de"):
            for index in range(5):
                numbers = rng.zipf(1.3, size=max(1, int(rng.poisson(sizes.tokens)))) % sizes.words
                tokens = [f"{language}{number}" for number in numbers]
                key = {"image_id": image_id, "language": language, "portion": "comparable", "index": index, "split": split}
                captions.append({**key, "tokens": tokens})
    write_encoded(folder, captions)
    features = [{"image_id": image_id, "feature": rng.random(shape, dtype=np.float32)} for image_id in splits]
    write_rows(folder / "features", "features", features, spec=FeatureSpec("invented", shape))
    return Corpus(str(folder / "encoded"), str(folder / "features"), str(folder / "vocabulary"))


def _subjects(settings: Settings) -> list[tuple[str, str]]:
    presets = ("vsepp", "mlmme") if settings.is_quick else PRESETS
    precisions = ("fp32", "bf16") if settings.device.type == "cpu" else ("fp32", "tf32", "bf16")
    return [(preset, precision) for preset in presets for precision in precisions]


def _measure(settings: Settings, preset: str, precision: str) -> Row:
    shape = (8,) if settings.is_quick else PRESETS[preset]
    sizes = Sizes(16, 50, 4) if settings.is_quick else Sizes(512, 8000, 13)
    corpus = write_corpus(Path(_folder().name) / "x".join(map(str, shape)), sizes, shape)
    steps = 4 if settings.is_quick else 200
    config = load_config(preset, _SMALL if settings.is_quick else {})
    schedule = replace(
        config.schedule, max_steps=steps, max_epochs=0, eval_every_steps=steps // 2, patience=0, lr_step_epochs=0
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        job = TrainJob(
            replace(config, schedule=schedule),
            corpus,
            str(output),
            device=str(settings.device),
            precision=precision,
            save_every=steps,
            curves=False,
        )
        if settings.is_gpu:
            torch.cuda.reset_peak_memory_stats(settings.device)
        train(job)
        lines = [json.loads(line) for line in (output / "log.jsonl").read_text(encoding="utf-8").splitlines()]
        # The first lap warms up.
        lap = [line for line in lines if line["event"] == "timing"][-1]
        found: Row = {"batch": config.schedule.batch_size, "steps_per_second": lap["steps_per_second"]}
        found["pairs_per_second"] = lap["pairs_per_second"]
        if not settings.is_gpu:
            return {**found, "reason": "waits_per_step, peak_bytes: the device is the CPU"}
        found["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
        few = replace(schedule, max_steps=10, eval_every_steps=10)
        with waits_of(settings) as waits:
            train(replace(job, config=replace(config, schedule=few), output=str(Path(folder) / "waits"), save_every=10))
    return {**found, "waits_per_step": waits.total() / 10}


PARTS = (
    Part(
        "steps",
        "steps of training at the sizes of the papers; waits are those of ten steps with their evaluation",
        ("preset", "precision"),
        ("batch", "steps_per_second", "pairs_per_second", "waits_per_step", "peak_bytes"),
        _subjects,
        _measure,
    ),
)
