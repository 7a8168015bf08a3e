"""End of ``imagepivot demo``: a query in each language, drawn, and next commands."""

import shlex
from pathlib import Path

from rich.console import Console

from schemas.console.tables import Row, Table, number_columns
from schemas.dataset import Dataset, open_dataset
from schemas.keys import CaptionKey
from train.evaluation.search import Tokenize, embed_gallery, search_gallery
from train.jobs import FiguresJob
from train.reports.figure_examples import ReadPictures
from train.reports.figures import draw_figures
from train.runs.run import Run, open_run

MIN_SCENES = 10
"""Minimum number of scenes for a test split."""

_TOP = 3


def show_run(folder: Path, output: str, *, console: Console, tokenize: Tokenize, read_pictures: ReadPictures) -> None:
    """Print one query in each language, draw its figure, and print commands to try.

    ``output`` is the folder as the user wrote it, for the commands.
    """
    run, features = open_run(str(folder / "run")), str(folder / "features")
    target, queries, answers = _answers(run, open_dataset(folder / "captions", kind="captions"), features, tokenize)
    console.print()
    answers.render(console)
    figure = FiguresJob(
        run=str(folder / "run"),
        output=str(folder / "figures"),
        captions=str(folder / "encoded"),
        features=features,
        images=str(folder / "scenes" / "images"),
        texts=str(folder / "captions"),
        only=("retrieval",),
        split="test",
        caption_ids=tuple(str(CaptionKey(target, language, "translation", 0)) for language in queries),
    )
    draw_figures(figure, read_pictures)
    if open_dataset(features).untrained:
        console.print("The features have random weights: they distinguish drawn scenes, but mean nothing for photographs.")
    console.print(
        "No scene above was trained on, but the preset was chosen by recalls on such scenes: they are somewhat too good."
    )
    console.print(f"\nThe picture: {output}/figures/retrieval.png", highlight=False, markup=False, soft_wrap=True)
    console.print("\nTry next:", highlight=False)
    here = shlex.quote(output)
    for words in (
        f"imagepivot search {here}/run {shlex.quote(queries['en'])} --language en --features {here}/features",
        f"imagepivot inspect {here}/captions --rows 20",
        f"imagepivot train demo {here}/run-2 --captions {here}/encoded --features {here}/features "
        f"--vocabulary {here}/vocabulary --languages en,de",
    ):
        console.print(f"  {words}", highlight=False, markup=False, soft_wrap=True)


def _answers(run: Run, captions: Dataset, features: str, tokenize: Tokenize) -> tuple[str, dict[str, str], Table]:
    """Search all scenes with the sentences of each held-out one, and choose a scene.

    The chosen one has the lowest sum of ranks among the held-out scenes, and then among all.

    Returns:
        Its image id, its sentences by language, and a table of the held-out scenes that they find.
    """
    rows = [row for row in captions.table().to_pylist() if row["split"] == "test" and row["portion"] == "translation"]
    gallery, held_out = embed_gallery(run, features), {row["image_id"] for row in rows}
    answers: dict[str, list[Row]] = {image_id: [] for image_id in sorted(held_out)}
    queries: dict[str, dict[str, str]] = {image_id: {} for image_id in answers}
    ranks = dict.fromkeys(answers, (0, 0))
    for row in sorted(rows, key=lambda row: run.model.languages.index(row["language"])):
        image_id, language = row["image_id"], row["language"]
        tokens = tokenize(row["text"], language, run.text, "")
        hits = [hit.image_id for hit in search_gallery(run, tokens, language, gallery, top=len(gallery.image_ids))]
        others = [hit for hit in hits if hit in held_out]
        rank = others.index(image_id) + 1
        ranks[image_id] = (ranks[image_id][0] + rank, ranks[image_id][1] + hits.index(image_id))
        answers[image_id].append((language, row["text"], tuple(others[:_TOP]), rank))
        queries[image_id][language] = row["text"]
    target = min(ranks, key=lambda image_id: ranks[image_id])
    best = sum(total == len(answers[image_id]) for image_id, (total, _) in ranks.items())
    title = f"one query in each language: {target}, among {len(ranks)} held-out scenes; {best} have rank 1 in all languages"
    columns = ("language", "query", f"best {_TOP}", *number_columns(f"rank of {target}"))
    return target, queries[target], Table(columns, answers[target], title, has_borders=True)
