"""The end of ``imagepivot demo``: a small model on the scenes, what it retrieves, and one query in each language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from schemas.dataset import Dataset, open_dataset
from schemas.parameters import TextRecipe
from schemas.storage import Folder
from train.config.sections import resolve
from train.evaluation.scoring import score_run
from train.evaluation.searching import gallery_of, search
from train.loop import train
from train.progress import ProgressLine
from train.reports.score_tables import score_table
from train.runs.checkpoints import BEST, LAST
from train.runs.run import Run, open_run

__all__ = ["train_demo"]

PRESET = "demo"
_SPLITS = {"train", "val", "test"}
_TOP = 3


def train_demo(
    output: Path, *, console: Console, notes: Console, tokenize: Callable[[str, str, TextRecipe | None, str], list[str]]
) -> None:
    """Trains on the datasets of the demo, evaluates on scenes that were held out, and searches for one of them.

    Args:
        output: folder of the demo; holds ``run`` afterwards.
        console: for the result.
        notes: for progress.
        tokenize: as ``train.commands.runs.register`` takes it.
    """
    captions = open_dataset(output / "captions", kind="captions")
    folder = {name: str(output / name) for name in ("encoded", "features", "vocabulary", "run")}
    if not set(captions.table(["split"])["split"].unique().to_pylist()) >= _SPLITS:
        notes.print("[yellow]nothing is trained: of so few scenes none is held out; draw at least 10 with --scenes[/yellow]")
        return
    console.print(Rule("training"))
    for name in (BEST, LAST):  # The scenes may be others than those of an earlier demo.
        Folder(folder["run"]).delete(name)
    with _one_thread(), ProgressLine(notes) as watch:
        train(
            resolve(PRESET),
            captions=folder["encoded"],
            features=folder["features"],
            vocabulary=folder["vocabulary"],
            output=folder["run"],
            device="cpu",
            watch=watch,
        )
    run = open_run(folder["run"])
    scores = score_run(run, captions=folder["encoded"], features=folder["features"], splits=["test"])
    console.print(score_table(scores, title="scenes that were held out"))
    console.print(
        "The extractor's weights are random: its features tell drawn scenes apart, which says nothing of photographs. No scene "
        "above was trained on, but the preset was chosen by its recall on such scenes.\n"
    )
    console.print(_answers(run, captions, folder["features"], tokenize))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Products this small are no faster with several threads, and where other programs run very much slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _answers(
    run: Run, captions: Dataset, features: str, tokenize: Callable[[str, str, TextRecipe | None, str], list[str]]
) -> Table:
    """The best scenes for the sentences about one scene that was held out, and the place of that scene."""
    rows = [row for row in captions.table().to_pylist() if row["split"] == "test" and row["portion"] == "translation"]
    asked = min(row["image_id"] for row in rows)
    gallery = gallery_of(run, features)
    table = Table(title=f"one query in each language: {asked}, among {len(gallery.image_ids)} scenes", title_justify="left")
    for heading in ("language", "query", f"best {_TOP}", f"place of {asked}"):
        table.add_column(heading)
    for row in rows:
        if row["image_id"] == asked:
            tokens = tokenize(row["text"], row["language"], run.text, "")
            found = [hit.image_id for hit in search(run, tokens, row["language"], gallery, top=len(gallery.image_ids))]
            place = str(found.index(asked) + 1)
            table.add_row(row["language"], row["text"], "\n".join(found[:_TOP]), place)
    return table
