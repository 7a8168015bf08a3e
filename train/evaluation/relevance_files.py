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
        location: one of the files, for messages.
        caption_ids: ids of an image's captions in the order of their indices, by the number of the image.
    """

    location: str
    captions_of_image: Mapping[str, Sequence[int]]
    images_of_caption: Mapping[str, Sequence[int]]
    caption_ids: Mapping[int, Sequence[int]]

    def __call__(self, captions: Captions, rows: np.ndarray, images: np.ndarray) -> tuple[Pairs, Pairs]:
        """Return the pairs of both directions; ids that the data lack are left out.

        Raises:
            UsageError: the data have none of the pairs of a direction.
        """
        numbers = [_number(image_id) for image_id in captions.image_ids]
        own = [
            dict(enumerate(self.caption_ids.get(numbers[image], ()))).get(index)
            for image, index in zip(captions.images[rows].tolist(), captions.indices[rows].tolist(), strict=True)
        ]
        image_positions = {numbers[image]: position for position, image in enumerate(images.tolist())}
        caption_positions = {caption: position for position, caption in enumerate(own)}
        pairs = (
            _pairs(self.captions_of_image, image_positions, caption_positions),
            _pairs(self.images_of_caption, caption_positions, image_positions),
        )
        if not all(len(queries) for queries, _ in pairs):
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
        paths = (f"{match[1]}{match[2]}_{direction}.json" for direction in ("image_to_caption", "caption_to_image"))
        to_captions, to_images = (convert(_read_json(path), dict[str, list[int]], path, error=InputError) for path in paths)
        definitions[match[2]] = FileRelevance(location, to_captions, to_images, caption_ids)
    return definitions


def _pairs(right: Mapping[str, Sequence[int]], queries: Mapping[Any, int], items: Mapping[Any, int]) -> Pairs:
    pairs = [
        (queries[int(query)], items[item])
        for query, query_items in right.items()
        if query.isdecimal() and int(query) in queries
        for item in dict.fromkeys(query_items)
        if item in items
    ]
    first, second = np.array(pairs, np.int64).reshape(-1, 2).T
    return first, second


def _number(image_id: str) -> int:
    match = re.search(r"\d+$", image_id)
    return int(match[0]) if match else -1


def _read_caption_ids(location: str) -> dict[int, list[int]]:
    """Read the ids of captions by image number from COCO's or Karpathy's file."""
    content, ids = _read_json(location), defaultdict(list)
    try:
        if "annotations" in content:
            for annotation in content["annotations"]:
                ids[int(annotation["image_id"])].append(int(annotation["id"]))
        else:
            for image in content["images"]:
                ids[int(image["cocoid"])] += [int(sentence["sentid"]) for sentence in image["sentences"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{location!r} has no ids of captions ({error!r}): give --annotations a captions_*.json of COCO or dataset_coco.json"
        ) from error
    return ids


def _read_json(location: str) -> Any:
    folder, name = file_at(location)
    try:
        with storage_errors(location):
            return json.loads(decode_text(folder.read(name), location))
    except FileNotFoundError as error:
        raise InputError(f"{location!r} does not exist: give the path of a JSON file") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{location!r} is not JSON ({error}): fetch the file again") from error
