"""Sheet of search results: queries and their images, whatever model found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from pipelines.looking.exhibits import lines_in
from pipelines.looking.pages import Exhibit, Strip, TextLine

FoundImage: TypeAlias = tuple[str, float]
"""Id and score of an image."""


def answer_strips(
    answers: Iterable[tuple[str, str, Sequence[FoundImage], tuple[int, FoundImage] | None]],
    pictures: Mapping[str, str],
    captions: Mapping[str, Sequence[TextLine]],
) -> list[Strip]:
    """Return queries with their images in the order of rank.

    Answers are a sentence, its language, the best images, and rank and image that are right, if known.
    ``pictures`` are addresses by image id; ``captions`` those of the images, shown in the language of the query.
    """
    strips = []
    for query, language, hits, right in answers:
        exhibits, shown = [], [*enumerate(hits, start=1), *([right] if right is not None and right[0] > len(hits) else [])]
        for rank, (image_id, score) in shown:
            lines = lines_in(captions.get(image_id, ()), language)
            mark = "right" if right is not None and image_id == right[1][0] else ""
            exhibits.append(Exhibit(image_id, pictures.get(image_id, ""), f"rank {rank:,}, score {score:.3f}", lines, mark))
        strips.append(Strip(TextLine(query, language), exhibits))
    return strips
