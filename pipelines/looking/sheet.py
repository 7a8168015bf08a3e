"""Sheet of search results: a query and its images.

Hits are plain values, image ids and scores, whatever model found them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipelines.looking.exhibits import lines_in
from pipelines.looking.pages import Chapter, Exhibit, Strip, TextLine


class Found(NamedTuple):
    """A query, its language, and ids and scores of images, best first."""

    query: str
    language: str
    hits: Sequence[tuple[str, float]]


def sheet_of(results: Iterable[Found], pictures: Mapping[str, str], captions: Mapping[str, Sequence[TextLine]] = {}) -> Chapter:
    """Return a sheet with a strip for each query.

    ``pictures`` are thumbnails by image id; ``captions`` those of the images, shown in the language of the query.
    """
    strips = []
    for query, language, hits in results:
        exhibits = [
            Exhibit(
                image_id,
                pictures.get(image_id, ""),
                f"rank {rank}, score {score:.3f}",
                lines_in(captions.get(image_id, ()), language),
            )
            for rank, (image_id, score) in enumerate(hits, start=1)
        ]
        strips.append(Strip(TextLine(query, language), exhibits))
    return Chapter("found", strips)
