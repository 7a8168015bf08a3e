"""Retrieval both ways: examples of a model, and worst errors from ranks."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.looking.exhibits import FoundImage, Photos, answer_strips, caption_rows_of, lines_in
from pipelines.looking.pages import Exhibit, Strip, TextLine
from schemas.dataset import Dataset
from schemas.keys import CaptionKey

_PLACE = ("direction", "split", "language", "portion")
_COUNT = 4
_KEY_PARTS = 3  # Language, portion and index, behind an image id that may have slashes.

FoundImages: TypeAlias = tuple[CaptionKey, str, Sequence[FoundImage], tuple[int, FoundImage]]
"""A caption and its tokens, its best images, and rank and hit of its own image."""

FoundCaptions: TypeAlias = tuple[str, str, Sequence[tuple[str, bool]], int]
"""An image, a language, the best captions, each with whether it is the image's own, and the rank of the best own one."""


class _Shown(NamedTuple):
    """Texts by caption id, texts by image, and pictures."""

    texts: Mapping[str, TextLine]
    lines: Mapping[str, Sequence[TextLine]]
    pictures: Mapping[str, str]

    @classmethod
    def of(cls, image_ids: Collection[str], captions: Dataset | None, photos: Photos) -> Self:
        texts, lines = dict[str, TextLine](), {image_id: list[TextLine]() for image_id in image_ids}
        for caption in () if captions is None else caption_rows_of(captions, image_ids):
            line = TextLine(caption["text"], caption["language"])
            texts[str(CaptionKey(caption["image_id"], caption["language"], caption["portion"], int(caption["index"])))] = line
            lines[caption["image_id"]].append(line)
        return cls(texts, lines, photos.addresses(image_ids))

    def text(self, caption_id: str) -> TextLine:
        """Return a caption as written, or its id."""
        return self.texts.get(caption_id, TextLine(caption_id))


def example_strips(
    images: Iterable[FoundImages], captions: Iterable[FoundCaptions], texts: Dataset | None, photos: Photos
) -> list[Strip]:
    """Return the best images for captions, and the best captions for images."""
    images, captions = list(images), list(captions)
    shown = {image_id for _, _, hits, right in images for image_id, _ in (*hits, right[1])}
    shown |= {image_id for image_id, *_ in captions} | {_image_of(hit) for _, _, hits, _ in captions for hit, _ in hits}
    found = _Shown.of(shown, texts, photos)
    answers = [
        (found.texts.get(str(key), TextLine(words)).text, key.language, hits, right) for key, words, hits, right in images
    ]
    strips = answer_strips(answers, found.pictures, found.lines)
    for language in dict.fromkeys(language for _, language, _, _ in captions):
        exhibits = []
        for image_id, _, hits, rank in (row for row in captions if row[1] == language):
            lines = [TextLine(f"{'✓' if is_right else '✗'} {found.text(hit).text}", language) for hit, is_right in hits]
            exhibits.append(Exhibit(image_id, found.pictures.get(image_id, ""), "its best caption:", lines, f"rank {rank:,}"))
        strips.append(
            Strip(TextLine(f"image to text, {language}: best captions; ✓ marks the image's own"), exhibits, layout="pairs")
        )
    return strips


def worst_queries(ranks: pa.Table, count: int = _COUNT) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles with the worst errors of each gallery, the lowest rank first.

    Worst errors are the queries whose right item has the lowest rank. ``ranks`` are those of
    ``ranks.parquet``; queries across languages are left out.
    """
    rows = ranks.filter(pc.field("candidates").is_null() & pc.field("best_wrong").is_valid() & (pc.field("rank") > 1))
    places = rows.select(_PLACE).group_by(list(_PLACE)).aggregate([])
    for place in places.sort_by([(name, "descending") for name in _PLACE]).to_pylist():
        queries = rows
        for name, value in place.items():
            queries = queries.filter(pc.field(name) == value)
        worst = queries.sort_by([("rank", "descending"), ("query_id", "ascending")]).slice(0, count).to_pylist()
        labels = ", ".join(label for name in _PLACE[1:] for label in place[name].split(","))
        yield f"worst errors, {place['direction'].replace('_', ' ')}, {labels}", worst


def error_strips(ranks: pa.Table, captions: Dataset | None, photos: Photos) -> list[Strip]:
    """Return worst errors: pairs of a right item and the best wrong one."""
    strips, chosen = [], list(worst_queries(ranks))
    found = _Shown.of(
        {image for _, rows in chosen for row in rows for image in (row["image_id"], _wrong_image(row))}, captions, photos
    )
    for title, rows in chosen:
        exhibits = []
        for row in rows:
            right_id, wrong_id = row["image_id"], _wrong_image(row)
            if row["direction"] == "image_to_text":
                own = [line for caption_id, line in found.texts.items() if _is_right(caption_id, row)]
                right, wrong = lines_in(own, row["language"]), [found.text(row["best_wrong"])]
                titles = "image, the best of its captions", "best wrong caption, above it, of this image"
            else:
                right, wrong = [found.text(row["query_id"])], [*lines_in(found.lines[wrong_id], row["language"])]
                titles = "right image of the caption", "best wrong image, above it"
            exhibits.append(Exhibit(right_id, found.pictures.get(right_id, ""), titles[0], right, mark=f"rank {row['rank']:,}"))
            exhibits.append(Exhibit(wrong_id, found.pictures.get(wrong_id, ""), titles[1], wrong))
        strips.append(Strip(TextLine(title), exhibits, layout="pairs"))
    return strips


def _wrong_image(row: Mapping[str, Any]) -> str:
    wrong: str = row["best_wrong"]
    return _image_of(wrong) if row["direction"] == "image_to_text" else wrong


def _is_right(caption_id: str, row: Mapping[str, Any]) -> bool:
    """Return whether a caption is of the image, language and portions of a query."""
    image_id, language, portion, _ = caption_id.rsplit("/", _KEY_PARTS)
    return (image_id, language) == (row["image_id"], row["language"]) and portion in row["portion"].split(",")


def _image_of(caption_id: str) -> str:
    return caption_id.rsplit("/", _KEY_PARTS)[0]
