"""The ranks of single captions in table 3 of Gella, Sennrich, Keller, Lapata (2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GoldRank:
    """A line of table 3 of Gella et al. 2017: a caption as query, and the rank of its image under several models.

    Attributes:
        image_id: the image, which the paper shows.
        language: language of the caption.
        index: index of the caption among the comparable ones of its image: the number of its file in Multi30K, less one.
        text: the caption, as printed.
        ranks: rank of the image, by column of the table.
    """

    image_id: str
    language: str
    index: int
    text: str
    ranks: Mapping[str, int]


GOLD_COLUMNS: Mapping[str, str] = {
    "OE": "gella2017/oe-{}",
    "PIVOT": "gella2017/pivot-asym",
    "PARALLEL": "gella2017/parallel-asym",
}
"""Columns of table 3, "models trained using asymmetric similarity", and their presets; ``{}`` stands for the language."""

GOLD_RANKS = tuple(
    GoldRank(image_id, language, index, text, dict(zip(GOLD_COLUMNS, ranks, strict=True)))
    for image_id, language, index, text, ranks in (
        ("2511798599", "de", 0, "2 Menschen auf der Straße mit Megafon", (141, 37, 6)),
        ("2511798599", "en", 3, "two people in blue shirts are outside with a bullhorn", (85, 7, 3)),
        (
            *("3532476966", "de", 4),
            "ein Verkäufer mit weißem Hut und blauem Hemd , verkauft Kartoffeln oder ähnliches an Männer und Frauen",
            (36, 1, 3),
        ),
        (
            *("3532476966", "en", 0),
            "at an outdoor market , a small group of people stoop to buy potatoes from a street vendor , who has his goods laid "
            "out on the ground",
            (24, 2, 2),
        ),
    )
)
"""Table 3 of Gella et al. 2017. The images and the numbers of the captions are where Multi30K has these words."""
