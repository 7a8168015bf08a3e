"""Checks of single values in the sections of a configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from schemas.errors import UsageError


def require(condition: bool, message: str) -> None:
    """Raise a `UsageError` where a condition does not hold."""
    if not condition:
        raise UsageError(message)


def one_of(section: str, values: Any, key: str, choices: Sequence[str]) -> None:
    """Check that a value is one of a few; arguments and errors as those of `positive`, and the choices."""
    value = getattr(values, key)
    require(value in choices, f"{section}.{key} is {value!r}, expected one of {', '.join(map(repr, choices))}")


def positive(section: str, values: Any, *keys: str) -> None:
    """Check that values are finite and more than 0.

    Args:
        section: name of the section, for messages.
        values: the section.
        keys: names of the values.

    Raises:
        UsageError: one is not.
    """
    for key in keys:
        value = getattr(values, key)
        require(0 < value < math.inf, f"{section}.{key} is {value}, expected more than 0")


def not_negative(section: str, values: Any, *keys: str) -> None:
    """Check that values are finite and not less than 0; arguments and errors as those of `positive`."""
    for key in keys:
        value = getattr(values, key)
        require(0 <= value < math.inf, f"{section}.{key} is {value}, expected 0 or more")
