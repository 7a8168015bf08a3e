"""Tables of scores, compared runs, textual similarity and ranks of captions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import mean, stdev
from textwrap import wrap
from typing import Any

from schemas.console.tables import Cell, Column, Row, Table, markdown_document, number_columns
from schemas.conversion import dump
from schemas.escapes import to_json
from schemas.parameters import untrained_remark
from schemas.storage.folder import Folder
from train.chance import DIRECTIONS, RECALLS
from train.evaluation.metrics import RecallMetrics, RetrievalMetrics
from train.evaluation.relevance import OWN_CAPTIONS
from train.evaluation.scores import Average, Score, averages
from train.evaluation.statistics import MetricIntervals
from train.evaluation.sts import StsResult, StsSystem
from train.evaluation.sts_data import StsPairs
from train.reports.comparison import EVALUATED, SCORES, SUM, ComparedRow, Comparison, GalleryScores, RankedGallery
from train.reports.gold_ranks import GoldRanks, RankedCaption
from train.reports.published import GOLD_COLUMNS, STS_PAPERS, TASKS, tasks_of
from train.reports.row_results import ABSENT
from train.reports.significance import LEVEL, Difference, not_worse
from train.reports.sts_rows import StsRows

_SHORT = {"recall_at_1": "R@1", "recall_at_5": "R@5", "recall_at_10": "R@10", "median_rank": "med"}
_RECALLS = number_columns("R@1", "R@5", "R@10", spec=".1f")
_ARROWS = {"image_to_text": "i→t", "text_to_image": "t→i"}
_DATA_SETS, _NAME_WIDTH = 3, 11  # Data sets in a table of 80 columns, and characters of their names on a line.
_QUOTED = "*"
_NOT_WORSE = "≈"
_INTERVAL_NOTE = "95 % interval: by a bootstrap over images; for other images, not other trainings"
_FEW_IMAGES = 6  # The median is outside of the range of five draws in 6.25 % of cases: no interval within it holds 95 %.


def score_tables(scores: Sequence[Score], *, title: str) -> list[Table]:
    """Return tables of scores, means, cross-lingual retrieval and all correct items."""
    return [score_table(scores, title=title), _average_table(scores), _cross_lingual_table(scores), _relevance_table(scores)]


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
    notes += _interval_notes(score.retrieval.image_to_text.queries for score in scores)
    notes += dict.fromkeys(f"split {score.split}: {score.protocol.remark}" for score in scores if score.protocol)
    notes += filter(None, [untrained_remark(name for score in scores for name in score.untrained)])
    return Table(["captions", "queries", *_RECALLS, *number_columns("median", spec="g")], rows, title, notes)


def _interval_notes(num_images: Iterable[int]) -> list[str]:
    remark = f"intervals of fewer than {_FEW_IMAGES} images are too narrow"
    return [_INTERVAL_NOTE, *([remark] if min(num_images, default=_FEW_IMAGES) < _FEW_IMAGES else [])]


def _interval_row(name: str, intervals: MetricIntervals) -> Row:
    """Return a row of intervals below a row of metrics."""
    recalls = (intervals.recall_at_1, intervals.recall_at_5, intervals.recall_at_10)
    texts = [f"{interval.low:.1f}–{interval.high:.1f}" for interval in recalls]
    texts.append(f"{intervals.median_rank.low:g}–{intervals.median_rank.high:g}")
    return [Cell(text, style="dim") for text in (name, "95 % interval", *texts)]


def _average_table(scores: Sequence[Score]) -> Table:
    """Return a table of means and sums of recalls; no rows for a single score."""
    means = {(average.split, average.portion): average for average in averages(scores)}
    rows: list[Row] = []
    for index, score in enumerate(scores if len(scores) > 1 else ()):
        group, following = (score.split, score.portion), [(other.split, other.portion) for other in scores[index + 1 :]]
        recalls = score.retrieval.image_to_text.recalls, score.retrieval.text_to_image.recalls
        rows.append((f"{score.portion} {score.language} {score.split}", *_means(recalls, score.retrieval)))
        if group in means and group not in following:
            average = means[group]
            name = Cell(f"{score.portion} mean {score.split}", style="bold")
            rows.append((name, *_means((average.image_to_text, average.text_to_image), average)))
    columns = number_columns("image to text", "text to image", "mR", "sum", spec=".1f")
    notes = ["means of R@1, R@5 and R@10 in percent; mR: of all six; sum: of all six, 0 to 600"]
    return Table(["captions", *columns], rows, notes=notes)


def _means(recalls: Sequence[Sequence[float]], whole: RetrievalMetrics | Average) -> list[float]:
    return [*map(mean, recalls), whole.mean_recall, whole.sum_of_recalls]


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


def run_comparison_tables(comparison: Comparison) -> list[Table]:
    """Return tables of differing settings, progress, scores and tests."""
    return [_settings_table(comparison), _progress(comparison), _scores(comparison), _tests(comparison)]


def _settings_table(comparison: Comparison) -> Table:
    # Runs that differ only in their seeds share a column.
    columns: dict[ComparedRow, list[int]] = {}
    for index, run in enumerate(comparison.runs):
        columns.setdefault(comparison.row_of(run), []).append(index)
    rows: list[Row] = []
    for key, values in comparison.differences.items():
        settings = (dict.fromkeys(_setting(values[index]) for index in indices) for indices in columns.values())
        rows.append((key, *map(", ".join, settings)))
    return Table(["", *(row.label for row in columns)], rows, "what differs")


def _setting(value: Any) -> str:
    """Format a setting compactly."""
    if isinstance(value, dict):
        return "; ".join(f"{key}: {_setting(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    return ABSENT if value is None else value if isinstance(value, str) else dump(value)


def _progress(comparison: Comparison) -> Table:
    columns = (
        *("run", "ended by", Column("steps", ","), Column("best step", ",")),
        *(Column("steps/s", ".2f"), Column("pairs/s", ",.0f")),
    )
    rows: list[Row] = []
    for run in (run for run in comparison.runs if run.state != EVALUATED):
        best, speed = run.history.best or {}, run.history.speed
        numbers = (best.get("step"), speed.get("steps_per_second"), speed.get("pairs_per_second"))
        rows.append((run.name, run.state, run.history.last_step, *(ABSENT if value is None else value for value in numbers)))
    return Table(columns, rows, "progress")


def _scores(comparison: Comparison) -> Table:
    headings = [f"{_ARROWS[direction]}\n{_SHORT[measure]}" for direction, measure in SCORES]
    rows: list[Row] = []
    marked = not_worse(comparison.tests)
    for gallery in comparison.galleries:
        rows.append((Cell((gallery.name, gallery.size), style="bold"),))
        lines: list[tuple[ComparedRow | None, str, GalleryScores, str]] = []
        for run in (run for run in comparison.runs if gallery in run.measured):
            row = comparison.row_of(run)
            lines.append((None if len(row.runs) > 1 else row, run.name, run.measured[gallery].scores, ""))
        for group in comparison.groups:
            label = f"{group.name}, mean of {len(group.runs)}"
            lines.append((group, label, group.scores(gallery, mean), "italic"))
            lines.append((None, "  deviation", group.scores(gallery, stdev), "italic"))
        lines.append((None, "chance", comparison.chance(gallery), "dim"))
        rows += (row for line in lines if line[2] for row in _score_rows(comparison, gallery, marked, *line))
    notes = ["recalls in percent; med: median rank; i→t: image to text, t→i: text to image; sum: of the six recalls, 0 to 600"]
    if any(comparison.intervals.values()):
        notes += _interval_notes(gallery.images for gallery in comparison.galleries)
    if comparison.tests:
        notes.append(
            f"{_NOT_WORSE}: not significantly worse than the best of its column (p of at least {LEVEL}, over seeds if any)"
        )
    return Table(["", *number_columns(*headings, "sum")], rows, "scores at the best step", notes)


def _score_rows(
    comparison: Comparison,
    gallery: RankedGallery,
    marked: Collection[tuple[Any, str, ComparedRow]],
    row: ComparedRow | None,
    label: str,
    scores: GalleryScores,
    style: str,
) -> list[Row]:
    """Return a row of scores, and one of their intervals, if known.

    ``marked`` are place, recall and row of recalls that do not differ from the best.
    """
    specs = {} if label == "  deviation" else {"median_rank": ".0f"}
    texts = {pair: format(value, specs.get(pair[1], ".1f")) for pair, value in scores.items()}
    for pair in texts if comparison.tests else ():  # Marked and other digits are aligned.
        texts[pair] += _NOT_WORSE if ((gallery, pair[0]), pair[1], row) in marked else " "
    rows: list[Row] = [[Cell(text, style=style) for text in (f" {label}", *(texts.get(pair, "") for pair in (*SCORES, SUM)))]]
    intervals = {way: row and comparison.intervals.get((gallery, way), {}).get(row) for way in DIRECTIONS}
    if any(intervals.values()):
        ends = [getattr(intervals[way], measure, None) for way, measure in SCORES]
        cells = [Cell(end and (f"{round(end.low, 1)}–", f"{round(end.high, 1)} "), style="dim") for end in ends]
        rows.append((Cell("  95 % interval", style="dim"), *cells))
    return rows


def _tests(comparison: Comparison) -> Table:
    rows: list[Row] = []
    tests: dict[tuple[Any, ...], dict[str, Difference]] = {}
    for test in comparison.tests:
        tests.setdefault((*test.place, *sorted(test.rows, key=lambda row: row.name)), {})[test.measure] = test
    for (gallery, direction, first, second), by_measure in tests.items():
        signs = {measure: 1 if test.rows[0] == first else -1 for measure, test in by_measure.items()}
        texts = {name: f"{signs[name] * test.difference:+.1f}  p {test.p_value:.3f}" for name, test in by_measure.items()}
        seeds = {name: f"p {test.seed_p_value:.3f}" for name, test in by_measure.items() if test.seed_p_value is not None}
        pair = f" {first.name} - {second.name}"
        rows.append(((f"{gallery.name} {_ARROWS[direction]}", pair), *map(texts.get, RECALLS)))
        rows += [("  over seeds", *map(seeds.get, RECALLS))] if seeds else []
    notes = [
        f"p: paired randomization over images, two-sided, Holm's correction over these {len(comparison.tests)} tests; up to four "
        "rows are tested in all pairs, more rows each against the best of the column",
    ]
    if any(test.seed_p_value is not None for test in comparison.tests):
        notes.append(
            "over seeds: permutations of runs, two-sided, Holm's correction; a few runs allow no small p, so all are marked"
        )
    return Table(["", *number_columns("R@1", "R@5", "R@10")], rows, "differences in percentage points", notes)


def sts_tables(result: StsResult) -> list[Table]:
    """Return tables of measured and published correlations, and one of coverage."""
    indices = range(len(result.data))
    tables = [_correlations(result, indices[start : start + _DATA_SETS]) for start in indices[::_DATA_SETS]]
    rows: list[Row] = []
    for system in result.systems:
        cells: tuple[str | int, ...] = ()
        if coverage := system.coverage:
            cells = f"{100 * coverage.known / max(coverage.words, 1):.1f} %", coverage.words, coverage.blind
        rows.append((system.name, system.text, *cells))
    columns = ("", "sentences became tokens by", *number_columns("known", "of words", "blind", spec=","))
    notes = ["known: words with a vector; blind: sentences without such a word"]
    return [*tables, Table(columns, rows, "what was read", notes)]


def _correlations(result: StsResult, indices: Sequence[int]) -> Table:
    tasks = tasks_of(result.data, result.systems[0])
    has_means = indices[-1] == len(result.data) - 1 > 0
    columns = [_data_column(result.data[index], tasks[index]) for index in indices]
    rows: list[Row] = []
    for system in result.systems:
        correlations = [*(system.correlations[index] for index in indices), *([system.means] if has_means else [])]
        measured = (
            Cell(ABSENT) if None in vars(value).values() else Cell(value.pearson, value.spearman) for value in correlations
        )
        rows.append((f"{system.name} {system.language}".rstrip(), *measured))
    notes = ["Pearson's r times 100, in brackets Spearman's rho times 100", *_untrained_systems(result.systems)]
    if any(tasks[index] is not None for index in indices):
        notes.append(f"{_QUOTED}: quoted in that paper from other work")
        for paper in STS_PAPERS.values():
            rows += [(), (Cell(paper.title, style="bold"),)]
            for row in paper.rows:
                values = [row.values.get(tasks[index]) for index in indices]
                cells = [ABSENT if value is None else f"{value:.1f}" + " " * len(" (00.0)") for value in values]
                rows.append([Cell(text, style="dim") for text in (_quoted(row.name, row.quoted), *cells)])
    columns += [Column("mean", ".1f")] if has_means else []
    return Table(["", *columns], rows, "semantic textual similarity", notes)


def _untrained_systems(systems: Iterable[StsSystem]) -> list[str]:
    untrained = {system.name: untrained_remark(system.untrained) for system in systems}
    return [f"{name}: {remark}" for name, remark in untrained.items() if remark]


def _data_column(pairs: StsPairs, task: str | None) -> Column:
    lines = [*wrap(pairs.name, _NAME_WIDTH), f"{len(pairs):,} pairs", *filter(None, [task])]
    return Column("\n".join(lines), ".1f")


def _quoted(name: str, quoted: bool) -> str:
    return f"{name} {_QUOTED}" if quoted else name


def sts_report(result: StsResult) -> dict[str, Any]:
    """Return the result and published scores as plain values, for JSON."""
    tasks = tasks_of(result.data, result.systems[0])
    plain = result.to_dict()
    for entry, task in zip(plain["data"], tasks, strict=True):
        entry["task"] = task
    known = [(pairs.name, task) for pairs, task in zip(result.data, tasks, strict=True) if task]
    plain["published"] = [
        {"source": paper.title, "name": row.name, "quoted": row.quoted}
        | {"scores": {name: row.values.get(task) for name, task in known}}
        for paper in STS_PAPERS.values()
        for row in paper.rows
        if known
    ]
    return plain


def write_sts(result: StsResult, output: str) -> list[str]:
    """Write ``sts.json``, ``sts.csv`` and ``sts-pairs.csv`` into a folder.

    Returns:
        The names of the files.

    Raises:
        DatasetError: a file cannot be written.
    """
    numbers = Table(("kind", "name", "language", "data", "pairs", "pearson", "spearman"), list(_sts_correlation_rows(result)))
    systems = (system.name for system in result.systems)
    pairs = Table(("data", "line", "score", *systems, "sentence1", "sentence2"), list(_sts_pair_rows(result)))
    report = to_json(sts_report(result), indent=2) + "\n"
    return _write(output, {"sts.json": report, "sts.csv": numbers.to_csv(), "sts-pairs.csv": pairs.to_csv()})


def _sts_correlation_rows(result: StsResult) -> Iterator[Row]:
    for system in result.systems:
        for pairs, correlations in zip(result.data, system.correlations, strict=True):
            values = (None if value is None else round(value, 4) for value in (correlations.pearson, correlations.spearman))
            yield system.kind, system.name, system.language, pairs.name, len(pairs), *values
    for row in sts_report(result)["published"]:
        name = f"{row['source']}: {row['name']}{' (quoted)' if row['quoted'] else ''}"
        for pairs in result.data:
            if (value := row["scores"].get(pairs.name)) is not None:
                yield "published", name, "", pairs.name, len(pairs), value


def _sts_pair_rows(result: StsResult) -> Iterator[Row]:
    for index, pairs in enumerate(result.data):
        similarities = [system.similarities[index].tolist() for system in result.systems]
        for line, score, first, second, *values in zip(
            pairs.lines, pairs.scores, pairs.first, pairs.second, *similarities, strict=True
        ):
            yield pairs.name, line, score, *(round(value, 6) for value in values), first, second


def sts_row_tables(rows: StsRows) -> list[Table]:
    """Return a paper's table of textual similarity, split by data sets."""
    indices = range(len(rows.data))
    return [_sts_row_table(rows, indices[start : start + _DATA_SETS]) for start in indices[::_DATA_SETS]]


def _sts_row_table(rows: StsRows, indices: Sequence[int]) -> Table:
    columns = ["row", *number_columns("runs")]
    columns += (_data_column(rows.data[index], rows.tasks[index]) for index in indices)
    lines: list[Row] = []
    for row in rows.rows:
        cells = (rows.measurement(row, index).to_cell() for index in indices)
        runs = len(row.measured) if row.published.preset else None
        lines.append((_quoted(row.published.name, row.published.quoted), runs, *cells))
    is_last = indices[-1] == len(rows.data) - 1
    title = f"Table {rows.paper.table}: semantic textual similarity"
    return Table(columns, lines, title, _sts_row_notes(rows) if is_last else ())


def _sts_row_notes(rows: StsRows) -> list[str]:
    unknown = [pairs.name for pairs, task in zip(rows.data, rows.tasks, strict=True) if task is None]
    absent = [task for task in TASKS if task not in rows.tasks]
    return [
        "Pearson's r times 100, the mean of the runs ± their standard deviation, the published one in brackets.",
        f"{_QUOTED} quoted in the paper from other work.",
        *([f"Published numbers on {', '.join(absent)} are not shown: these pairs are not given."] if absent else []),
        *([f"Not a data set of the paper, by number of pairs or word overlap: {', '.join(unknown)}."] if unknown else []),
        *(f"{row.published.name} is not measured: {row.refused}" for row in rows.rows if row.refused),
        *_untrained_systems(system for row in rows.rows for system in row.measured),
    ]


def write_sts_rows(rows: StsRows, output: str) -> list[str]:
    """Write ``PAPER-table-N.md`` and ``.json`` into a folder, and return their names."""
    name = f"{rows.paper.paper}-table-{rows.paper.table}"
    text = markdown_document(f"{rows.paper.paper}: measured beside published", (), sts_row_tables(rows))
    return _write(output, {f"{name}.md": text, f"{name}.json": to_json(rows.to_dict(), indent=2) + "\n"})


def gold_rank_tables(ranks: GoldRanks) -> list[Table]:
    """Return tables of ranks of single captions, and of all captions."""
    rows: list[Row] = []
    for comparison in ranks.comparisons:
        shares = (None if share is None else f"{share:.1f} %" for share in (comparison.better, comparison.worse))
        group = comparison.language, comparison.column, comparison.captions
        rows.append((*group, f"{comparison.median_rank:g}", *shares))
    columns = ("language", "row", *number_columns("captions", "median rank", "better than OE", "worse", spec=","))
    return [
        _caption_table("Table 3: the captions of the paper", ranks.published),
        _caption_table("Table 3: where PIVOT and PARALLEL gain most over OE, as the paper chooses", ranks.examples),
        Table(columns, rows, "Table 3: all captions"),
    ]


def _caption_table(title: str, captions: Sequence[RankedCaption]) -> Table:
    rows: list[Row] = []
    for caption in captions:
        cells = (Cell(caption.rank_text(name), caption.published.get(name)) for name in GOLD_COLUMNS)
        rows.append(((f"{caption.language}: {caption.text}", f"  image {caption.image_id}"), *cells))
    return Table(["rank of the right image", *number_columns(*GOLD_COLUMNS)], rows, title)


def write_gold_ranks(ranks: GoldRanks, output: str) -> list[str]:
    """Write ``gella2017-table-3.md`` and ``.json``, and return their names."""
    notes = [
        f"Rank of the image of a caption among {ranks.images:,} test images, the published one in brackets; OE is the row of the "
        "caption's language alone.",
        f"Runs: {', '.join(f'{preset} {count}' for preset, count in ranks.runs.items())}. Of several, the median rank is shown, "
        "with the least and the greatest in square brackets.",
        "By the paper's rule, those images are chosen on which PIVOT and PARALLEL gain most over OE in both languages: they show "
        "the best, not the usual.",
        *([f"{remark}."] if (remark := untrained_remark(ranks.untrained)) else []),
    ]
    text = markdown_document("gella2017, table 3: ranks of the right image", notes, gold_rank_tables(ranks))
    plain = to_json(ranks.to_dict(), indent=2) + "\n"
    return _write(output, {"gella2017-table-3.md": text, "gella2017-table-3.json": plain})


def _write(output: str, contents: Mapping[str, str]) -> list[str]:
    for name, content in contents.items():
        Folder(output).write(name, content.encode())
    return list(contents)
