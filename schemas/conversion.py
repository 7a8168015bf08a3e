"""Conversion of what users write on a command line or into a file: settings, and names that are not quite right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

from schemas.errors import UsageError

__all__ = ["did_you_mean", "key_value_pairs"]


def key_value_pairs(settings: Sequence[str], example: str) -> dict[str, str]:
    """Split settings of the form ``KEY=VALUE``.

    Args:
        settings: the values of the option ``--set``.
        example: one for the message.

    Raises:
        UsageError: a setting has another form.
    """
    pairs = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {setting!r} is not KEY=VALUE, e.g. --set {example}")
        pairs[key.strip()] = value.strip()
    return pairs


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message about a name that is unknown: the one that is most like it, or all that there are."""
    matches = get_close_matches(name, known, n=1)
    return f": did you mean {matches[0]!r}?" if matches else f": there are {', '.join(map(repr, known))}"
