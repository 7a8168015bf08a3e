"""``imagepivot duplicates``: groups of nearly equal images and of equal captions.

A group is a connected component of matching pairs. Features match by their cosine, in an exact search or one
by faiss. Pictures match by a perceptual hash, which ignores size, compression and colour. Coloured pictures
also need like colours, up to one change of all: a red and a blue shirt of one cut have nearly equal hashes.
"""

import logging
import math
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from hashlib import blake2b
from itertools import chain, combinations, groupby
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow.compute as pc
from PIL import Image, ImageChops
from scipy.fft import dctn
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

import extractors
from pipelines.inputs.images.base import ImageRef, ImageSource
from pipelines.jobs import DuplicatesJob
from pipelines.running.meter import Meter
from pipelines.running.process_pool import by_key
from schemas.console.events import Remark
from schemas.console.tables import Row, Table, number_columns
from schemas.dataset import Dataset, check_kind, open_dataset
from schemas.duplicates import KINDS, Duplicate
from schemas.errors import DatasetError, InputError
from schemas.fingerprints import sha256_of_bytes
from schemas.keys import normalization_hint
from schemas.kinds import KEY_COLUMNS
from schemas.options import takes_fields
from schemas.writing.records import read_record

MAX_EXACT = 100_000
"""Maximum number of vectors whose pairs are all compared."""

MIN_COSINE = 0.93
"""Default threshold. With EfficientNet-Lite0, different photographs reach 0.60, and drawn scenes 0.92."""

MIN_UNTRAINED_COSINE = 1 - 1e-6
"""Default threshold for untrained networks: equal up to rounding. Different scenes reach 0.9985."""

_LABELS = (*KEY_COLUMNS["captions"], "split")
_TILE = 256  # Rows that are compared simultaneously: 100 MB of cosines with 100,000 others.
_PROBES = 32
_HASH_SIDE = 32
_NOISE = 8 * _HASH_SIDE  # Standard deviation of coefficients, if that of pixels is one grey level.
_MIN_INFORMATION = 0.5  # Share of bits: photographs blurred by 8 pixels have 0.78, drawn scenes 0.83, gradients up to 0.21.
_MAX_DISTANCE = 0.15  # Share of bits: re-encoded and halved photographs differ in up to 0.05, different ones in 0.46.
_AREAS = 16  # Colours are means of 16 x 16 areas.
_MAX_COLOUR_DIFFERENCE = 10  # Difference of Cb or Cr, 0 to 255: copies and recoloured ones differ by up to 9.4.
_MAX_CLIPPED_DIFFERENCE = 25  # In areas that one picture clips more: copies of 1.3 times the brightness differ by up to 21.
_MAX_GREY_COLOUR = 4  # JPEG colours grey pictures a little.
_MIN_SATURATION = 0.5
_MAX_CAST = 0.08  # Cast of Cb or Cr by luminance: 10% more red and 10% less blue are up to 0.074.
_PAIRS = 1024  # Pairs whose colours are compared simultaneously: 20 MB.

_Links: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]  # Positions of first and second items, and similarities.
_Matches: TypeAlias = Iterator[tuple[str, _Links]]

logger = logging.getLogger(__name__)


@takes_fields(DuplicatesJob)
def find_duplicates(job: DuplicatesJob, meter: Meter = Meter(), on_warning: Remark = logger.warning) -> list[Duplicate]:
    """Find equal and nearly equal images and captions.

    ``on_warning`` receives a sentence about images that only their features can compare.

    Raises:
        DatasetError: a dataset is missing, damaged or of another kind.
        InputError: no picture belongs to the features, or two have the same id.
        ModuleNotFoundError: there are more than `MAX_EXACT` images, and faiss of the extra ``duplicates`` is not installed.
    """
    features, captions = open_dataset(job.features), list[dict[str, Any]]()
    check_kind(features, "features", "regions")
    if job.captions:
        rows = open_dataset(job.captions, kind="captions").table([*_LABELS, "text"]).to_pylist()
        captions = sorted(rows, key=itemgetter(*KEY_COLUMNS["captions"]))
    splits = by_key((row["image_id"], row["split"]) for row in captions)
    ids = sorted(features.image_ids())
    images = [{"image_id": image_id, "split": ",".join(sorted({*splits.get(image_id, ())}))} for image_id in ids]
    matches = chain(_match_images(job, features, ids, meter, on_warning), _match_captions(captions, len(ids)))
    return _group([*images, *({name: str(row[name]) for name in _LABELS} for row in captions)], matches)


def count_table(duplicates: Sequence[Duplicate]) -> Table:
    """Count groups by pair of splits, and their items there by kind."""
    counts: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for _, group in groupby(duplicates, attrgetter("group")):
        members = list(group)
        item = f"captions {members[0].language}" if members[0].language else "images"
        sizes = Counter(member.split for member in members)
        for pair in set(combinations([split for split in sorted(sizes) for _ in range(min(sizes[split], 2))], 2)):
            counts[(item, *pair)].update(["groups", *(member.kind for member in members if member.split in pair)])
    names = ("groups", *(kind for kind in KINDS if any(count[kind] for count in counts.values())))
    rows: list[Row] = [(*key, *(count[name] or None for name in names)) for key, count in sorted(counts.items())]
    notes = ["groups with items of both splits, and the numbers of these items by their strongest match"]
    return Table(("", "split", "and split", *number_columns(*names, spec=",")), rows, "duplicates", notes)


def _group(items: Sequence[Mapping[str, str]], matches: Iterable[tuple[str, _Links]]) -> list[Duplicate]:
    """Return the members of groups of several images; strong matches come first."""
    labels, kinds, similarities = np.arange(len(items)), np.full(len(items), len(KINDS)), np.zeros(len(items), np.float32)
    for kind, (first, second, values) in matches:
        for members in (first, second):
            kinds[members] = np.minimum(kinds[members], KINDS.index(kind))
            is_strongest = kinds[members] == KINDS.index(kind)
            np.maximum.at(similarities, members[is_strongest], values[is_strongest])
        graph = coo_array((np.ones(len(first), bool), (labels[first], labels[second])), (len(items), len(items)))
        labels = connected_components(graph, directed=False)[1][labels]
    groups = by_key((labels[item], item) for item in np.flatnonzero(kinds < len(KINDS)).tolist())
    several = [members for members in groups.values() if len({items[item]["image_id"] for item in members}) > 1]
    return [
        Duplicate(group, KINDS[kinds[item]], round(float(similarities[item]), 6), **items[item])
        for group, members in enumerate(several)
        for item in members
    ]


def _link_equal(keys: Iterable[Hashable], start: int = 0) -> _Links:
    """Link each item with the first one of an equal key; None equals no key."""
    first_items: dict[Hashable, int] = {}
    links = [(first_items.setdefault(key, item), item) for item, key in enumerate(keys, start) if key is not None]
    first, second = np.array([link for link in links if link[0] != link[1]], np.int64).reshape(-1, 2).T
    return first, second, np.ones(len(first), np.float32)


# --- images ----------------------------------------------------------------------------------------------------------


def _match_images(job: DuplicatesJob, features: Dataset, ids: Sequence[str], meter: Meter, on_warning: Remark) -> _Matches:
    # Records hold the SHA-256 of files.
    records = (read_record(features.folder, shard.path, whole=True) for shard in features.manifest.shards)
    sources = (source for record in records if record for source in record.sources or ())
    files = {source.image_id: source.sha256 for source in sources if source.sha256}
    digests: dict[str, PictureDigest] = {}
    known, needed = set(files), f"digest of the file in {job.features!r}, and --images is missing"
    if job.images:
        images = job.reading.open(job.images)
        digests = _read_digests(images, ids, meter)
        files |= {image_id: digest.file for image_id, digest in digests.items()}
        known, needed = set(digests), f"picture in {images.location!r}"
    if missing := [image_id for image_id in ids if image_id not in known]:
        message = f"{len(missing):,} of {len(ids):,} images, e.g. {missing[0]!r}, have no {needed}"
        if job.images and not digests:
            hint = normalization_hint(missing, (ref.image_id for ref in images.refs()))
            raise InputError(f"{message}: {hint or 'give the images that the features are of'}")
        on_warning(f"{message}: only their features are compared")
    pictures = [digests.get(image_id, PictureDigest()) for image_id in ids]
    yield "bytes", _link_equal(map(files.get, ids))
    yield "pixels", _link_equal(picture.pixels for picture in pictures)
    yield from (("hash", links) for links in near_pictures(pictures))
    yield from (("cosine", links) for links in _near_features(job, features, ids, meter))


class PictureDigest(NamedTuple):
    """SHA-256 of file and pixels, hash bits ``[1024]``, int16 colours ``[4, 256]``."""

    file: str = ""
    pixels: str | None = None  # None if the file cannot be decoded.
    bits: np.ndarray | None = None  # None for a plain picture.
    colours: np.ndarray | None = None  # Y, Cb, Cr and share of clipped pixels, of 255.


def digest_picture(data: bytes) -> PictureDigest:
    """Compute the digests of a file."""
    file = sha256_of_bytes(data)
    try:
        picture = extractors.decode_image(data)
    except extractors.DecodeError:
        return PictureDigest(file)
    clipped = reduce(ImageChops.lighter, picture.split()).point([0] * 254 + [255] * 2)
    bands = zip((*picture.convert("YCbCr").split(), clipped), (0, 128, 128, 0), strict=True)
    areas = [np.asarray(band.resize((_AREAS, _AREAS), Image.Resampling.BOX), np.int16).ravel() - zero for band, zero in bands]
    pixels = sha256_of_bytes(f"{picture.size}".encode() + picture.tobytes())
    return PictureDigest(file, pixels, hash_bits(picture), np.array(areas))


def hash_bits(picture: Image.Image) -> np.ndarray | None:
    """Compute the bits of ``imagehash.phash``; None if noise could flip half of them.

    Noise deviates by one grey level. A bit is the sign of a low frequency. Gradients have few frequencies:
    their other signs are those of rounding errors, and equal in unrelated pictures.
    """
    grey = picture.convert("L").resize((4 * _HASH_SIDE, 4 * _HASH_SIDE), Image.Resampling.LANCZOS)
    coefficients = dctn(np.asarray(grey, np.float64))[:_HASH_SIDE, :_HASH_SIDE].ravel()
    deviations = coefficients - np.median(coefficients)
    return deviations > 0 if (np.abs(deviations) > _NOISE).mean() >= _MIN_INFORMATION else None


def _read_digests(images: ImageSource, image_ids: Sequence[str], meter: Meter) -> dict[str, PictureDigest]:
    """Read pictures in threads; those that are missing or unreadable are left out."""
    wanted = set(image_ids)
    refs: Sequence[ImageRef] = sorted(ref for ref in images.refs() if ref.image_id in wanted)
    images.check_ids(refs)
    refs = images.in_reading_order(refs)

    def read(ref: ImageRef) -> PictureDigest | None:
        meter.add(pictures=1)
        try:
            return digest_picture(images.read(ref))
        except (OSError, DatasetError):
            return None

    with ThreadPoolExecutor(max(images.parallel_reads, os.cpu_count() or 1)) as pool:
        return {ref.image_id: digest for ref, digest in zip(refs, pool.map(read, refs), strict=True) if digest is not None}


def near_pictures(digests: Sequence[PictureDigest]) -> Iterator[_Links]:
    """Yield the pairs of nearly equal pictures, with the share of equal bits."""
    items = np.array([item for item, digest in enumerate(digests) if digest.bits is not None], np.int64)
    if not len(items):
        return
    bits, areas = (np.stack([digests[item][column] for item in items]) for column in (2, 3))
    is_grey = (np.abs(areas[:, 1:3]) <= _MAX_GREY_COLOUR).all((1, 2))
    vectors = (2 * bits.astype(np.float32) - 1) / _HASH_SIDE  # The cosine is 1 - 2 x distance.
    for first, second, cosines in near_pairs(vectors, 1 - 2 * _MAX_DISTANCE):
        alike = is_grey[first] | is_grey[second]
        others = np.flatnonzero(~alike)
        for part in (others[start : start + _PAIRS] for start in range(0, len(others), _PAIRS)):
            alike[part] = _have_like_colours(areas[first[part]], areas[second[part]])
        yield items[first[alike]], items[second[alike]], (1 + cosines[alike]) / 2


def _have_like_colours(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Tell which pairs of colours ``[N, 4, 256]`` are equal but for one change of all.

    A change of saturation, brightness or white balance multiplies Cb and Cr and adds a share of Y, but where it clips.
    """
    alike = (np.abs(first - second)[:, 1:3] <= _MAX_COLOUR_DIFFERENCE).all((1, 2))
    others = np.flatnonzero(~alike)
    first, second = first[others].astype(np.float32), second[others].astype(np.float32)
    is_clipped = np.abs(first[:, 3:] - second[:, 3:]) > 0.02 * 255  # More than 2 % of the pixels differ in clipping.
    tolerances = np.where(is_clipped, _MAX_CLIPPED_DIFFERENCE, _MAX_COLOUR_DIFFERENCE)
    for vivid, pale in ((first, second), (second, first)):
        light, colours = pale[:, :1], np.stack([vivid[:, 1:3], pale[:, 1:3]])
        casts = (colours * light).sum(3, keepdims=True) / np.maximum((light**2).sum(2, keepdims=True), 1)
        source, target = colours - casts * light  # Least squares of the factor follow from what Y leaves.
        factors = (source * target).sum((1, 2), keepdims=True) / np.maximum((source**2).sum((1, 2), keepdims=True), 1)
        factors = factors.clip(_MIN_SATURATION, 1)
        cast = (casts[1] - factors * casts[0]).clip(-_MAX_CAST, _MAX_CAST)
        alike[others] |= (np.abs(colours[1] - factors * colours[0] - cast * light) <= tolerances).all((1, 2))
    return alike


def _near_features(job: DuplicatesJob, dataset: Dataset, ids: Sequence[str], meter: Meter) -> Iterator[_Links]:
    """Link images with equal features, and with a high cosine of standardized ones.

    Values that are large for all images would hide the others: different images of an untrained network have cosines of 0.999.
    """
    vectors, items = _pool(dataset), np.searchsorted(np.array(ids), np.array(dataset.image_ids()))
    if not (has_values := vectors.any(1)).all():  # Images without regions are not alike.
        vectors, items = vectors[has_values], items[has_values]
    equal = _link_equal(blake2b(vector, digest_size=16).digest() for vector in vectors)
    vectors -= (vectors.sum(0, dtype=np.float64) / max(len(vectors), 1)).astype(np.float32)
    for letters, axis in (("d", 0), ("n", 1)):  # Divide by the deviations of values, then by the norms of vectors.
        lengths = np.sqrt(np.einsum(f"nd,nd->{letters}", vectors, vectors, dtype=np.float64)).astype(np.float32)
        vectors /= np.expand_dims(np.where(lengths > 0, lengths, 1), axis)
    min_cosine = job.min_cosine or (MIN_UNTRAINED_COSINE if dataset.untrained else MIN_COSINE)
    for first, second, cosines in chain([equal], near_pairs(vectors, min_cosine, meter)):
        yield items[first], items[second], np.minimum(cosines, 1)


def _pool(dataset: Dataset) -> np.ndarray:
    """Average the crops, cells or regions of each image, float32 ``[N, D]``."""
    assert dataset.spec is not None
    pooled, done = np.empty((len(dataset), dataset.spec.shape[-1]), np.float32), 0
    columns = ["features", "num_regions"] if dataset.kind == "regions" else ["feature"]
    for features, *num_regions in (batch.columns for batch in dataset.batches(columns)):
        values = pc.list_flatten(features).to_numpy().reshape(len(features), -1, pooled.shape[1])
        counts = np.maximum(num_regions[0], 1)[:, np.newaxis] if num_regions else values.shape[1]
        np.divide(values.sum(1, dtype=np.float32), counts, out=pooled[done : done + len(values)])  # Unused rows are zero.
        done += len(values)
    if len(invalid := np.flatnonzero(~np.isfinite(pooled.sum(1)))):
        image_id = dataset.image_ids()[invalid[0]]
        raise DatasetError(f"{dataset.folder.location!r} has NaN or infinite features of {image_id!r}: extract it again")
    return pooled


def near_pairs(vectors: np.ndarray, min_cosine: float, meter: Meter = Meter()) -> Iterator[_Links]:
    """Yield the pairs of unit vectors ``[N, D]`` with at least this cosine, in parts."""
    if is_large := len(vectors) > MAX_EXACT:
        import faiss

        # An inverted file: vectors by the nearest of √N centres, of which 32 are searched.
        index: Any = faiss.index_factory(vectors.shape[1], f"IVF{math.isqrt(len(vectors))},Flat", faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        index.nprobe = _PROBES
    for start in range(0, len(vectors), _TILE):
        rows = vectors[start : start + _TILE]
        if is_large:
            limits, cosines, second = index.range_search(rows, min_cosine)
            first = np.repeat(np.arange(len(rows)), np.diff(limits.astype(np.int64)))
        else:
            tile = rows @ vectors[start:].T
            first, second = np.nonzero(tile >= min_cosine)
            cosines, second = tile[first, second], second + start
        is_new = first + start < second
        yield first[is_new] + start, second[is_new], cosines[is_new]
        meter.add(images=len(rows))


# --- captions --------------------------------------------------------------------------------------------------------


def _match_captions(captions: Sequence[Mapping[str, Any]], start: int) -> _Matches:
    """Link captions, whose positions begin with ``start``, within languages."""
    yield "text", _link_equal(((row["language"], row["text"]) for row in captions), start)
    words = ((row["language"], fold(row["text"])) for row in captions)
    yield "words", _link_equal((key if key[1] else None for key in words), start)


def fold(text: str) -> str:
    """Return the words of a text: NFKC, case folded, without punctuation or symbols.

    >>> fold("A man\u2019s  CAF\u00c9! \u2764\ufe0f") == fold("a man`s cafe\u0301")
    True
    """
    # Keycaps and variation selectors belong to the symbol before. NFKC would write a lone accent as a space and a mark.
    bare = _replace(re.sub("[\ufe00-\ufe0f\u20e3]", "", text), ("Sk",))
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", bare).casefold())
    letters = (character for character in folded if unicodedata.category(character) != "Cf")
    return " ".join(_replace(letters, ("P", "S", "Z", "C")).split())


def _replace(text: Iterable[str], categories: tuple[str, ...]) -> str:
    """Replace the characters of these Unicode categories by spaces."""
    return "".join(" " if unicodedata.category(letter).startswith(categories) else letter for letter in text)
