"""Chapters of a report about captions and vocabularies."""

from collections.abc import Collection, Iterator, Mapping
from html import unescape
from itertools import groupby, product, zip_longest
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.looking.charts import line_chart
from pipelines.looking.exhibits import Photos, caption_lines, spread
from pipelines.looking.pages import Block, Chart, Exhibit, Strip, TextLine
from schemas.console.tables import Cell, Row, Table, number_columns
from schemas.dataset import Dataset
from schemas.escapes import counted
from schemas.vocabulary import SPECIALS, UNK, Vocabulary

_LABELS = ("image_id", "language", "split")
_MAX_TOKENS = 15
_MAX_POINTS = 200
_MAX_UNKNOWN = 3  # Samples of a language.
_MAX_IMAGES = 8
_MAX_CAPTIONS = 2  # Of a language.
_SHOWN_IDS = 5


def describe_captions(
    dataset: Dataset, photos: Photos, vocabulary: Vocabulary | None, images: Mapping[str, Collection[str]]
) -> tuple[list[Block], list[str]]:
    """Return blocks and remarks about captions.

    ``images`` are the image ids of other collections by their names, e.g. of features and pictures.
    """
    rows = read_labels(dataset, "tokens")
    languages = sorted(pc.unique(rows["language"]).to_pylist())
    tokens = {language: rows.filter(pc.field("language") == language)["tokens"].combine_chunks() for language in languages}
    words = {language: lists.flatten().dictionary_encode() for language, lists in tokens.items()}
    counts, splits = _split_counts(rows), sorted(pc.unique(rows["split"]).to_pylist())
    absent = [pair for pair in product(splits, languages) if pair[::-1] not in counts]
    described = set(pc.unique(rows["image_id"]).to_pylist())
    blocks = [
        _count_table(counts, languages, splits),
        _lengths(tokens),
        _frequent_tokens(words),
        _growth(words),
        *([] if vocabulary is None else _unknown_tokens(dataset, words, vocabulary)),
        *_pictures(dataset, photos, sorted(described)),
    ]
    remarks = [] if rows.num_rows else ["there are no captions"]
    remarks += [f"split {split!r} has no captions in {language}" for split, language in absent]
    return blocks, [*remarks, *_missing_images(described, images)]


def read_labels(dataset: Dataset, *columns: str) -> pa.Table:
    """Read labels of captions as texts, which shards code differently."""
    tables = []
    for table in dataset.shards([*_LABELS, *columns]):
        for index, name in enumerate(_LABELS):
            table = table.set_column(index, name, table[name].cast(pa.string()))
        tables.append(table)
    return pa.concat_tables(tables)


def _split_counts(rows: pa.Table) -> dict[tuple[str, str], Cell]:
    """Count captions, and their images as references, by language and split."""
    groups = rows.group_by(["language", "split"]).aggregate([("image_id", "count"), ("image_id", "count_distinct")])
    names = ("language", "split", "image_id_count", "image_id_count_distinct")
    columns = (groups[name].to_pylist() for name in names)
    return {(language, split): Cell(count, images) for language, split, count, images in zip(*columns, strict=True)}


def _count_table(counts: Mapping[tuple[str, str], Cell], languages: Collection[str], splits: Collection[str]) -> Table:
    rows: list[Row] = [(language, *(counts.get((language, split)) for split in splits)) for language in languages]
    columns = ("language", *number_columns(*splits, spec=","))
    return Table(columns, rows, "captions by language and split", ["in brackets: images with these captions"])


def _missing_images(described: Collection[str], images: Mapping[str, Collection[str]]) -> Iterator[str]:
    for name, image_ids in images.items():
        for ids, text in (
            (set(image_ids) - set(described), f"of {name!r} without captions"),
            (set(described) - set(image_ids), f"with captions that {name!r} lacks"),
        ):
            if ids:
                first = ", ".join(sorted(ids)[:_SHOWN_IDS])
                yield f"{counted(len(ids), 'image')} {text}: {first}{', ...' if len(ids) > _SHOWN_IDS else ''}"


def _lengths(tokens: Mapping[str, pa.Array]) -> Chart:
    lengths = {language: pc.list_value_length(lists).to_numpy(zero_copy_only=False) for language, lists in tokens.items()}
    shares = {language: 100 * np.bincount(values) / max(1, len(values)) for language, values in lengths.items()}
    medians = ", ".join(f"{language} {median(values):g}" for language, values in lengths.items())
    return line_chart(
        "lengths of captions",
        {language: (range(len(values)), values.tolist()) for language, values in shares.items()},
        x_label="tokens",
        y_label="share of captions (%)",
        alternative=f"Medians in tokens: {medians}",
    )


def _frequent_tokens(words: Mapping[str, pa.DictionaryArray]) -> Table:
    columns = [_most_frequent(tokens) for tokens in words.values()]
    return Table([*words], list(zip_longest(*columns, fillvalue="")), "most frequent tokens")


def _most_frequent(tokens: pa.DictionaryArray) -> list[str]:
    counts = np.bincount(tokens.indices, minlength=len(tokens.dictionary)).tolist()
    pairs = sorted(zip(counts, tokens.dictionary.to_pylist(), strict=True), key=lambda pair: (-pair[0], pair[1]))
    return [f"{unescape(token)} {count:,}" for count, token in pairs[:_MAX_TOKENS] if count]  # Moses escapes quotes.


def _growth(words: Mapping[str, pa.DictionaryArray]) -> Chart:
    """Draw the number of distinct tokens over the tokens, in the order of shards."""
    series, ends = {}, []
    for language, tokens in words.items():
        codes = tokens.indices.to_numpy()
        # A dictionary has its words in the order of their first occurrence.
        first = np.flatnonzero(np.diff(np.maximum.accumulate(codes), prepend=-1))
        points = np.unique(np.linspace(0, len(first) - 1, _MAX_POINTS).astype(int)) if len(first) else np.array([], int)
        series[language] = ([*(first[points] + 1).tolist(), len(codes)], [*(points + 1).tolist(), len(first)])
        ends.append(f"{language} {len(first):,} of {len(codes):,}")
    return line_chart(
        "growth of the vocabulary",
        series,
        x_label="tokens read",
        y_label="distinct tokens",
        alternative=f"Distinct tokens in the end: {', '.join(ends)}",
    )


def _unknown_tokens(dataset: Dataset, words: Mapping[str, pa.DictionaryArray], vocabulary: Vocabulary) -> list[Block]:
    known = pa.array([token for token in vocabulary.tokens if token not in SPECIALS], pa.string())
    shares: list[Row] = []
    for language, tokens in words.items():
        unknown = tokens.filter(pc.invert(pc.is_in(tokens.dictionary, known)).take(tokens.indices))
        shares.append((language, f"{len(unknown) / max(1, len(tokens)):.2%}", ", ".join(_most_frequent(unknown))))
    samples: list[Row] = [
        (row["language"], row["image_id"], row["text"], ", ".join(row["unknown"])) for row in _with_unknown(dataset, known)
    ]
    return [
        Table(["language", *number_columns(SPECIALS[UNK]), "most frequent"], shares, "tokens that the vocabulary lacks"),
        Table(["language", "image_id", "caption", SPECIALS[UNK]], samples, "captions with such tokens"),
    ]


def _with_unknown(dataset: Dataset, known: pa.Array) -> list[dict[str, Any]]:
    """Return the first captions of each language with tokens that are not known."""
    samples: dict[str, list[dict[str, Any]]] = {}
    for table in dataset.shards(["image_id", "language", "text", "tokens"]):
        lists = table["tokens"].combine_chunks()
        is_unknown = pc.invert(pc.is_in(lists.flatten(), known))
        rows = pc.unique(pc.list_parent_indices(lists).filter(is_unknown))
        words = set(pc.unique(lists.flatten().filter(is_unknown)).to_pylist())
        for row in table.select(["image_id", "language", "text", "tokens"]).take(rows).to_pylist():
            chosen = samples.setdefault(row["language"], [])
            if len(chosen) < _MAX_UNKNOWN:
                chosen.append({**row, "unknown": [token for token in row["tokens"] if token in words]})
    return [row for _, rows in sorted(samples.items()) for row in rows]


def _pictures(dataset: Dataset, photos: Photos, image_ids: list[str]) -> list[Block]:
    if photos.source is None:
        return []
    photos.check_ids(image_ids)
    chosen = spread([image_id for image_id in image_ids if image_id in photos.refs], _MAX_IMAGES)
    lines, addresses = caption_lines(dataset, chosen), photos.addresses(chosen)
    exhibits = []
    for image_id in chosen:
        by_language = [list(group)[:_MAX_CAPTIONS] for _, group in groupby(lines[image_id], attrgetter("language"))]
        exhibits.append(Exhibit(image_id, addresses.get(image_id, ""), lines=[line for group in by_language for line in group]))
    return [Strip(TextLine("images and their captions"), exhibits)]
