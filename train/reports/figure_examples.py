"""Images and captions that figures show, drawn with a seed, whatever the model finds for them, or named; and pictures of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, TypeAlias

import numpy as np

from schemas.dataset import Dataset
from schemas.errors import InputError, UsageError
from schemas.keys import CaptionKey
from train.data.captions import Captions


@dataclass(frozen=True)
class ShownCaption:
    """A caption in a figure.

    Attributes:
        row: its row in `Captions`.
        tokens: what the model reads, ``<start>`` and ``<end>`` included.
    """

    row: int
    key: CaptionKey
    tokens: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens as one reads them: Moses writes some characters as ``&quot;`` and the like."""
        return tuple(map(unescape, self.tokens))

    @property
    def text(self) -> str:
        """The words between ``<start>`` and ``<end>``, with spaces between them."""
        return " ".join(self.words[1:-1])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"caption_id": str(self.key), "language": self.key.language, "text": self.text}


@dataclass(frozen=True)
class Example:
    """An image in a figure, with captions of it; ``number`` is from 1, ``image`` its position in `Captions.image_ids`."""

    number: int
    image: int
    image_id: str
    captions: tuple[ShownCaption, ...]


def choose_examples(
    captions: Captions, words: Sequence[str], *, count: int, seed: int, caption_ids: Sequence[str] = ()
) -> tuple[tuple[Example, ...], str]:
    """Choose images and captions.

    ``count`` images are drawn from those with captions in all languages, or all of these if they are fewer; each is shown with
    its first caption in each language. ``caption_ids`` names captions to show instead, as ``image/language/portion/index``;
    those of one image are one example. ``words`` are the tokens of the vocabulary.

    Returns:
        The examples, and in words how they were chosen.

    Raises:
        UsageError: no image has captions in all languages, or there is no caption of an id.
    """
    if caption_ids:
        rows = dict.fromkeys(_row_of(captions, name) for name in caption_ids)
        images = list(dict.fromkeys(int(captions.images[row]) for row in rows))
        of_images = [[row for row in rows if captions.images[row] == image] for image in images]
        rule = "captions that were named"
    else:
        known = images_in_all_languages(captions)
        drawn = np.random.default_rng(seed).permutation(known)[:count]
        images = np.sort(drawn).tolist()
        of_images = [first_captions(captions, image) for image in images]
        languages = ", ".join(captions.language_names)
        rule = (
            f"{len(images)} of the {len(known):,} images of split {captions.split} with captions in {languages}, drawn with seed "
            f"{seed} whatever the model finds; the first caption of each"
        )
    examples = tuple(
        Example(number, image, captions.image_ids[image], tuple(_shown(captions, row, words) for row in rows_of_image))
        for number, (image, rows_of_image) in enumerate(zip(images, of_images, strict=True), start=1)
    )
    return examples, rule


def images_in_all_languages(captions: Captions) -> np.ndarray:
    """Return the positions of the images that have a caption in each language, ascending.

    Raises:
        UsageError: there are none.
    """
    sets = [np.unique(captions.images[captions.rows_of(language)]) for language in captions.language_names]
    common = sets[0]
    for images in sets[1:]:
        common = np.intersect1d(common, images)
    if not len(common):
        raise UsageError(
            f"no image of split {captions.split!r} has captions in all of {', '.join(captions.language_names)}: name fewer with "
            "--languages, or captions with --caption-ids"
        )
    return common


def first_captions(captions: Captions, image: int) -> list[int]:
    """Return the rows of an image's first caption in each language that it has captions in."""
    rows = np.flatnonzero(captions.images == image)
    of_languages = (rows[captions.languages[rows] == number] for number in range(len(captions.language_names)))
    return [
        min(of_language.tolist(), key=lambda row: (captions.portions[row], captions.indices[row]))
        for of_language in of_languages
        if len(of_language)
    ]


def _row_of(captions: Captions, name: str) -> int:
    image_id, language, portion, index = ("", "", "", *name.rsplit("/", 3))[-4:]
    if image_id in captions.image_ids and language in captions.language_names and portion in captions.portion_names:
        here = captions.images == captions.image_ids.index(image_id)
        here &= captions.languages == captions.language_names.index(language)
        here &= captions.portions == captions.portion_names.index(portion)
        rows = [row for row in np.flatnonzero(here).tolist() if str(captions.indices[row]) == index]
        if rows:
            return rows[0]
    raise UsageError(
        f"--caption-ids names {name!r}, but there is no such caption among those of split {captions.split!r} in "
        f"{', '.join(captions.language_names)} ({', '.join(captions.portion_names)}): an id is image/language/portion/index, such "
        f"as {str(_key(captions, 0))!r}"
    )


def _key(captions: Captions, row: int) -> CaptionKey:
    return CaptionKey(
        captions.image_ids[captions.images[row]],
        captions.language_names[captions.languages[row]],
        captions.portion_names[captions.portions[row]],
        int(captions.indices[row]),
    )


def _shown(captions: Captions, row: int, words: Sequence[str]) -> ShownCaption:
    ids = captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]]
    return ShownCaption(row, _key(captions, row), tuple(words[number] for number in ids.tolist()))


Picture: TypeAlias = tuple[np.ndarray, tuple[int, int]]
"""Pixels, RGB, uint8 ``[height, width, 3]``, maybe reduced; width and height before that."""

ReadPictures: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Picture]]
"""From a location and image ids to the pictures by id."""


def pictures_of(location: str, image_ids: Collection[str], read: ReadPictures | None) -> Mapping[str, Picture]:
    """Read pictures; none without a location.

    Raises:
        UsageError: there is a location, but nothing that reads it.
        InputError: an image is not there, or cannot be read.
    """
    if not location:
        return {}
    if read is None:
        raise UsageError(
            f"--images is {location!r}, and reading images needs pip install 'imagepivot[pipelines]': install that, or leave "
            "--images out for figures with ids in place of pictures"
        )
    return read(location, sorted(image_ids))


def check_sizes(features: Dataset, pictures: Mapping[str, Picture], image_ids: Collection[str]) -> None:
    """Check that pictures have the sizes of those in which regions were found.

    Raises:
        InputError: one has another size.
    """
    if features.kind != "regions":
        return
    for image_id in sorted(pictures.keys() & set(image_ids)):
        row: dict[str, Any] = features.get(image_id)
        found, expected = pictures[image_id][1], (row["width"], row["height"])
        if all(expected) and found != expected:
            raise InputError(
                f"image {image_id!r} is {found[0]}×{found[1]} pixels, its regions in {features.folder.location!r} are those of a "
                f"picture of {expected[0]}×{expected[1]}: give the images that the dataset was made of"
            )
