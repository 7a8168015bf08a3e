"""Search for nearly equal vectors and pictures.

Vectors match by their cosine, in an exact search or one by faiss. Pictures match by a perceptual hash, which ignores size,
compression and colour. Coloured pictures also need similar colours: a red and a blue shirt of one cut have nearly equal hashes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import imagehash
import numpy as np
from PIL import Image

import extractors
from pipelines.running.meter import Meter
from schemas.errors import DatasetError
from schemas.fingerprints import sha256_of_bytes

if TYPE_CHECKING:
    from pipelines.inputs.images import ImageRef, ImageSource

MAX_EXACT = 100_000
"""Maximum number of vectors whose pairs are all compared."""

Links: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Pairs of items: positions of first and second, and similarities."""

_TILE = 256  # Rows that are compared simultaneously: 100 MB of cosines with 100,000 others.
_PROBES = 32
_TRAINING_VECTORS_PER_CELL = 64
_HASH_SIDE = 32
_MAX_DISTANCE = 0.15  # Share of bits: re-encoded and halved photographs differ in up to 0.05, different ones in 0.46.
_AREAS = 16  # Colours are means of 16 x 16 areas.
_MAX_COLOUR_DIFFERENCE = 10  # Of Cb or Cr, 0 to 255: re-encoded and halved pictures differ by up to 7.
_MAX_GREY_COLOUR = 4  # JPEG colours grey pictures a little.


def near_pairs(vectors: np.ndarray, min_cosine: float, meter: Meter = Meter()) -> Iterator[Links]:
    """Yield the pairs of unit vectors ``[N, D]`` with at least this cosine, in parts.

    Raises:
        ModuleNotFoundError: there are more than `MAX_EXACT` vectors, and faiss of the extra ``duplicates`` is not installed.
    """
    index = _inverted_file(vectors) if len(vectors) > MAX_EXACT else None
    for start in range(0, len(vectors), _TILE):
        rows = vectors[start : start + _TILE]
        if index is None:
            tile = rows @ vectors[start:].T
            first, second = np.nonzero(tile >= min_cosine)
            cosines, second = tile[first, second], second + start
        else:
            limits, cosines, second = index.range_search(rows, min_cosine)
            first = np.repeat(np.arange(len(rows)), np.diff(limits.astype(np.int64)))
        is_new = first + start < second
        yield first[is_new] + start, second[is_new], cosines[is_new]
        meter.add(images=len(rows))


def _inverted_file(vectors: np.ndarray) -> Any:
    """Index vectors by the nearest of √N centres; 32 cells are searched."""
    import faiss

    cells = math.isqrt(len(vectors))
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(vectors.shape[1]), vectors.shape[1], cells, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[:: max(1, len(vectors) // (_TRAINING_VECTORS_PER_CELL * cells))])
    index.add(vectors)
    index.nprobe = _PROBES
    return index


class PictureDigest(NamedTuple):
    """SHA-256 of file and pixels, hash bits ``[1024]``, colours Cb and Cr ``[512]``."""

    file: str | None
    pixels: str | None = None  # None if the file cannot be decoded.
    bits: np.ndarray | None = None  # None for a picture of one grey level.
    colours: np.ndarray | None = None


def digest_picture(data: bytes) -> PictureDigest:
    """Compute the digests of a file."""
    file = sha256_of_bytes(data)
    try:
        picture = extractors.decode(data)
    except extractors.DecodeError:
        return PictureDigest(file)
    areas = picture.convert("YCbCr").resize((_AREAS, _AREAS), Image.Resampling.BOX)
    low, high = picture.convert("L").getextrema()
    bits = imagehash.phash(picture, hash_size=_HASH_SIDE).hash.ravel() if low != high else None
    pixels = sha256_of_bytes(f"{picture.size}".encode() + picture.tobytes())
    return PictureDigest(file, pixels, bits, np.asarray(areas, np.int16)[..., 1:].ravel() - 128)


def read_digests(images: ImageSource, image_ids: Sequence[str], meter: Meter = Meter()) -> dict[str, PictureDigest]:
    """Read pictures in threads; those that are missing or unreadable are left out."""
    wanted = set(image_ids)
    refs = sorted(ref for ref in images.refs() if ref.image_id in wanted)
    images.check_ids(refs)

    def read(ref: ImageRef) -> PictureDigest | None:
        meter.add(pictures=1)
        try:
            return digest_picture(images.read(ref))
        except (OSError, DatasetError):
            return None

    with ThreadPoolExecutor(max(images.parallel_reads, os.cpu_count() or 1)) as pool:
        return {ref.image_id: digest for ref, digest in zip(refs, pool.map(read, refs), strict=True) if digest is not None}


def near_pictures(digests: Sequence[PictureDigest]) -> Iterator[Links]:
    """Yield the pairs of nearly equal pictures, with the share of equal bits."""
    items = [n for n, digest in enumerate(digests) if digest.bits is not None]
    if not items:
        return
    positions, bits, colours = (np.stack(values) for values in zip(*((n, *digests[n][2:]) for n in items), strict=True))
    is_grey = (np.abs(colours) <= _MAX_GREY_COLOUR).all(1)
    vectors = (2 * bits.astype(np.float32) - 1) / _HASH_SIDE  # The cosine is 1 - 2 x distance.
    for first, second, cosines in near_pairs(vectors, 1 - 2 * _MAX_DISTANCE):
        differences = np.abs(colours[first] - colours[second]).max(1, initial=0)
        alike = (differences <= _MAX_COLOUR_DIFFERENCE) | is_grey[first] | is_grey[second]
        yield positions[first[alike]], positions[second[alike]], (1 + cosines[alike]) / 2
