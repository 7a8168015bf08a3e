"""Sheet of search results: queries and their images, whatever model found them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pipelines.looking.exhibits import lines_in
from pipelines.looking.pages import Chapter, Exhibit, Strip, TextLine


def sheet_of(
    answers: Iterable[tuple[str, str, Sequence[tuple[str, float]]]],
    pictures: Mapping[str, str],
    captions: Mapping[str, Sequence[TextLine]],
) -> Chapter:
    """Return a sheet of queries, their languages, and ids and scores of images.

    Images are in the order of rank.
    ``pictures`` are addresses by image id; ``captions`` those of the images, shown in the language of the query.
    """
    strips = []
    for query, language, hits in answers:
        exhibits = []
        for rank, (image_id, score) in enumerate(hits, start=1):
            lines = lines_in(captions.get(image_id, ()), language)
            exhibits.append(Exhibit(image_id, pictures.get(image_id, ""), f"rank {rank}, score {score:.3f}", lines))
        strips.append(Strip(TextLine(query, language), exhibits))
    return Chapter("found", strips)
