"""The end of ``imagepivot demo``: a small model trained on the scenes, its recall, and one query in each language."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from schemas.dataset import Dataset, open_dataset
from schemas.storage import Folder
from train.config.sections import resolve
from train.data.corpus import Corpus
from train.evaluation.scoring import score_run
from train.evaluation.searching import Tokenize, embed_gallery, search_gallery
from train.jobs import TrainJob
from train.loop import train
from train.progress import ProgressLine
from train.reports.score_tables import score_table
from train.runs.checkpoints import BEST, LAST
from train.runs.run import Run, open_run

__all__ = ["train_demo"]

PRESET = "demo"
_SPLITS = {"train", "val", "test"}
_TOP = 3


def train_demo(output: Path, *, console: Console, notes: Console, tokenize: Tokenize) -> None:
    """Train on the datasets of the demo, evaluate on held-out scenes, and search for one of them.

    Args:
        output: folder of the demo; holds ``run`` afterwards.
        console: for the result.
        notes: for progress.
        tokenize: turns a query into tokens as the captions were.
    """
    captions = open_dataset(output / "captions", kind="captions")
    if not set(captions.table(["split"])["split"].unique().to_pylist()) >= _SPLITS:
        notes.print("[yellow]nothing is trained: with so few scenes none is held out; draw at least 10 with --scenes[/yellow]")
        return
    corpus = Corpus(*(str(output / name) for name in ("encoded", "features", "vocabulary")))
    job = TrainJob(config=resolve(PRESET), corpus=corpus, output=str(output / "run"), device="cpu")
    console.print(Rule("training"))
    for name in (BEST, LAST):  # The scenes may differ from those of an earlier demo.
        Folder(job.output).delete(name)
    with _one_thread(), ProgressLine(notes) as watch:
        train(job, watch)
    run = open_run(job.output)
    scores = score_run(run, captions=corpus.captions, features=corpus.features, splits=["test"])
    console.print(score_table(scores, title="scenes that were held out"))
    console.print(
        "The extractor's weights are random: its features tell drawn scenes apart, but say nothing about photographs. No scene "
        "above was trained on, but the preset was chosen by its recall on such scenes.\n"
    )
    console.print(_answers(run, captions, corpus.features, tokenize))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread: products this small gain nothing from more, and lose much if other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answers(run: Run, captions: Dataset, features: str, tokenize: Tokenize) -> Table:
    """Return the best scenes for the sentences about one held-out scene, and the rank of that scene."""
    rows = [row for row in captions.table().to_pylist() if row["split"] == "test" and row["portion"] == "translation"]
    target = min(row["image_id"] for row in rows)
    gallery = embed_gallery(run, features)
    table = Table(title=f"one query in each language: {target}, among {len(gallery.image_ids)} scenes", title_justify="left")
    for heading in ("language", "query", f"best {_TOP}", f"place of {target}"):
        table.add_column(heading)
    for row in rows:
        if row["image_id"] == target:
            tokens = tokenize(row["text"], row["language"], run.text, "")
            hits = search_gallery(run, tokens, row["language"], gallery, top=len(gallery.image_ids))
            image_ids = [hit.image_id for hit in hits]
            place = str(image_ids.index(target) + 1)
            table.add_row(row["language"], row["text"], "\n".join(image_ids[:_TOP]), place)
    return table
