"""Right items of COCO's test images from files of ECCV Caption and CxC.

``NAME_image_to_caption.json`` and ``NAME_caption_to_image.json`` map the ids of COCO's images and captions to lists of right items.
A dataset has no ids of captions: COCO's ``captions_*.json``, or ``dataset_coco.json`` of Karpathy's splits, has them by image and
order. An image's number is the end of its image id, e.g. ``COCO_val2014_000000391895``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.conversion import convert
from schemas.errors import InputError, UsageError
from schemas.storage.folder import file_at
from schemas.storage.storage_errors import storage_errors
from schemas.text import decode_text
from train.data.captions import Captions
from train.evaluation.relevance import Pairs

_FILE = re.compile(r"(.*?)([^/]+)_(image_to_caption|caption_to_image)\.json")


@dataclass(frozen=True)
class FileRelevance:
    """Right items of images and captions, by COCO's ids.

    Attributes:
        caption_ids: ids of captions by the number of the image and the index of the caption.
    """

    location: str
    captions_of_image: Mapping[str, Sequence[int]]
    images_of_caption: Mapping[str, Sequence[int]]
    caption_ids: Mapping[tuple[int, int], int]

    def __call__(self, captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs]:
        """Return the pairs of both directions; queries that the data lack are left out.

        Raises:
            UsageError: the data have none of the pairs of a direction.
        """
        numbers = [_number(image_id) for image_id in captions.image_ids]
        keys = zip(captions.images[rows].tolist(), captions.indices[rows].tolist(), strict=True)
        texts = {self.caption_ids.get((numbers[image], n)): row for row, (image, n) in enumerate(keys)}
        pictures = {numbers[image]: row for row, image in enumerate(images.tolist())}
        pairs = _pairs(self.captions_of_image, pictures, texts), _pairs(self.images_of_caption, texts, pictures)
        if not all((items >= 0).any() for _, items in pairs):
            raise UsageError(
                f"{self.location!r} has no right items among the images and captions of split {captions.split!r}: evaluate COCO's "
                "test images, with ids that end in COCO's numbers, and give --annotations the file that the captions come from"
            )
        return pairs


def read_relevance(locations: Sequence[str], annotations: str) -> dict[str, FileRelevance]:
    """Read right items by the names of files; either file of a pair names both.

    Raises:
        InputError: a file is missing or has another layout.
        UsageError: a location is no ``NAME_image_to_caption.json`` or ``NAME_caption_to_image.json``.
    """
    caption_ids = _read_caption_ids(annotations) if locations else {}
    definitions = {}
    for location in locations:
        if (match := _FILE.fullmatch(location)) is None:
            raise UsageError(
                f"--relevance is {location!r}, expected NAME_image_to_caption.json or NAME_caption_to_image.json: give the files "
                "of the package eccv-caption, or name yours like them"
            )
        paths = [f"{match[1]}{match[2]}_{direction}.json" for direction in ("image_to_caption", "caption_to_image")]
        to_captions, to_images = (convert(_read_json(path), dict[str, list[int]], path, error=InputError) for path in paths)
        definitions[match[2]] = FileRelevance(location, to_captions, to_images, caption_ids)
    return definitions


def _pairs(right: Mapping[str, Sequence[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Pairs:
    pairs = [
        (queries[int(query)], items.get(item, -1))
        for query, query_items in right.items()
        if query.isdecimal() and int(query) in queries
        for item in dict.fromkeys(query_items)
    ]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _number(image_id: str) -> int:
    match = re.search(r"\d+$", image_id)
    return int(match[0]) if match else -1


def _read_caption_ids(location: str) -> dict[tuple[int, int], int]:
    """Read ids of captions by image number and index, from COCO's or Karpathy's file."""
    content, ids = _read_json(location), defaultdict(list)
    try:
        for annotation in content.get("annotations", ()):
            ids[int(annotation["image_id"])].append(int(annotation["id"]))
        for image in () if ids else content["images"]:
            ids[int(image["cocoid"])] += [int(sentence["sentid"]) for sentence in image["sentences"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{location!r} has no ids of captions ({error!r}): give --annotations a captions_*.json of COCO or dataset_coco.json"
        ) from error
    return {(image, index): caption for image, captions in ids.items() for index, caption in enumerate(captions)}


def _read_json(location: str) -> Any:
    folder, name = file_at(location)
    try:
        with storage_errors(location):
            return json.loads(decode_text(folder.read(name), location))
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: give the path of a JSON file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{location!r} is not JSON ({error}): fetch the file again") from error
