"""Best-ranked images of captions, as in figure 2 of Huang et al. 2019.

Letters: ``I`` images.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from schemas.drawing.charts import GREY, SMALL, TINY, TWO_COLUMNS, plain, save
from schemas.drawing.style import Axes, Figure, Rectangle, own_style
from schemas.keys import CaptionKey
from schemas.storage.folder import Folder
from train.data.captions import Captions
from train.evaluation.evaluation import Count, embed_captions, no_progress, scores_between, take_rows
from train.evaluation.search import Answer, Hit
from train.models.retrieval_model import Encoded, RetrievalModel
from train.reports.figure_examples import Example, ShownCaption, SizedPixels


@dataclass(frozen=True)
class Ranking:
    """Ranking of the images for a caption.

    Attributes:
        hits: the best images, best first.
        rank: rank of the right image, from 1; ties count against it; 0 if no image is known to be right.
    """

    example: int
    caption: ShownCaption
    hits: tuple[Hit, ...]
    rank: int = 0
    right: Hit | None = None
    images: int = 0

    @property
    def is_missed(self) -> bool:
        """Whether the right image is not among the best."""
        return self.rank > len(self.hits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        hits = [{"image_id": hit.image_id, "score": hit.score} for hit in self.hits]
        return {"example": self.example, **self.caption.to_dict(), "rank": self.rank, "images": self.images, "hits": hits}


def rank_examples(
    model: RetrievalModel,
    captions: Captions,
    images: Encoded,
    examples: Sequence[Example],
    *,
    top: int,
    on_progress: Count = no_progress,
) -> tuple[Ranking, ...]:
    """Rank the images for each caption, and return the ``top`` best.

    As in an evaluation, only images with a caption in its language are ranked.
    """
    rankings = {}
    shown = [(example, caption) for example in examples for caption in example.captions]
    for language in captions.language_names:
        queries = [(example, caption) for example, caption in shown if caption.key.language == language]
        if not queries:
            continue
        chosen = np.unique(captions.images[captions.rows_of(language)])
        rows = np.array([caption.row for _, caption in queries])
        encoded = embed_captions(model, captions.batch(rows), language, on_progress=on_progress)
        columns = torch.arange(len(rows), device=model.device)
        scores = scores_between(model, take_rows(images, chosen), encoded)(slice(None), columns).cpu().numpy()  # [I, captions]
        for (example, caption), caption_scores in zip(queries, scores.T, strict=True):
            right = int(np.searchsorted(chosen, example.image))
            order = ranked(caption_scores, right).tolist()
            hits = [Hit(captions.image_ids[chosen[index]], float(caption_scores[index])) for index in order]
            rank = order.index(right) + 1
            rankings[caption.row] = Ranking(example.number, caption, tuple(hits[:top]), rank, hits[rank - 1], len(order))
    return tuple(rankings[caption.row] for _, caption in shown)


class RankedCaptions(NamedTuple):
    """Ranking of the captions in a language for an image.

    ``hits`` are the ids of the best captions, each with whether it is the image's own; ``rank`` is that of the best own one.
    """

    image_id: str
    language: str
    hits: Sequence[tuple[str, bool]]
    rank: int


def rank_captions(
    model: RetrievalModel, captions: Captions, images: Encoded, examples: Sequence[Example], *, top: int, on_progress: Count
) -> Iterator[RankedCaptions]:
    """Rank the captions in each language for each image, and yield the ``top`` best."""
    queries = np.array([example.image for example in examples])
    caption_ids = captions.ids()
    for language in captions.language_names:
        rows = captions.rows_of(language)
        encoded = embed_captions(model, captions.batch(rows), language, on_progress=on_progress)
        columns = torch.arange(len(rows), device=model.device)
        scores = scores_between(model, take_rows(images, queries), encoded)(slice(None), columns).cpu().numpy()
        for image, image_scores in zip(queries.tolist(), scores, strict=True):
            right = np.flatnonzero(captions.images[rows] == image)
            order = ranked(image_scores, right)
            hits = [(caption_ids[rows[index]], index in right) for index in order[:top]]
            rank = int(np.flatnonzero(np.isin(order, right))[0]) + 1
            yield RankedCaptions(captions.image_ids[image], language, hits, rank)


def ranked(scores: np.ndarray, right: int | np.ndarray) -> np.ndarray:
    """Return the indices of scores ``[I]``, best first, ties and NaN before ``right``."""
    wrong = ~np.isin(np.arange(len(scores)), right)
    values = np.where(np.isnan(scores), np.where(wrong, np.inf, -np.inf), scores)
    return np.lexsort((np.arange(len(scores)), ~wrong, -values))


FRAME = "#009E73"
"""Colour of the frame of the right image: the green of Okabe and Ito 2008."""

_TEXT, _EDGE, _INDENT, _APART, _GAP = 1.95, 0.06, 0.22, 0.16, 0.06  # Inches.
_HEAD, _LINE, _TEXT_LINE = 0.2, 0.14, 0.12  # Inches: heights of a heading and of lines.
_MIN_CELL, _MAX_CELL = 0.75, 1.6  # Inches: sides of a picture.
_CHARACTERS, _LINES, _MAX_ID_LINES = 31, 20, 6  # Sizes of a caption and of an id.
_CHARACTERS_PER_INCH = 17  # Width of the note's characters.
_MARKS = re.compile(r" ([^\w\s]+)(?=\s|$)")


@own_style()
def plot_rankings(
    rankings: Sequence[Ranking], pictures: Mapping[str, SizedPixels], folder: Folder, name: str, *, note: str
) -> None:
    """Draw a row for each caption, two columns wide: text, rank and best images.

    The right image comes last, after a gap, if it is not among the best. Many images take several lines. Captions of one example
    are adjacent. Images without a picture are fields with their ids. The note is at the bottom.

    Raises:
        DatasetError: the picture cannot be written.
    """
    missed = any(ranking.is_missed for ranking in rankings)
    count = max(len(ranking.hits) for ranking in rankings) + missed
    room = TWO_COLUMNS - _TEXT - _EDGE - missed * _APART
    across = min(count, int((room + _GAP) / (_MIN_CELL + _GAP)))
    down = -(-count // across)
    cell = min((room + _GAP) / across - _GAP, _MAX_CELL)
    queries = [_wrap(ranking.caption.text) for ranking in rankings]
    rows = [max(down * (_HEAD + cell), _HEAD + 0.38 + _TEXT_LINE * len(query)) for query in queries]
    starts = [True, *(before.example != ranking.example for before, ranking in pairwise(rankings))]
    lines = textwrap.wrap(note, int(TWO_COLUMNS * _CHARACTERS_PER_INCH))
    height = sum(rows) + (sum(starts) - 1) * _APART + _LINE * len(lines) + 2 * _EDGE
    figure = Figure(figsize=(TWO_COLUMNS, height))
    y = height - _EDGE + _APART
    for ranking, start, query, row in zip(rankings, starts, queries, rows, strict=True):
        y -= row + start * _APART
        _write_query(figure, ranking, query, y, y + row - _HEAD, start=start)
        shown = [(hit, str(rank), 0.0) for rank, hit in enumerate(ranking.hits, start=1)]
        if ranking.right is not None and ranking.is_missed:
            shown.append((ranking.right, f"right: {ranking.rank:,}", _APART))
        for index, (hit, title, apart) in enumerate(shown):
            line, column = divmod(index, across)
            left, low = _TEXT + column * (cell + _GAP) + apart, y + row - (line + 1) * (_HEAD + cell)
            # Anchored at the upper edge, to align the titles.
            panel = figure.add_axes((left / TWO_COLUMNS, low / height, cell / TWO_COLUMNS, cell / height), anchor="N")
            draw_picture(panel, pictures.get(hit.image_id), hit.image_id)
            framed = ranking.right is not None and hit.image_id == ranking.right.image_id
            weight, color = ("bold", "black") if framed else ("normal", GREY)
            panel.set_title(title, fontsize=TINY, pad=4, fontweight=weight, color=color)
            if framed:
                panel.spines[:].set(visible=True, color=FRAME, linewidth=2)
    _typeset(figure, _EDGE, _EDGE, "\n".join(lines), fontsize=TINY - 1, color=GREY, va="bottom")
    save(figure, folder, name)


def plot_answers(answers: Sequence[Answer], pictures: Mapping[str, SizedPixels], folder: Folder, name: str) -> None:
    """Draw a row for each answer of a search."""
    rankings = []
    for number, (query, language, hits, _) in enumerate(answers, start=1):
        rankings.append(Ranking(number, ShownCaption(0, CaptionKey("", language, "", 0), (), query), tuple(hits)))
    plot_rankings(rankings, pictures, folder, name, note="")


def draw_picture(panel: Axes, picture: SizedPixels | None, image_id: str, size_wh: tuple[int, int] | None = None) -> None:
    """Draw a picture in pixel coordinates, or a field with the id of the image."""
    if picture is None:
        width, height = size_wh or (1, 1)
        panel.add_patch(Rectangle((0, 0), width, height, facecolor="0.92", edgecolor="none", zorder=0))
        lines = "\n".join(textwrap.wrap(image_id, 12)[:_MAX_ID_LINES])
        panel.text(width / 2, height / 2, plain(lines), ha="center", va="center", fontsize=TINY, color=GREY)
    else:
        pixels, (width, height) = picture
        panel.imshow(pixels, extent=(0, width, height, 0), aspect="equal", interpolation="antialiased")
    panel.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xticks=[], yticks=[])
    panel.spines[:].set_visible(False)


def _wrap(text: str) -> list[str]:
    """Return the lines of a caption, without breaks before punctuation."""
    lines = textwrap.wrap(_MARKS.sub("\N{NO-BREAK SPACE}\\1", text), _CHARACTERS)
    return lines if len(lines) <= _LINES else [*lines[: _LINES - 1], f"{lines[_LINES - 1][: _CHARACTERS - 2]} …"]


def _write_query(figure: Figure, ranking: Ranking, lines: Sequence[str], y: float, top: float, *, start: bool) -> None:
    """Write example number, language and text, and the rank of the right image."""
    if start:
        _typeset(figure, _EDGE, top, str(ranking.example), fontsize=SMALL, fontweight="bold", va="top")
    _typeset(figure, _INDENT, top, ranking.caption.key.language, fontsize=SMALL, fontweight="bold", va="top")
    _typeset(figure, _INDENT, top - 0.17, "\n".join(lines), fontsize=TINY, va="top", linespacing=1.15)
    if ranking.rank:
        rank = f"right image: rank {ranking.rank:,} of {ranking.images:,}"
        _typeset(figure, _INDENT, y, rank, fontsize=TINY, va="bottom", color=FRAME if ranking.rank == 1 else GREY)


def _typeset(figure: Figure, x: float, y: float, text: str, **style: Any) -> None:
    """Write text at a position in inches."""
    width, height = figure.get_size_inches()
    figure.text(x / width, y / height, plain(text), **style)
