r"""Displayed text: escapes for control characters and directions, counts.

Ids, captions, tokens and file names are untrusted. Text that is printed, logged, raised or drawn passes through `escape_text`. JSON
passes through `to_json` and its JSON escapes: parsed values equal the data.
"""

from __future__ import annotations

import json
import re
from typing import Any

# C1, line and paragraph separators, embeddings, overrides and isolates of directions (UAX #9), halves of surrogate pairs.
_BEYOND_ASCII = "\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_UNSAFE = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]")
_UNSAFE_IN_LINES = re.compile(f"[\x00-\x09\x0b-\x1f{_BEYOND_ASCII}]")
_UNSAFE_IN_JSON = re.compile(f"[{_BEYOND_ASCII}]")


def escape_text(text: str, *, lines: bool = False) -> str:
    r"""Escape control characters and directional overrides as Python does.

    >>> print(escape_text("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec

    Joiners, variation selectors and left-to-right and right-to-left marks stay; ``lines`` keeps line feeds.
    """
    if text.isprintable():
        return text
    return (_UNSAFE_IN_LINES if lines else _UNSAFE).sub(lambda match: repr(match[0])[1:-1], text)


def to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON that is safe to print, with options of `json.dumps`."""
    text = json.dumps(value, **{"ensure_ascii": False, **options})
    return _UNSAFE_IN_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun.

    >>> counted(1, "image"), counted(1200, "image")
    ('1 image', '1,200 images')
    """
    return f"{count:,} {noun}{'s' * (count != 1)}"
