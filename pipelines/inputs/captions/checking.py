"""Whole columns of a table of captions: each function does to all values what `pipelines.inputs.captions.base` does to one.

None stands for a column with a value out of the ordinary, which may be an error: its rows are then to be looked at one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.inputs.tables import Column
from schemas.errors import InputError, UsageError
from schemas.keys import CONTROLS

_NO_ID = f"^$|[{CONTROLS}]"


def texts(column: Column, *, nullable: bool = False) -> pa.Array | None:
    """Return the strings of a column; None if a value is no string, has half a surrogate pair, or is missing and must not be."""
    if isinstance(column, pa.Array):
        return None if column.null_count and not nullable else _strings(column)
    if set(map(type, column)) - ({str, type(None)} if nullable else {str}):
        return None
    try:
        return pa.array(column, pa.string())
    except (UnicodeEncodeError, pa.ArrowException):
        return None


def _strings(column: pa.Array) -> pa.Array | None:
    dtype = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        return None
    try:
        strings = column.cast(pa.string())
        strings.validate(full=True)  # Parquet may hold strings that are not UTF-8.
    except pa.ArrowException:
        return None
    return strings


def image_ids(column: Column) -> pa.Array | None:
    """Return image ids, which may be integers; None if one is missing, empty or has a control character."""
    if isinstance(column, pa.Array):
        column = column.cast(pa.string()) if pa.types.is_integer(column.type) else column
    elif set(map(type, column)) == {int}:
        column = list(map(str, column))
    ids = texts(column)
    return None if ids is None or pc.any(pc.match_substring_regex(ids, _NO_ID)).as_py() else ids


def labels(column: Column, check: Callable[[str], str]) -> pa.Array | None:
    """Return languages, portions or splits.

    Args:
        column: the values as read.
        check: returns a value in its usual form; called once for each that differs.

    Returns:
        The values in their usual form; None if one is missing or refused.
    """
    values = texts(column)
    if values is None:
        return None
    encoded = values.dictionary_encode()
    try:
        checked = [check(value) for value in encoded.dictionary.to_pylist()]
    except (InputError, UsageError):
        return None
    return pa.array(checked, pa.string()).take(encoded.indices)


def indices(column: Column, greatest: int) -> pa.Array | None:
    """Return indices as int16; None if one is missing, no integer, or not from 0 to `greatest`. Text has them in digits."""
    values: Sequence[Any] | pa.Array = column
    if isinstance(column, pa.Array):
        if column.null_count or not pa.types.is_integer(column.type):
            return None
    elif set(map(type, column)) == {str}:
        digits = texts(column)
        if digits is None or not pc.all(pc.match_substring_regex(digits, r"^[0-9]{1,9}$")).as_py():
            return None
        values = digits.cast(pa.int64())
    elif set(map(type, column)) != {int}:
        return None
    try:
        numbers = values if isinstance(values, pa.Array) else pa.array(values, pa.int64())
        if len(numbers) and not 0 <= np.min(numbers.to_numpy()) <= np.max(numbers.to_numpy()) <= greatest:
            return None
        return numbers.cast(pa.int16())
    except (OverflowError, pa.ArrowException):
        return None
