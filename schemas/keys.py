"""Keys of rows, and the shard that a key belongs to.

The shard is a pure function of the image id. Two datasets with the same number of shards are therefore
co-partitioned: captions and features of an image have the same shard index.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TypeAlias

from schemas.errors import InputError, UsageError
from schemas.text import LONE_CR

ShardsRequest: TypeAlias = int | str
"""A number of shards, or `AUTO`, or `LIKE` and the location of a dataset; see `schemas.writing.shard_count`."""

AUTO = "auto"
LIKE = "like:"

MAX_SHARDS = 99_999
"""The names of shards have five digits."""

CONTROLS = "\x00-\x1f\x7f-\x9f"
"""Control characters (C0, DEL and C1) as a character range of a regular expression."""
_REFUSED = re.compile(f"[{CONTROLS}\ud800-\udfff]")

# BCP 47 (RFC 5646) without extensions and grandfathered tags.
_TAG = re.compile(
    r"(?P<language>[A-Za-z]{2,3})(?:-(?P<script>[A-Za-z]{4}))?(?:-(?P<region>[A-Za-z]{2}|[0-9]{3}))?"
    r"(?P<variants>(?:-(?:[A-Za-z0-9]{5,8}|[0-9][A-Za-z0-9]{3}))*)"
)
SHARD_NAME = re.compile(r"part-\d{5}-of-(\d{5})\.parquet")
"""Names of shards; the group is the number of shards."""


@dataclass(frozen=True, order=True)
class CaptionKey:
    """Key of a caption; its order is the order of rows within a shard.

    Attributes:
        language: BCP 47 tag.
        portion: the collection that the caption belongs to, e.g. ``translation``.
        index: number of the caption among those of its image, language and portion, from 0.

    Examples:
        >>> str(imagepivot.CaptionKey("1000092795", "de", "translation", 0))
        '1000092795/de/translation/0'
    """

    image_id: str
    language: str
    portion: str
    index: int

    def __str__(self) -> str:
        return f"{self.image_id}/{self.language}/{self.portion}/{self.index}"


def check_image_id(image_id: object, *, place: str, advice: str = "take it out of the file") -> str:
    """Check an image id and return it.

    An id is a string, not empty, without control characters and surrogates. Other characters are allowed and
    unchanged: slashes, dots, spaces, any script, case, normalization form and length. Messages begin with
    ``place``, e.g. a file and a row. For a control character they end with ``advice``.

    Raises:
        InputError: it is invalid.
    """
    if not isinstance(image_id, str):
        raise InputError(f"{place}: the image id is {image_id!r}, expected a string")
    if not image_id:
        raise InputError(f"{place}: the image id is empty; every row needs the id of its image")
    if image_id.isprintable() or (match := _REFUSED.search(image_id)) is None:
        return image_id
    if match[0] >= "\ud800":
        raise InputError(
            f"{place}: the image id {image_id!r} has half a surrogate pair, {match[0]!r}, which is not a "
            "character; write the file again from the original names"
        )
    advice = LONE_CR if "\r" in image_id else advice
    raise InputError(f"{place}: the image id {image_id!r} has the control character {match[0]!r}; {advice}")


def normalization_hint(missing: Iterable[str], present: Iterable[str]) -> str:
    r"""Return a hint if ids differ only in Unicode normalization, else empty.

    >>> normalization_hint(["b", "caf\xe9"], ["cafe\u0301"]).partition(".")[0]
    "Unicode normalization differs: 'caf\\xe9' (NFC) is 'cafe\\u0301' (NFD) there"
    """
    sought = {unicodedata.normalize("NFC", image_id): image_id for image_id in missing if not image_id.isascii()}
    if not sought:
        return ""
    for other in present:
        image_id = sought.get(unicodedata.normalize("NFC", other))
        if image_id is not None and image_id != other:
            forms = f"{image_id!a} ({_form(image_id)}) is {other!a} ({_form(other)}) there"
            return (
                f"Unicode normalization differs: {forms}. Give names of files and ids of tables the same "
                "form before the datasets are made, in Python with unicodedata.normalize('NFC', image_id)"
            )
    return ""


def _form(text: str) -> str:
    return next((form for form in ("NFC", "NFD") if unicodedata.is_normalized(form, text)), "mixed")


@lru_cache(maxsize=1024)
def check_language(tag: str) -> str:
    """Check a BCP 47 tag (language, script, region, variants); return its usual case.

    >>> check_language("pt-br")
    'pt-BR'

    Raises:
        UsageError: it is not well-formed.
    """
    match = _TAG.fullmatch(tag)
    variants = match["variants"].lower().split("-")[1:] if match else []
    if match is None or len(set(variants)) < len(variants):
        raise UsageError(f"{tag!r} is not a language tag: use a BCP 47 tag such as 'en' or 'pt-BR'")
    parts = [match["language"].lower(), (match["script"] or "").title(), (match["region"] or "").upper(), *variants]
    return "-".join(part for part in parts if part)


def check_shards_request(shards: ShardsRequest) -> None:
    """Check a request for shards without reading any folder.

    Raises:
        UsageError: it is neither a number from 1 to 99,999, nor ``auto``, nor ``like:`` and a location.
    """
    if isinstance(shards, int):
        if not 1 <= shards <= MAX_SHARDS:
            raise UsageError(f"--shards is {shards!r}, expected 1 to {MAX_SHARDS:,}")
    elif shards != AUTO and not (shards.startswith(LIKE) and shards != LIKE):
        hint = f": did you mean {AUTO!r}?" if get_close_matches(shards.lower(), [AUTO]) else ""
        raise UsageError(
            f"--shards is {shards!r}, expected a number such as 64, {AUTO!r}, or '{LIKE}DATASET' with the folder of one{hint}"
        )


def shard_of(image_id: str, shards: int) -> int:
    """Return the shard of an image: its BLAKE2b-512 digest, big-endian, modulo shards."""
    return int.from_bytes(hashlib.blake2b(image_id.encode()).digest(), "big") % shards


def shard_name(shard: int, shards: int) -> str:
    """Return the file name of a shard, e.g. ``part-00003-of-00064.parquet``."""
    return f"part-{shard:05d}-of-{shards:05d}.parquet"
