r"""Displayed text: escapes for control characters, hidden passwords, counts, names.

Ids, captions, tokens and file names are untrusted. Text that is printed, logged, raised or drawn passes through `escape_text`. JSON
passes through `to_json` and its JSON escapes: parsed values equal the data. Addresses are stored as `redact_address` returns them.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

# C1, line and paragraph separators, embeddings, overrides and isolates of directions (UAX #9), halves of surrogate pairs.
_BEYOND_ASCII = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]")
_UNSAFE_IN_LINES = re.compile(f"[\x00-\x09\x0b-\x1f{_BEYOND_ASCII}]")
_UNSAFE_IN_JSON = re.compile(f"[{_BEYOND_ASCII}]")

_AFTER_SCHEME = re.compile(r"(?<=://)[^\s'\"]+")  # `_hide_user` finds the user in it: a pattern would need quadratic time.
_HOST_AND_PORT = re.compile(r"(\[[^\]]*\]|[^:@\[]*)(:\d*)?")
_SECRET = re.compile(
    r"(?i)(?<=[?&#])(?=[\w.-]*(?:sig|token|key|secret|passw|pwd|auth|cred|policy)|x-(?:amz|goog)-)([\w.-]+)=[^&\s'\"#,)]+"
)
_SIGNATURE = re.compile(  # Azure's start and end, `st` and `se`, count before its `sig`.
    r"(?i)(?<=[?&#])(?=x-(?:amz|goog)-|[\w.-]*(?:signature|token)=|(?:sig|expires|policy|key-pair-id|googleaccessid|awsaccesskeyid)="
    r"|sk?[te]=[^#]{0,999}&sig=)([\w.-]+)=[^&#]+"
)


def escape_text(text: str, *, lines: bool = False) -> str:
    r"""Escape control and directional characters as Python does; `redact` addresses.

    >>> print(escape_text("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec

    Joiners, variation selectors and left-to-right and right-to-left marks stay; ``lines`` keeps line feeds.
    """
    text = redact(text)
    if text.isprintable():
        return text
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(lambda match: repr(match[0])[1:-1], text)


def redact(text: str) -> str:
    """Replace users, passwords, keys and signatures of addresses in a text by ``***``.

    >>> redact("s3://AKIA:wJalr@bucket/x and https://host/w.pth?size=2&X-Amz-Signature=12ab")
    's3://***@bucket/x and https://host/w.pth?size=2&X-Amz-Signature=***'
    """
    text = _AFTER_SCHEME.sub(_hide_user, text) if "://" in text else text
    return _SECRET.sub(r"\1=***", text) if "=" in text else text


def redact_address(address: str) -> str:
    """Return an address as datasets store it: without user, password and signature.

    Equal for all signatures of one address, so that a new signature is no change. Other values of a query stay.

    >>> redact_address("https://me:pw@host/get?key=a.jpg&sig=12ab")
    'https://***@host/get?key=a.jpg&sig=***'
    """
    scheme, mark, rest = address.partition("://")
    if not mark or not ("@" in rest or "=" in rest):  # Most of millions of addresses.
        return address
    return scheme + mark + _SIGNATURE.sub(r"\1=***", _without_user(rest, scheme))


def _hide_user(match: re.Match[str]) -> str:
    text, rest, start = match.string, match[0], match.start()
    scheme = text[max(0, start - 5) : start - 3]
    if scheme == "s3" and "@" not in rest and ":" in rest.partition("/")[0] and text.startswith(("'", '"'), match.end()):
        return "***"  # Errors may quote half an address.
    return _without_user(rest, scheme)


def _without_user(rest: str, scheme: str) -> str:
    """Replace user and password up to the last ``@``, also of an inner address."""
    if "@" not in rest:
        return rest
    hosts = [re.split("[/?#]", part, maxsplit=1)[0] for part in rest.split("://")]
    if any(":" in host and (scheme == "s3" or not _HOST_AND_PORT.fullmatch(host)) for host in hosts):
        return f"***@{rest.rpartition('@')[2]}"
    return f"***{rest[hosts[0].rindex('@') :]}" if "@" in hosts[0] else rest


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON that is safe to print, with options of `json.dumps`."""
    text = json.dumps(value, **{"ensure_ascii": False, **options})
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def short_names(locations: Sequence[str]) -> list[str]:
    """Return the last components of locations, as many as distinguish them."""
    parts = [location.rstrip("/").split("/") for location in locations]
    tails = (["/".join(part[-count:]) for part in parts] for count in range(1, max(map(len, parts)) + 1))
    return next(names for names in tails if len(set(names)) == len(set(map(tuple, parts))))


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "image"), counted(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
