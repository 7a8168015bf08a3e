"""Images and captions in figures, sampled or named by id, with their pictures."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np

from schemas.dataset import Dataset, open_dataset
from schemas.errors import InputError, UsageError
from schemas.keys import CaptionKey
from schemas.kinds import KEY_COLUMNS
from schemas.vocabulary import END, SPECIALS, START
from train.data.captions import ByImage, Captions


@dataclass(frozen=True)
class ShownCaption:
    """A caption in a figure.

    Attributes:
        row: its row in `Captions`.
        tokens: its tokens, with ``<start>`` and ``<end>``.
        written: the caption as its source has it; empty if unknown.
    """

    row: int
    key: CaptionKey
    tokens: tuple[str, ...]
    written: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The tokens without the HTML entities of Moses, e.g. ``&quot;``."""
        return tuple(map(unescape, self.tokens))

    @property
    def text(self) -> str:
        """The caption as written, or else its words without ``<start>`` and ``<end>``."""
        return self.written or " ".join(self.words[1:-1])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"caption_id": str(self.key), "language": self.key.language, "text": self.text}


@dataclass(frozen=True)
class Example:
    """An image in a figure with its captions.

    ``number`` counts from 1, ``image`` is an index in `Captions.image_ids`.
    """

    number: int
    image: int
    image_id: str
    captions: tuple[ShownCaption, ...]


def choose_examples(
    captions: Captions,
    words: Sequence[str],
    texts: Mapping[str, str] | None = None,
    *,
    count: int,
    seed: int,
    caption_ids: Sequence[str] = (),
) -> tuple[tuple[Example, ...], str]:
    """Choose images and captions.

    By default, at most ``count`` images with captions in all languages are sampled, each with its first caption in each language.
    ``caption_ids`` are captions to show instead, as ``image/language/portion/index``; those of one image are one example. ``words``
    are the tokens of the vocabulary, empty for vectors of captions; ``texts`` are captions as written, by id.

    Returns:
        The examples, and a description of the choice.

    Raises:
        UsageError: no image has captions in all languages, or an id has no caption.
    """
    if caption_ids:
        row_of = {caption_id: row for row, caption_id in enumerate(captions.ids())}
        if unknown := [name for name in caption_ids if name not in row_of]:
            raise UsageError(
                f"--caption-ids names {unknown[0]!r}, but there is no such caption among those of split {captions.split!r} in "
                f"{', '.join(captions.language_names)} ({', '.join(captions.portion_names)}): an id is "
                f"image/language/portion/index, such as {next(iter(row_of))!r}"
            )
        rows = dict.fromkeys(row_of[name] for name in caption_ids)
        images = list(dict.fromkeys(int(captions.images[row]) for row in rows))
        image_rows = [[row for row in rows if captions.images[row] == image] for image in images]
        rule = "captions that were named"
    else:
        candidates = images_in_all_languages(captions)
        images = np.sort(np.random.default_rng(seed).permutation(candidates)[:count]).tolist()
        image_rows = [first_captions(captions, image) for image in images]
        languages = ", ".join(captions.language_names)
        rule = (
            f"{len(images)} of the {len(candidates):,} images of split {captions.split} with captions in "
            f"{languages}, drawn with seed {seed} whatever the model finds; the first caption of each"
        )
    examples = tuple(
        Example(number, image, captions.image_ids[image], tuple(shown_caption(captions, row, words, texts) for row in rows))
        for number, (image, rows) in enumerate(zip(images, image_rows, strict=True), start=1)
    )
    return examples, rule


def images_in_all_languages(captions: Captions) -> np.ndarray:
    """Return the indices of the images with a caption in each language, ascending.

    Raises:
        UsageError: no image has captions in all languages.
    """
    common = np.flatnonzero((ByImage.of(captions).counts > 0).all(1))
    if not len(common):
        raise UsageError(
            f"no image of split {captions.split!r} has captions in all of {', '.join(captions.language_names)}: name fewer with "
            "--languages, or captions with --caption-ids"
        )
    return common


def first_captions(captions: Captions, image: int) -> list[int]:
    """Return the row of an image's first caption in each of its languages."""
    rows = np.flatnonzero(captions.images == image).tolist()
    rows.sort(key=lambda row: (captions.languages[row], captions.portions[row], captions.indices[row]))
    return [next(group) for _, group in groupby(rows, key=lambda row: captions.languages[row])]


def read_texts(location: str) -> dict[str, str]:
    """Read the text of prepared captions by caption id; none from an empty location."""
    dataset = open_dataset(location, kind="captions") if location else None
    rows = dataset.table([*KEY_COLUMNS["captions"], "text"]).to_pylist() if dataset is not None else []
    return {str(CaptionKey(*key)): text for *key, text in map(dict.values, rows)}


def shown_caption(captions: Captions, row: int, words: Sequence[str], texts: Mapping[str, str] | None = None) -> ShownCaption:
    """Return a caption with its tokens; without words, text or id is a single one."""
    key = CaptionKey(
        captions.image_ids[captions.images[row]],
        captions.language_names[captions.languages[row]],
        captions.portion_names[captions.portions[row]],
        int(captions.indices[row]),
    )
    text = (texts or {}).get(str(key), "")
    if not words:
        return ShownCaption(row, key, (SPECIALS[START], text or str(key), SPECIALS[END]), text)
    ids = captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]]
    return ShownCaption(row, key, tuple(words[token_id] for token_id in ids.tolist()), text)


SizedPixels: TypeAlias = tuple[np.ndarray, tuple[int, int]]
"""RGB pixels, uint8 ``[height, width, 3]``, possibly downscaled; and the original width and height."""

ReadPictures: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, SizedPixels]]
"""Reader of pictures, by id, from a location and image ids."""


def check_sizes(features: Dataset, pictures: Mapping[str, SizedPixels], image_ids: Collection[str]) -> None:
    """Check that pictures have the sizes of their regions.

    Raises:
        InputError: one has another size.
    """
    if features.kind != "regions":
        return
    for image_id in sorted(pictures.keys() & set(image_ids)):
        row: dict[str, Any] = features.get(image_id)
        (width, height), expected = pictures[image_id][1], (row["width"], row["height"])
        if all(expected) and (width, height) != expected:
            raise InputError(
                f"image {image_id!r} is {width}×{height} pixels, its regions in {features.folder.location!r} are those of a "
                f"picture of {expected[0]}×{expected[1]}: give the images that the dataset was made of"
            )
