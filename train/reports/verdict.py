"""Comparisons of runs in words, and beside published numbers."""

from statistics import mean

from schemas.console.tables import Row, Table, number_columns
from train.data.splits import TEST_SPLITS
from train.reports.compared_runs import SCORES
from train.reports.comparison import ARROWS, SHORT, Comparison
from train.reports.published import PAPERS, rows_of_paper
from train.reports.significance import LEVEL


def verdict(comparison: Comparison) -> list[str]:
    """Return significant differences in words; over seeds if rows have several."""
    sentences = []
    for test in (test for test in comparison.tests if test.is_significant):
        (gallery, direction), (better, worse) = test.place, test.rows
        p_value = test.p_value if test.seed_p_value is None else test.seed_p_value
        sentences.append(
            f"{better.name} is better than {worse.name} in {gallery.name}, {direction.replace('_', ' ')}, "
            f"{SHORT[test.measure]} by {test.difference:.1f} points, p {p_value:.2g}"
        )
    if len(sentences) < len(comparison.tests):
        where = "elsewhere" if sentences else f"in {len(comparison.tests)} tests"
        sentences.append(f"no difference found {where} (p of at least {LEVEL})")
    return sentences


def published_table(comparison: Comparison) -> Table:
    """Return the scores on the papers' test images of 2016, beside published ones."""
    rows: list[Row] = []
    for gallery in (gallery for gallery in comparison.galleries if gallery.split in TEST_SPLITS):
        published: list[Row] = [
            (gallery.name, f"{paper}, {row.table}: {row.name}", *(row.numbers.get(pair) for pair in SCORES))
            for paper in PAPERS
            for row in rows_of_paper(paper)
            if row.numbers and (row.language, (row.portion,)) == (gallery.language, gallery.portions)
        ]
        if published:
            means = [(row.label, row.scores(gallery, mean)) for row in comparison.rows]
            rows += [(gallery.name, label, *(scores[pair] for pair in SCORES)) for label, scores in means if scores]
            rows += published
    headings = [f"{ARROWS[direction]} {SHORT[measure]}" for direction, measure in SCORES]
    return Table(("images", "run or paper", *number_columns(*headings, spec=".1f")), rows, "beside published numbers")
