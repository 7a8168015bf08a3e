"""Worst errors and examples of retrieval, both ways, from ranks of queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.looking.exhibits import Photos, caption_rows_of, lines_in, spread
from pipelines.looking.pages import Exhibit, Strip, TextLine
from schemas.dataset import Dataset
from schemas.keys import CaptionKey

_PLACE = ("direction", "split", "language", "portion")
_COUNT = 4
_KEY_PARTS = 3  # Language, portion and index, behind an image id that may have slashes.


def chosen_queries(ranks: pa.Table, count: int = _COUNT) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield titles with the worst errors, and with examples, of each gallery.

    ``ranks`` are those of ``ranks.parquet``; queries across languages are left out. The worst errors are the queries whose right
    item has the lowest rank, the lowest first. Examples are taken at equal distances, whatever their ranks.
    """
    rows = ranks.filter(pc.field("candidates").is_null() & pc.field("best_wrong").is_valid())
    places = rows.select(_PLACE).group_by(list(_PLACE)).aggregate([])
    for place in places.sort_by([(name, "descending") for name in _PLACE]).to_pylist():
        queries = rows
        for name, value in place.items():
            queries = queries.filter(pc.field(name) == value)
        named = f"{place['direction'].replace('_', ' ')}, {', '.join(place[name] for name in _PLACE[1:])}"
        worst = queries.filter(pc.field("rank") > 1).sort_by([("rank", "descending"), ("query_id", "ascending")])
        if len(worst):
            yield f"worst errors, {named}", worst.slice(0, count).to_pylist()
        yield f"examples, {named}", spread(queries.sort_by("query_id").to_pylist(), count)


def retrieval_strips(ranks: pa.Table, captions: Dataset | None, photos: Photos) -> list[Strip]:
    """Return worst errors and examples: pairs of a right item and the best wrong one."""
    strips, chosen = [], list(chosen_queries(ranks))
    shown = {image_id for _, rows in chosen for row in rows for image_id in (row["image_id"], _wrong_image(row))}
    texts, lines = dict[str, TextLine](), {image_id: list[TextLine]() for image_id in shown}
    for caption in () if captions is None else caption_rows_of(captions, shown):
        line = TextLine(caption["text"], caption["language"])
        key = CaptionKey(caption["image_id"], caption["language"], caption["portion"], int(caption["index"]))
        texts[str(key)] = line
        lines[key.image_id].append(line)
    pictures = photos.addresses(shown)
    for title, rows in chosen:
        exhibits = []
        for row in rows:
            right_id, wrong_id, place = row["image_id"], _wrong_image(row), "above it" if row["rank"] > 1 else "below it"
            if row["direction"] == "image_to_text":
                right, wrong = lines_in(lines[right_id], row["language"]), [_text_of(row["best_wrong"], texts)]
                titles = "image, the best of its captions", f"best wrong caption, {place}, of this image"
            else:
                right, wrong = [_text_of(row["query_id"], texts)], [*lines_in(lines[wrong_id], row["language"])]
                titles = "right image of the caption", f"best wrong image, {place}"
            exhibits.append(Exhibit(right_id, pictures.get(right_id, ""), titles[0], right, mark=f"rank {row['rank']:,}"))
            exhibits.append(Exhibit(wrong_id, pictures.get(wrong_id, ""), titles[1], wrong))
        strips.append(Strip(TextLine(title), exhibits, layout="pairs"))
    return strips


def _text_of(caption_id: str, texts: Mapping[str, TextLine]) -> TextLine:
    return texts.get(caption_id, TextLine(caption_id))


def _wrong_image(row: Mapping[str, Any]) -> str:
    """Return the image of the best wrong item."""
    wrong: str = row["best_wrong"]
    return wrong.rsplit("/", _KEY_PARTS)[0] if row["direction"] == "image_to_text" else wrong
