"""Correct items of COCO's test images from files of ECCV Caption and CxC.

``NAME_image_to_caption.json`` and ``NAME_caption_to_image.json`` map the ids of COCO's images and captions to lists of correct
items. A dataset has no ids of captions: COCO's ``captions_*.json``, or ``dataset_coco.json`` of Karpathy's splits, has them by
image and order, with their texts. Captions with other texts, such as those in another language, have no ids. An image's number
is the end of its image id, e.g. ``COCO_val2014_000000391895``.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, TypeAlias

import numpy as np

from schemas.conversion import convert
from schemas.errors import InputError, UsageError
from schemas.storage.folder import file_at
from schemas.text import decode_text
from schemas.vocabulary import SPECIALS
from train.data.captions import Captions
from train.evaluation.relevance import OWN_CAPTIONS, Pairs

_FILE = re.compile(r"((?:.*/)?)([^/]+)_(image_to_caption|caption_to_image)\.json")
_MIN_SHARE = 0.75  # Equal captions share all but normalized characters, other English captions of the same images about a half.

Annotations: TypeAlias = Mapping[tuple[int, int], tuple[int, str]]
"""Id and text of each caption, by the number of its image and its index."""


@dataclass(frozen=True)
class FileRelevance:
    """Correct items of images and captions, by COCO's ids.

    Attributes:
        words: tokens of the vocabulary.
    """

    location: str
    captions_of_image: Mapping[str, Sequence[int]]
    images_of_caption: Mapping[str, Sequence[int]]
    annotations: Annotations
    words: Sequence[str]

    def __call__(self, captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs] | None:
        """Return the pairs of both directions; queries that the data lack are left out.

        None if the captions have other texts than the annotations, or if a direction has no pairs.

        Raises:
            UsageError: two images have the same number.
        """
        matches = (re.search(r"(?<!\d)\d+$", image_id) for image_id in captions.image_ids)
        numbers = [int(match[0]) if match else -1 for match in matches]
        named = {image for image, _ in self.annotations}
        pictures: dict[int, int] = {}
        for position, image in enumerate(images.tolist()):
            if numbers[image] in named and pictures.setdefault(numbers[image], position) != position:
                same = [captions.image_ids[images[n]] for n in (pictures[numbers[image]], position)]
                raise UsageError(
                    f"the images {' and '.join(map(repr, same))} end in the same number, by which {self.location!r} names images: "
                    "evaluate them apart, as splits of their own, or leave --relevance out"
                )
        keys = zip(captions.images[rows].tolist(), captions.indices[rows].tolist(), strict=True)
        annotated = {row: found for row, (image, n) in enumerate(keys) if (found := self.annotations.get((numbers[image], n)))}
        if self._shared_text(captions, rows, annotated) < _MIN_SHARE:
            return None
        texts = {caption_id: row for row, (caption_id, _) in annotated.items()}
        pairs = _pairs_of(self.captions_of_image, pictures, texts), _pairs_of(self.images_of_caption, texts, pictures)
        return pairs if all((items >= 0).any() for _, items in pairs) else None

    def _shared_text(self, captions: Captions, rows: np.ndarray, annotated: Mapping[int, tuple[int, str]]) -> float:
        """Return the share of the characters of words that occur in the annotations."""
        if len(self.words) == len(SPECIALS):  # Vectors have no text.
            return float(captions.language_of(rows) == "en")
        shared = total = 0
        for position, (_, text) in annotated.items():
            start, end = captions.offsets[rows[position] : rows[position] + 2]
            for token_id in captions.token_ids[start:end].tolist():
                word = unescape(self.words[token_id]).lower() if token_id >= len(SPECIALS) else ""
                shared, total = shared + len(word) * (word in text), total + len(word)
        return shared / max(total, 1)


def read_relevance(locations: Sequence[str], annotations: str, words: Sequence[str]) -> dict[str, FileRelevance]:
    """Read correct items by the names of files; either file of a pair names both.

    ``words`` are the tokens of the vocabulary.

    Raises:
        InputError: a file is missing or has another layout.
        UsageError: a location is no ``NAME_image_to_caption.json`` or ``NAME_caption_to_image.json``, or two have one name.
    """
    captions = _read_annotations(annotations) if locations else {}
    definitions: dict[str, FileRelevance] = {}
    for location in locations:
        if (match := _FILE.fullmatch(location)) is None:
            raise UsageError(
                f"--relevance is {location!r}, expected NAME_image_to_caption.json or NAME_caption_to_image.json: give the files "
                "of the package eccv-caption, or name yours like them"
            )
        name = match[2]
        paths = [f"{match[1]}{name}_{direction}.json" for direction in ("image_to_caption", "caption_to_image")]
        if name == OWN_CAPTIONS or (name in definitions and definitions[name].location not in paths):
            raise UsageError(
                f"--relevance is {location!r}, but {name!r} already names correct items of this evaluation: rename the file"
            )
        to_captions, to_images = (convert(_read_json(path), dict[str, list[int]], path, error=InputError) for path in paths)
        definitions[name] = FileRelevance(location, to_captions, to_images, captions, words)
    return definitions


def _pairs_of(right: Mapping[str, Sequence[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Pairs:
    listed = {(int(query), item): None for query, own in right.items() if query.isdecimal() for item in own}
    pairs = [(queries[query], items.get(item, -1)) for query, item in listed if query in queries]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _read_annotations(location: str) -> Annotations:
    """Read captions by image number and index, from COCO's or Karpathy's file."""
    content, captions = _read_json(location), defaultdict(list)
    try:
        for item in content.get("annotations", ()):
            captions[int(item["image_id"])].append((int(item["id"]), item["caption"].lower()))
        for image in () if captions else content["images"]:
            captions[int(image["cocoid"])] += [(int(item["sentid"]), item["raw"].lower()) for item in image["sentences"]]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:  # OverflowError: an infinite id.
        raise InputError(
            f"{location!r} has no ids and texts of captions ({error!r}): give --annotations a "
            "captions_*.json of COCO or dataset_coco.json"
        ) from error
    return {(image, index): caption for image, own in captions.items() for index, caption in enumerate(own)}


def _read_json(location: str) -> Any:
    folder, name = file_at(location)
    try:
        return json.loads(decode_text(folder.read(name), location))
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: give the path of a JSON file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{location!r} is not JSON ({error}): fetch the file again") from error
