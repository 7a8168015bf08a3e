"""Results of ``imagepivot demo``: recalls, and a query in each language."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from schemas.console.tables import Row, Table, number_columns
from schemas.dataset import Dataset, open_dataset
from train.evaluation.scores import score_run
from train.evaluation.search import Tokenize, embed_gallery, search_gallery
from train.reports.tables import score_table
from train.runs.run import Run, open_run

MIN_SCENES = 10
"""Minimum number of scenes for a test split."""

_TOP = 3


def show_run(output: Path, *, console: Console, tokenize: Tokenize) -> None:
    """Evaluate the run on its test split, and search for one of its scenes."""
    captions = open_dataset(output / "captions", kind="captions")
    features = str(output / "features")
    console.print(Rule("training"))
    run = open_run(str(output / "run"))
    scores = score_run(run, captions=str(output / "encoded"), features=features, splits=["test"])
    score_table(scores, title="scenes that were held out").render(console)
    console.print(
        "The extractor's weights are random: its features tell drawn scenes apart, but say nothing about photographs. No scene "
        "above was trained on, but the preset was chosen by its recall on such scenes.\n"
    )
    _answers(run, captions, features, tokenize).render(console)


def _answers(run: Run, captions: Dataset, features: str, tokenize: Tokenize) -> Table:
    """List the best scenes for the sentences of one scene, and its own rank."""
    rows = [row for row in captions.table().to_pylist() if row["split"] == "test" and row["portion"] == "translation"]
    target = min(row["image_id"] for row in rows)
    gallery = embed_gallery(run, features)
    answers: list[Row] = []
    for row in rows:
        if row["image_id"] == target:
            tokens = tokenize(row["text"], row["language"], run.text, "")
            hits = search_gallery(run, tokens, row["language"], gallery, top=len(gallery.image_ids))
            image_ids = [hit.image_id for hit in hits]
            answers.append((row["language"], row["text"], tuple(image_ids[:_TOP]), image_ids.index(target) + 1))
    columns = ("language", "query", f"best {_TOP}", *number_columns(f"place of {target}"))
    title = f"one query in each language: {target}, among {len(gallery.image_ids)} scenes"
    return Table(columns, answers, title, has_borders=True)
