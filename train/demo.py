"""Results of ``imagepivot demo``: recalls on held-out scenes, and example queries."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from schemas.console.tables import Row, Table, number_columns, render_tables
from schemas.dataset import Dataset, open_dataset
from train.evaluation.scores import evaluate
from train.evaluation.search import Gallery, Tokenize, embed_gallery, search_gallery
from train.reports.comparison import compare_runs
from train.reports.score_report import evaluation_content, write_evaluation
from train.runs.run import Run, open_run

MIN_SCENES = 10
"""Minimum number of scenes for a test split."""

_TOP = 3


def show_run(folder: Path, output: str, *, console: Console, tokenize: Tokenize) -> None:
    """Print queries, recalls on validation and held-out scenes, commands to try.

    ``output`` is the folder as the user wrote it, for the commands.
    """
    captions, features = open_dataset(folder / "captions", kind="captions"), open_dataset(folder / "features")
    console.print(Rule("training"))
    run = open_run(str(folder / "run"))
    location = str(folder / "features")
    scores = evaluate(run, captions=str(folder / "encoded"), features=location, splits=["test"])
    write_evaluation(scores, evaluation_content(scores, [str(folder / "run")]), str(folder / "evaluation"))
    answers, query = _answers(run, captions, location, tokenize)
    answers.render(console)
    console.print()
    render_tables(console, compare_runs([str(folder / "evaluation")]).to_tables())
    console.print()
    if features.untrained:
        console.print("The features have random weights: they distinguish drawn scenes, but mean nothing for photographs.")
    else:
        console.print("Features are of EfficientNet-Lite0, trained on ImageNet; pools, crops and regions have random weights.")
    console.print("No scene above was trained on, but the preset was chosen by its recall on other drawn scenes.")
    console.print("\nTry next:", highlight=False)
    here = shlex.quote(output)
    for words in (
        f"imagepivot search {here}/run {shlex.quote(query)} --language en --features {here}/features",
        f"imagepivot inspect {here}/captions --rows 20",
        f"imagepivot train demo {here}/run-2 --captions {here}/encoded --features {here}/features --vocabulary {here}/vocabulary "
        "--set data.languages='[\"en\"]'",
    ):
        console.print(f"  {words}", highlight=False, markup=False, soft_wrap=True)


def _answers(run: Run, captions: Dataset, features: str, tokenize: Tokenize) -> tuple[Table, str]:
    """Return the search results for one scene as a table, and its English sentence.

    The held-out scenes are searched with all of their sentences. The result is the first scene with rank 1 in all languages, or
    else the one with the lowest sum of ranks.
    """
    rows = [row for row in captions.table().to_pylist() if row["split"] == "test" and row["portion"] == "translation"]
    gallery, held_out = embed_gallery(run, features), {row["image_id"] for row in rows}
    indices = [index for index, image_id in enumerate(gallery.image_ids) if image_id in held_out]
    gallery = Gallery([gallery.image_ids[index] for index in indices], gallery.embeddings[indices])
    answers: dict[str, list[Row]] = {image_id: [] for image_id in sorted(held_out)}
    ranks = dict.fromkeys(answers, 0)
    for row in rows:
        tokens = tokenize(row["text"], row["language"], run.text, "")
        found = [hit.image_id for hit in search_gallery(run, tokens, row["language"], gallery, top=len(indices))]
        rank = found.index(row["image_id"]) + 1
        ranks[row["image_id"]] += rank
        answers[row["image_id"]].append((row["language"], row["text"], tuple(found[:_TOP]), rank))
    target = min(ranks, key=lambda image_id: ranks[image_id])
    best = sum(ranks[image_id] == len(answers[image_id]) for image_id in ranks)
    title = f"one query in each language: {target}, among {len(ranks)} held-out scenes; {best} have rank 1 in all languages"
    columns = ("language", "query", f"best {_TOP}", *number_columns(f"rank of {target}"))
    (query,) = (row["text"] for row in rows if (row["image_id"], row["language"]) == (target, "en"))
    return Table(columns, answers[target], title, has_borders=True), query
