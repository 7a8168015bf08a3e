"""Report of ``imagepivot evaluate``: tables, and a folder of scores and ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import pyarrow as pa

from schemas.console.tables import Cell, Row, Table, number_columns
from schemas.errors import UsageError
from schemas.escapes import redact, to_json
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder, file_at
from train.chance import DIRECTIONS
from train.evaluation.metrics import RecallMetrics, RetrievalMetrics, mean_over_folds
from train.evaluation.pairs import describe_side
from train.evaluation.ranks import RANKS, write_ranks
from train.evaluation.relevance import OWN_CAPTIONS
from train.evaluation.scores import Score
from train.evaluation.statistics import MetricIntervals, interval_notes
from train.jobs import EvaluateJob
from train.runs.checkpoints import BEST, checkpoint_settings, read_checkpoint
from train.runs.history import is_run

EVALUATION = "evaluation.json"

_RECALLS = number_columns("R@1", "R@5", "R@10", spec=".1f")


@dataclass(frozen=True)
class Average:
    """Means of the metrics over languages."""

    split: str
    portion: str
    languages: tuple[str, ...]
    retrieval: RetrievalMetrics

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        recalls = {name: list(getattr(self.retrieval, name).recalls) for name in DIRECTIONS}
        sums = {name: getattr(self.retrieval, name) for name in ("mean_recall", "sum_of_recalls")}
        return {"split": self.split, "portion": self.portion, "languages": list(self.languages), **recalls, **sums}


def averages(scores: Sequence[Score]) -> list[Average]:
    """Average over the languages of each split and portion with several languages."""
    groups: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        groups.setdefault((score.split, score.portion), []).append(score)
    return [
        Average(*place, tuple(score.language for score in group), mean_over_folds([score.retrieval for score in group]))
        for place, group in groups.items()
        if len(group) > 1
    ]


def evaluation_report(scores: Sequence[Score]) -> dict[str, Any]:
    """Return scores and their averages as plain values, for JSON."""
    return {
        "scores": [score.to_dict() for score in scores],
        "averages": [average.to_dict() for average in averages(scores)],
    }


def check_evaluation_folder(location: str) -> None:
    """Check that scores may be written into a folder.

    Raises:
        UsageError: the location is a file, ends in ``.json``, or holds a run.
        DatasetError: the folder is not writable.
    """
    beside, name = file_at(location)
    if name.endswith(".json") or (name and beside.stat(name) is not None):
        raise UsageError(
            f"--output is {location!r}, expected a folder: {EVALUATION} and {RANKS} are written into it. "
            "Leave .json out, or name another folder"
        )
    if is_run(location):
        raise UsageError(f"--output is {location!r}, which holds a run: choose another folder; nothing was changed")
    Folder(location).check_writable()


def evaluation_content(scores: Sequence[Score], job: EvaluateJob) -> dict[str, Any]:
    """Return runs or a pair, scores and averages as plain values, for JSON."""
    sides = {"captions": job.captions, "features": job.features}
    described: list[Any] = [] if job.runs else [{name: describe_side(location) for name, location in sides.items()}]
    for run in job.runs:
        checkpoint = read_checkpoint(Folder(run), BEST)
        settings = checkpoint_settings(checkpoint)
        described.append(
            {"folder": redact(run), "step": checkpoint.progress.step, "seed": checkpoint.seed, "settings": settings}
        )
    return {"runs": described, **evaluation_report(scores)}


def write_evaluation(scores: Sequence[Score], content: Mapping[str, Any], location: str) -> list[str]:
    """Write scores and ranks, and return the names of the files."""
    tables = [score.ranks for score in scores]
    tables += [result.ranks for score in scores for result in score.cross_lingual.values()]
    Folder(location).delete(RANKS)  # `compare` must not find those of other scores if this process is killed.
    Folder(location).put(EVALUATION, (to_json(content, indent=2) + "\n").encode())
    write_ranks(Folder(location), pa.concat_tables(tables))
    return [EVALUATION, RANKS]


def score_tables(scores: Sequence[Score], *, title: str) -> list[Table]:
    """Return tables of scores, means, cross-lingual retrieval and all correct items."""
    tables = [score_table(scores, title=title), _average_table(scores), _cross_lingual_table(scores), _relevance_table(scores)]
    spaces = [f"space {name}, declared and not checked" for name in dict.fromkeys(score.space for score in scores) if name]
    return [replace(table, notes=[*table.notes, *spaces]) for table in tables]


def score_table(scores: Sequence[Score], *, title: str) -> Table:
    """Return a table of recalls and median ranks by language, portion and split."""
    folds = f"; means over {scores[0].folds} folds of the images" if scores and scores[0].folds > 1 else ""
    rows: list[Row] = []
    for score in scores:
        for name, direction in (("image", "image_to_text"), ("text", "text_to_image")):
            metrics: RecallMetrics = getattr(score.retrieval, direction)
            captions = f"{score.language} {score.portion}" if name == "image" else ""
            values = map(Cell, (*metrics.recalls, metrics.median_rank), score.chance[direction])
            rows.append((captions, f"{metrics.queries:,} {name}s", *values))
            rows.append(_interval_row(score.split if name == "image" else "", score.intervals[direction]))
    notes = [f"recalls in percent; median: median rank{folds}; in brackets those of chance"]
    notes += interval_notes(score.retrieval.image_to_text.queries for score in scores)
    notes += dict.fromkeys(f"split {score.split}: {score.protocol.remark}" for score in scores if score.protocol)
    notes += filter(None, [untrained_remark(name for score in scores for name in score.untrained)])
    return Table(["captions", "queries", *_RECALLS, *number_columns("median", spec="g")], rows, title, notes)


def _interval_row(name: str, intervals: MetricIntervals) -> Row:
    """Return a row of intervals below a row of metrics."""
    recalls = (intervals.recall_at_1, intervals.recall_at_5, intervals.recall_at_10)
    texts = [f"{interval.low:.1f}–{interval.high:.1f}" for interval in recalls]
    texts.append(f"{intervals.median_rank.low:g}–{intervals.median_rank.high:g}")
    return [Cell(text, style="dim") for text in (name, "95 % interval", *texts)]


def _average_table(scores: Sequence[Score]) -> Table:
    """Return a table of means and sums of recalls; no rows for a single score."""
    means = {(average.split, average.portion): average.retrieval for average in averages(scores)}
    rows: list[Row] = []
    for index, score in enumerate(scores if len(scores) > 1 else ()):
        group, following = (score.split, score.portion), [(other.split, other.portion) for other in scores[index + 1 :]]
        rows.append((f"{score.portion} {score.language} {score.split}", *_means(score.retrieval)))
        if group in means and group not in following:
            name = Cell(f"{score.portion} mean {score.split}", style="bold")
            rows.append((name, *_means(means[group])))
    columns = number_columns("image to text", "text to image", "mR", "sum", spec=".1f")
    notes = ["means of R@1, R@5 and R@10 in percent; mR: of all six; sum: of all six, 0 to 600"]
    return Table(["captions", *columns], rows, notes=notes)


def _means(metrics: RetrievalMetrics) -> list[float]:
    recalls = metrics.image_to_text.recalls, metrics.text_to_image.recalls
    return [*map(mean, recalls), metrics.mean_recall, metrics.sum_of_recalls]


def _cross_lingual_table(scores: Sequence[Score]) -> Table:
    rows: list[Row] = []
    group = None
    for score in scores:
        for language, result in score.cross_lingual.items():
            if group != (score.portion, score.split):
                group = score.portion, score.split
                rows.append([Cell(name, style="dim") for name in group])
            metrics = result.direction
            values = map(Cell, (*metrics.recalls, metrics.median_rank), result.chance)
            rows.append((f"  {score.language} to {language}", f"{metrics.queries:,}", *values))
            rows.append(_interval_row("", result.intervals))
    return Table(
        ["captions", "queries", *_RECALLS, *number_columns("median", spec="g")],
        rows,
        "captions among captions of the same images",
        ["right: any caption of the same image"],
    )


def _relevance_table(scores: Sequence[Score]) -> Table:
    """Return a table of measures over all correct items; recalls for files only."""
    rows: list[Row] = []
    for score in scores:
        for definition, relevance in score.relevance.items():
            name = "" if definition == OWN_CAPTIONS else f" {definition}"
            for direction, metrics in relevance.items():
                cells = list(map(Cell, metrics.values, metrics.chance))
                is_image = direction == "image_to_text"
                captions = f"{score.language} {score.portion}{name}" if is_image else Cell(score.split, style="dim")
                queries = f"{metrics.queries:,} {'images' if is_image else 'texts'}"
                rows.append((captions, queries, *cells[3:], *(cells[:3] if name else ())))
    recalls = _RECALLS if any(len(score.relevance) > 1 for score in scores) else ()
    columns = ["captions", "queries", *number_columns("nDCG@10", "R-Prec.", "mAP@R", spec=".1f"), *recalls]
    return Table(columns, rows, "all correct items", ["in percent, in brackets those of chance"])
