"""Named protocols of image-sentence retrieval: test sets, their sizes and folds.

A protocol is recognized by the name of the split, the pattern of its image ids, and the numbers of images and
captions. The ids themselves are not compared with published lists.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ANY = ".+"
_COCO = r"(COCO_(train|val)2014_)?\d{12}"
_KARPATHY = "Karpathy and Fei-Fei 2015, test images"


@dataclass(frozen=True)
class Protocol:
    """Named test set with its sizes, and the number of folds that papers average over.

    Attributes:
        splits: patterns of the image ids by name of the split.
        captions: numbers of captions in a language; several where papers differ.
    """

    name: str
    splits: Mapping[str, str]
    images: int
    captions: tuple[int, ...]
    source: str
    folds: int = 1


# Karpathy's file of COCO has 25,010 captions; VSE++, SCAN and CxC take the first five of each image.
PROTOCOLS = (
    Protocol("flickr8k-1k", {"test": r"\d+_[0-9a-f]{10}"}, 1_000, (5_000,), "Hodosh et al. 2013, test images"),
    Protocol("flickr30k-1k", {"test": r"\d{6,10}"}, 1_000, (5_000,), _KARPATHY),
    Protocol("coco-5k", {"test": _COCO, "testall": _ANY}, 5_000, (25_000, 25_010), _KARPATHY),
    Protocol("coco-1k-5fold", {"test": _COCO, "testall": _ANY}, 5_000, (25_000, 25_010), _KARPATHY, folds=5),
    Protocol("multi30k-2016", {"test_2016": _ANY}, 1_000, (5_000,), "Elliott et al. 2016, task 2"),
    Protocol("multi30k-2016", {"test_2016_flickr": _ANY}, 1_000, (1_000,), "Elliott et al. 2016, task 1"),
    Protocol("multi30k-2017", {"test_2017_flickr": _ANY}, 1_000, (1_000,), "Elliott et al. 2017, task 1"),
    Protocol("multi30k-coco", {"test_2017_mscoco": _ANY}, 461, (461,), "Elliott et al. 2017, ambiguous COCO"),
    Protocol("multi30k-2018", {"test_2018_flickr": _ANY}, 1_071, (1_071,), "Barrault et al. 2018, task 1"),
    Protocol("xtd10", {"test": _COCO, "xtd10": _ANY}, 1_000, (1_000,), "Aggarwal and Kale 2020"),
)


@dataclass(frozen=True)
class ProtocolMatch:
    """Comparison of the evaluated data with a protocol.

    Attributes:
        differences: phrases such as ``9 of 1,000 images``; empty if the data agree.
    """

    protocol: Protocol
    differences: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """A clause for people."""
        if self.differences:
            return f"not {self.protocol.name}: {', '.join(self.differences)}"
        folds = f", mean of {self.protocol.folds} folds" if self.protocol.folds > 1 else ""
        return f"{self.protocol.name}, {self.protocol.images:,} images{folds} ({self.protocol.source})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        values = {**vars(self.protocol), "captions": list(self.protocol.captions), "differences": list(self.differences)}
        return {name: value for name, value in values.items() if name != "splits"}


def match_protocol(split: str, image_ids: Sequence[str], captions: int, folds: int = 1) -> ProtocolMatch | None:
    """Compare evaluated data with the closest protocol of their split.

    ``captions`` are those in one language. None if no protocol has a split of this name with such image ids.

    Example:
        >>> match_protocol("test_2017_mscoco", ["COCO_train2014_000000000001"], 1).remark
        'not multi30k-coco: 1 of 461 images, 1 of 461 captions'
    """
    matches = []
    for protocol in PROTOCOLS:
        pattern = protocol.splits.get(split)
        if pattern is not None and all(re.fullmatch(pattern, image_id) for image_id in image_ids):
            differences = [f"{len(image_ids):,} of {protocol.images:,} images"] if len(image_ids) != protocol.images else []
            if captions not in protocol.captions:
                differences.append(f"{captions:,} of {' or '.join(f'{count:,}' for count in protocol.captions)} captions")
            if folds != protocol.folds:
                differences.append(f"folds {folds}, expected {protocol.folds}")
            matches.append(ProtocolMatch(protocol, tuple(differences)))
    return min(matches, key=lambda match: (len(match.differences), abs(match.protocol.images - len(image_ids))), default=None)
