"""The data regimes of Kádár et al. 2018, sections 5 and 6: which captions a model is trained on.

Portions, and thus comparable captions added to translations, are selected when the captions are read (`train.data.read_captions`).
Random draws depend on a seed and on image ids only, never on the order of rows, the number of shards or the other captions: the
half of the images is the same whichever languages are read.

Letters in shapes: ``N`` captions, ``I`` images.
"""

from __future__ import annotations

import hashlib

import numpy as np

from schemas.errors import UsageError
from train.data.captions import Captions


def one_caption_per_image(captions: Captions, seed: int) -> Captions:
    """Keep one random caption per image and language: comparable captions shrink to 29,000 per language (section 5.2).

    All captions of an image are equally likely. The draws of two languages are independent. Translations all stay, since an image
    has only one.
    """
    languages = len(captions.language_names)
    groups = captions.images.astype(np.int64) * languages + captions.languages
    # Sorted, so that the draw does not depend on the order of rows.
    order = np.lexsort((captions.indices, captions.portions, groups))
    present, starts, counts = np.unique(groups[order], return_index=True, return_counts=True)
    keys = np.empty(len(present), np.uint64)
    for number, language in enumerate(captions.language_names):
        of_language = present % languages == number
        keys[of_language] = _draws(captions, present[of_language] // languages, seed, f"caption/{language}")
    chosen = order[starts + (keys % counts.astype(np.uint64)).astype(np.int64)]
    return captions.select(np.sort(chosen))


def half_of_images(captions: Captions, seed: int) -> Captions:
    """Keep the captions of a random half of the images, the same half for every language (section 5.3).

    With one language this is Half Monolingual, with two Bi-overlap. If the number of images is odd, the half is rounded down.
    """
    return captions.select(_in_half(captions, seed)[captions.images])


def disjoint_halves(captions: Captions, seed: int) -> Captions:
    """Keep the first language's captions of a random half of the images, and the second's of the rest (section 5.3).

    This is Bi-disjoint: no image has captions in both languages. The first half is that of `half_of_images`.

    Raises:
        UsageError: there are not exactly two languages.
    """
    if len(captions.language_names) != 2:
        raise UsageError(
            f"images are divided between two languages, but there are {len(captions.language_names)}: "
            f"{', '.join(captions.language_names)}"
        )
    return captions.select(_in_half(captions, seed)[captions.images] == (captions.languages == 0))


def _in_half(captions: Captions, seed: int) -> np.ndarray:
    """Return whether each image is in the half, bool ``[I]``; images without captions are not counted."""
    present = np.unique(captions.images)
    order = np.argsort(_draws(captions, present, seed, "half"), kind="stable")
    half = np.zeros(len(captions.image_ids), bool)
    half[present[order[: len(present) // 2]]] = True
    return half


def _draws(captions: Captions, images: np.ndarray, seed: int, purpose: str) -> np.ndarray:
    """Return a uniform random uint64 for each image, which depends only on the seed, the purpose and the image id."""
    ids = (captions.image_ids[image] for image in images.tolist())
    digests = (hashlib.blake2b(f"{seed}/{purpose}/{name}".encode(), digest_size=8).digest() for name in ids)
    return np.frombuffer(b"".join(digests), "<u8")
