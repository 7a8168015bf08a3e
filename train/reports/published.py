"""The numbers in the papers' tables, with the preset of each row.

Gella, Sennrich, Keller, Lapata (2017): Image pivoting for learning multilingual multimodal representations. Tables 1 and 2, on the
five comparable captions of each of the 1,000 test images of 2016. Table 3 has ranks of single captions, see
`train.reports.gold_published`; table 4 and table 2 of Huang et al. are in `train.reports.sts_published`.

Kádár, Elliott, Côté, Chrupała, Alishahi (2018): Lessons learned in multilingual grounded language learning. Tables 2 to 5 on the
same captions. Tables 6 and 7 are taken to be on the one translation of each image, the only captions in French and Czech; the paper
does not say so, but their monolingual English and German rows differ from those of table 4, which is on the comparable captions.
The numbers are means of ten models. Figure 3 has no numbers, so its rows here have none. Tables 2 and 3 quote the recalls of Gella
et al.; those lines are trained by their presets.

Huang, Chang, Hauptmann (2019): Multi-head attention with diversity for learning grounded multilingual multimodal representations.
Of table 1 all lines: VSE, OE and PIVOT, which it quotes from Gella et al., and VSE++, which have one vector per image; DAN, which
attends to the cells of a grid; SCAN (Lee et al. (2018) report its English numbers for t-i AVG); and its own, which it calls "Ours",
with words that are drawn (Random), pretrained (FastText) or read in their sentence (BERT). SCAN and its own attend to regions. The
two ensembles of Lee et al. stand below SCAN, without numbers: this paper has none of them. The R@10 of DAN from English text to
images stands as printed, 69.1, below its R@5; in Nam et al. (2017) it is 79.1, as the README of
github.com/JunweiLiang/DualAttentionNetwork quotes them, with the other English numbers as they stand here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.errors import UsageError
from train.reports.gold_published import GOLD_COLUMNS, GOLD_RANKS
from train.reports.sts_published import STS_PAPERS

PAPERS = ("gella2017", "kadar2018", "huang2019")


@dataclass(frozen=True)
class Measures:
    """The numbers reported for one direction; None if the paper does not report one.

    Attributes:
        recall_at_1: in percent.
        recall_at_5: in percent.
        recall_at_10: in percent.
        median_rank: median rank of the right item.
    """

    recall_at_1: float | None = None
    recall_at_5: float | None = None
    recall_at_10: float | None = None
    median_rank: float | None = None


@dataclass(frozen=True)
class PublishedRow:
    """A row of a table for one language.

    Attributes:
        paper: one of `PAPERS`.
        table: name of the table in the paper, e.g. ``table 2``.
        name: name of the row in the paper; a quoted one with its source.
        preset: the preset that trains it, for a quoted row mostly that of another paper; or a name in `ENSEMBLES`.
        language: language of the test captions.
        portion: portion of the test captions.
        image_to_text: numbers with images as queries.
        text_to_image: numbers with captions as queries.
    """

    paper: str
    table: str
    name: str
    preset: str
    language: str
    portion: str
    image_to_text: Measures
    text_to_image: Measures


def rows_of_paper(paper: str) -> tuple[PublishedRow, ...]:
    """Return all rows of a paper's tables, in their order.

    Raises:
        UsageError: the paper is unknown.
    """
    if paper not in PAPERS:
        raise UsageError(f"there are no tables of {paper!r}: expected one of {', '.join(PAPERS)}")
    return {"gella2017": _gella2017, "kadar2018": _kadar2018, "huang2019": _huang2019}[paper]()


def presets_of_paper(paper: str) -> tuple[str, ...]:
    """Return what all rows of a paper's tables are made of, each once: presets of rows and of members, and ensembles behind these.

    Raises:
        UsageError: the paper is unknown.
    """
    names = [row.preset for row in rows_of_paper(paper)] + [name for number in _sts(paper).values() for name in number]
    singles = [single for name in names for single in ENSEMBLES.get(name, (name,))]
    return tuple(dict.fromkeys([*singles, *(name for name in names if name in ENSEMBLES)]))


def presets_of_table(paper: str, table: int) -> tuple[str, ...]:
    """Return the presets of a table's rows, each once, in their order.

    Raises:
        UsageError: the paper is unknown, or has no such table of rows that are trained here.
    """
    presets: dict[int, dict[str, None]] = {}
    for row in rows_of_paper(paper):
        kind, _, number = row.table.partition(" ")
        if kind == "table":
            presets.setdefault(int(number), {})[row.preset] = None
    if paper == "gella2017":
        of_columns = (preset.format(rank.language) for preset in GOLD_COLUMNS.values() for rank in GOLD_RANKS)
        presets[3] = dict.fromkeys(of_columns)
    presets |= _sts(paper)
    if table not in presets:
        raise UsageError(f"--table is {table}, but the tables of {paper} are {', '.join(map(str, sorted(presets)))}")
    return tuple(presets[table])


def _sts(paper: str) -> dict[int, dict[str, None]]:
    """Return the presets of a paper's table of textual similarity, by its number."""
    return {
        of_paper.table: dict.fromkeys(row.preset for row in of_paper.rows if row.preset)
        for of_paper in STS_PAPERS
        if of_paper.paper == paper
    }


# Text to image, then image to text, each R@1, R@5, R@10 and median rank: the order of the columns in the paper.
_GELLA = {
    1: (
        ("VSE", "vse-en", (23.3, 53.6, 65.8, 5), (31.6, 60.4, 72.7, 3)),
        ("OE", "oe-en", (25.8, 56.5, 67.8, 4), (34.8, 63.7, 74.8, 3)),
        ("PIVOT-SYM", "pivot-sym", (23.5, 53.4, 65.8, 5), (31.6, 61.2, 73.8, 3)),
        ("PARALLEL-SYM", "parallel-sym", (24.7, 53.9, 65.7, 5), (31.7, 62.4, 74.1, 3)),
        ("PIVOT-ASYM", "pivot-asym", (26.2, 56.4, 68.4, 4), (33.8, 62.8, 75.2, 3)),
        ("PARALLEL-ASYM", "parallel-asym", (27.1, 56.2, 66.9, 4), (31.5, 61.4, 74.7, 3)),
    ),
    2: (
        ("VSE", "vse-de", (20.3, 47.2, 60.1, 6), (29.3, 58.1, 71.8, 4)),
        ("OE", "oe-de", (21.0, 48.5, 60.4, 6), (26.8, 57.5, 70.9, 4)),
        ("PIVOT-SYM", "pivot-sym", (20.3, 46.4, 59.2, 6), (26.9, 56.6, 70.0, 4)),
        ("PARALLEL-SYM", "parallel-sym", (20.9, 46.9, 59.3, 6), (28.2, 57.7, 71.3, 4)),
        ("PIVOT-ASYM", "pivot-asym", (22.5, 49.3, 61.7, 6), (28.2, 61.9, 73.4, 3)),
        ("PARALLEL-ASYM", "parallel-asym", (21.8, 50.5, 62.3, 5), (30.2, 60.4, 72.8, 3)),
    ),
}

# Names of the lines that Kádár et al. quote in tables 2 and 3, above their own, with the names in `_GELLA`.
_QUOTED = {
    "VSE": "VSE",
    "Pivot-Sym": "PIVOT-SYM",
    "Parallel-Sym": "PARALLEL-SYM",
    "OE": "OE",
    "Pivot-Asym": "PIVOT-ASYM",
    "Parallel-Asym": "PARALLEL-ASYM",
}

# Table 1 of Huang et al., in each language: the preset, and text to image and image to text, each R@1, R@5 and R@10.
_HUANG = {
    "de": (
        ("VSE (Kiros et al.)", "gella2017/vse-de", (20.3, 47.2, 60.1), (29.3, 58.1, 71.8)),
        ("OE (Vendrov et al.)", "gella2017/oe-de", (21.0, 48.5, 60.4), (26.8, 57.5, 70.9)),
        ("DAN (Nam et al.)", "dan-de", (31.0, 60.9, 71.0), (46.5, 77.5, 83.0)),
        ("VSE++ (Faghri et al.)", "vsepp-de", (31.3, 62.2, 70.9), (47.5, 78.5, 84.5)),
        ("SCAN (Lee et al.)", "scan/t2i-avg-de", (35.7, 64.9, 74.6), (52.3, 81.8, 88.5)),
        ("SCAN, t-i AVG + i-t LSE", "scan/t2i-avg+i2t-lse-de", (), ()),
        ("SCAN, t-i LSE + i-t AVG", "scan/t2i-lse+i2t-avg-de", (), ()),
        ("Pivot (Gella et al.)", "gella2017/pivot-asym", (22.5, 49.3, 61.7), (28.2, 61.9, 73.4)),
        ("MHA-D (Random, VGG19)", "huang2019/mha-d-vgg19", (25.8, 54.9, 65.1), (34.1, 65.5, 76.5)),
        ("MHA (Random, no diversity)", "huang2019/mha", (36.3, 65.3, 74.7), (53.1, 82.3, 88.8)),
        ("MHA-D (Random)", "huang2019/mha-d", (39.2, 67.5, 76.7), (55.0, 84.7, 91.2)),
        ("MHA-D (FastText)", "huang2019/mha-d-fasttext", (40.3, 70.1, 79.0), (60.4, 85.4, 92.0)),
        ("MHA-D (BERT)", "huang2019/mha-d-bert", (40.7, 70.5, 78.8), (56.5, 84.6, 91.3)),
    ),
    "en": (
        ("VSE (Kiros et al.)", "gella2017/vse-en", (23.3, 53.6, 65.8), (31.6, 60.4, 72.7)),
        ("OE (Vendrov et al.)", "gella2017/oe-en", (25.8, 56.5, 67.8), (34.8, 63.7, 74.8)),
        ("DAN (Nam et al.)", "dan", (39.4, 69.2, 69.1), (55.0, 81.8, 89.0)),
        ("VSE++ (Faghri et al.)", "vsepp", (39.6, 69.1, 79.8), (53.1, 82.1, 87.5)),
        ("SCAN (Lee et al.)", "scan/t2i-avg", (45.8, 74.4, 83.0), (61.8, 87.5, 93.7)),
        ("SCAN, t-i AVG + i-t LSE", "scan/t2i-avg+i2t-lse", (), ()),
        ("SCAN, t-i LSE + i-t AVG", "scan/t2i-lse+i2t-avg", (), ()),
        ("Pivot (Gella et al.)", "gella2017/pivot-asym", (26.2, 56.4, 68.4), (33.8, 62.8, 75.2)),
        ("MHA-D (Random, VGG19)", "huang2019/mha-d-vgg19", (30.1, 62.5, 71.6), (36.4, 68.0, 80.9)),
        ("MHA (Random, no diversity)", "huang2019/mha", (46.2, 74.7, 82.9), (63.3, 87.0, 93.3)),
        ("MHA-D (Random)", "huang2019/mha-d", (48.7, 77.2, 85.0), (66.4, 88.3, 93.4)),
        ("MHA-D (FastText)", "huang2019/mha-d-fasttext", (50.1, 78.1, 85.7), (68.0, 88.8, 94.0)),
        ("MHA-D (BERT)", "huang2019/mha-d-bert", (48.9, 78.3, 85.8), (66.5, 89.1, 94.1)),
    ),
}

ENSEMBLES: Mapping[str, tuple[str, ...]] = {
    f"scan/{first}+{second}{suffix}": (f"scan/{first}{suffix}", f"scan/{second}{suffix}")
    for suffix in ("-de", "")
    for first, second in (("t2i-avg", "i2t-lse"), ("t2i-lse", "i2t-avg"))
}
"""Rows that are ensembles: their names, and the presets whose runs of the same seed are scored together."""

# Tables 2 and 3: image to text, then text to image, each R@1, R@5 and R@10.
_KADAR_RECALLS = {
    2: (
        ("Monolingual", "monolingual-en", (42.4, 69.9, 79.8), (30.5, 57.8, 67.9)),
        ("Bilingual", "bilingual", (42.7, 70.7, 80.1), (30.6, 58.1, 68.3)),
        ("Bilingual + c2c", "bilingual-c2c", (43.8, 71.8, 81.4), (32.3, 59.9, 70.2)),
    ),
    3: (
        ("Monolingual", "monolingual-de", (34.2, 63.0, 74.0), (23.9, 49.5, 60.5)),
        ("Bilingual", "bilingual", (35.2, 64.3, 75.3), (24.6, 50.8, 62.0)),
        ("Bilingual + c2c", "bilingual-c2c", (37.9, 66.1, 76.8), (26.6, 53.0, 64.0)),
    ),
}

# Tables 4 and 5: R@10 of English image to text, English text to image, German image to text, German text to image. ``{}`` stands
# for the language in rows with one model per language.
_KADAR_BOTH_WAYS = {
    4: (
        ("Monolingual", "monolingual-translation-{}", (56.3, 40.1, 39.5, 20.9)),
        ("Bi-translation", "bi-translation", (67.4, 55.1, 58.3, 44.6)),
        ("Bi-translation + c2c", "bi-translation-c2c", (58.2, 47.7, 51.0, 39.6)),
        ("Bi-comparable", "bi-comparable", (67.9, 55.7, 62.0, 48.1)),
        ("Bi-comparable + c2c", "bi-comparable-c2c", (67.6, 56.0, 61.9, 49.1)),
    ),
    5: (
        ("Full Monolingual", "monolingual-{}", (79.8, 67.9, 74.0, 60.5)),
        ("Half Monolingual", "half-monolingual-{}", (73.7, 61.6, 66.4, 53.9)),
        ("Bi-overlap", "bi-overlap", (73.6, 62.2, 67.6, 54.9)),
        ("Bi-overlap + c2c", "bi-overlap-c2c", (76.0, 65.9, 71.2, 59.1)),
        ("Bi-disjoint", "bi-disjoint", (73.1, 62.1, 67.9, 54.9)),
    ),
}

# Tables 6 and 7: R@10 of text to image, in English, German, French and Czech; table 7 has only the last two.
_KADAR_LANGUAGES = ("en", "de", "fr", "cs")
_KADAR_TEXT_TO_IMAGE = {
    6: (
        ("Monolingual", "monolingual-translation-{}", (50.4, 39.5, 47.0, 42.0)),
        ("Multi-translation", "multi-translation", (58.7, 51.2, 57.0, 51.0)),
        ("Multi-translation + c2c", "multi-translation-c2c", (56.3, 52.2, 55.0, 51.6)),
        ("Multi-comparable", "multi-comparable", (59.2, 49.6, 57.2, 50.8)),
        ("Multi-comparable + c2c", "multi-comparable-c2c", (61.8, 52.7, 59.2, 55.2)),
    ),
    7: (
        ("Monolingual", "monolingual-translation-{}", (None, None, 47.0, 42.0)),
        ("Multilingual", "multilingual-{}", (None, None, 56.3, 51.3)),
        ("+ Comparable", "multilingual-comparable-{}", (None, None, 58.9, 52.4)),
        ("+ Comparable + c2c", "multilingual-comparable-c2c-{}", (None, None, 61.6, 57.2)),
    ),
}

_KADAR_FIGURE = (
    ("Monolingual", "monolingual-one-caption-{}"),
    ("Bilingual", "bi-comparable-c2c"),
    ("Multilingual", "multi-comparable-c2c"),
)


def _gella2017() -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(
            paper="gella2017",
            table=f"table {table}",
            name=name,
            preset=f"gella2017/{preset}",
            language={1: "en", 2: "de"}[table],
            portion="comparable",
            image_to_text=Measures(*image_to_text),
            text_to_image=Measures(*text_to_image),
        )
        for table, rows in _GELLA.items()
        for name, preset, text_to_image, image_to_text in rows
    )


def _kadar2018() -> tuple[PublishedRow, ...]:
    published = []
    for table, rows in _KADAR_RECALLS.items():
        published += _quoted(table)
        published += [
            _kadar_row(
                f"table {table}", name, preset, {2: "en", 3: "de"}[table], Measures(*image_to_text), Measures(*text_to_image)
            )
            for name, preset, image_to_text, text_to_image in rows
        ]
    for table, both_ways in _KADAR_BOTH_WAYS.items():
        for name, preset, recalls in both_ways:
            for language, first, second in zip(("en", "de"), recalls[::2], recalls[1::2], strict=True):
                measures = Measures(recall_at_10=first), Measures(recall_at_10=second)
                published.append(_kadar_row(f"table {table}", name, preset, language, *measures))
    for table, one_way in _KADAR_TEXT_TO_IMAGE.items():
        for name, preset, by_language in one_way:
            for language, recall in zip(_KADAR_LANGUAGES, by_language, strict=True):
                if recall is not None:
                    published.append(
                        _kadar_row(f"table {table}", name, preset, language, Measures(), Measures(recall_at_10=recall))
                    )
    for name, preset in _KADAR_FIGURE:
        published += [_kadar_row("figure 3", name, preset, language, Measures(), Measures()) for language in ("en", "de")]
    return tuple(published)


def _quoted(table: int) -> list[PublishedRow]:
    """Return the lines of Gella et al. that table 2 (English) or 3 (German) quotes: their tables 1 and 2, without the medians."""
    originals = {row.name: row for row in _gella2017() if row.table == f"table {table - 1}"}
    return [
        replace(
            originals[original],
            paper="kadar2018",
            table=f"table {table}",
            name=f"{name} (Gella et al.)",
            image_to_text=replace(originals[original].image_to_text, median_rank=None),
            text_to_image=replace(originals[original].text_to_image, median_rank=None),
        )
        for name, original in _QUOTED.items()
    ]


def _huang2019() -> tuple[PublishedRow, ...]:
    return tuple(
        PublishedRow(
            paper="huang2019",
            table="table 1",
            name=name,
            preset=preset,
            language=language,
            portion="comparable",
            image_to_text=Measures(*image_to_text),
            text_to_image=Measures(*text_to_image),
        )
        for language, rows in _HUANG.items()
        for name, preset, text_to_image, image_to_text in rows
    )


def _kadar_row(
    table: str, name: str, preset: str, language: str, image_to_text: Measures, text_to_image: Measures
) -> PublishedRow:
    return PublishedRow(
        paper="kadar2018",
        table=table,
        name=name,
        preset=f"kadar2018/{preset.format(language)}",
        language=language,
        portion="translation" if table in ("table 6", "table 7") else "comparable",
        image_to_text=image_to_text,
        text_to_image=text_to_image,
    )
