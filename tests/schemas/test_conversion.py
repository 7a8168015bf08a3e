"""Conversion of plain values by annotations: what becomes of each, and what is refused with which words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from schemas.conversion import convert, convert_text, stored_values
from schemas.errors import DatasetError, InputError, UsageError


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True)
class Example:
    text: str
    number: int = 0
    names: tuple[str, ...] = ()
    inner: Annotated[Inner, "a mark"] = field(default_factory=Inner)
    maybe: Annotated[int | None, "a mark"] = None


@pytest.mark.parametrize(
    ("value", "hint", "converted"),
    [
        ("a", str, "a"),
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        (True, bool, True),
        (None, int | None, None),
        ([7, {"a": None}], Any, [7, {"a": None}]),
        ("b", Literal["a", "b"], "b"),
        (("a",), list[str], ["a"]),
        ([1, 2], tuple[int, float], (1, 2.0)),
        ([[1], []], tuple[tuple[int, ...], ...], ((1,), ())),
        ({"a": [1]}, Mapping[str, tuple[int, ...]], {"a": (1,)}),
        (["a"], str | tuple[str, ...], ("a",)),
        ({"text": "a", "names": ["b"], "inner": {"rate": 2}}, Example, Example("a", names=("b",), inner=Inner(2.0))),
    ],
)
def test_values_of_the_right_types(value, hint, converted):
    result = convert(value, hint, "key")
    assert result == converted
    assert type(result) is type(converted)
    assert repr(result) == repr(converted)


PROBLEMS = [
    (3, str, "key is 3", "text", "text in quotes"),
    (True, int, "key is True", "a whole number", "a whole number, written 20"),
    (1.0, int, "key is 1.0", "a whole number", "a whole number, written 20"),
    ("1", float, "key is '1'", "a number", "a number, written 0.05 or 2e-4"),
    ("1", int | None, "key is '1'", "a whole number or null", "a whole number, written 20"),
    (3, str | list[str] | dict[str, str], "key is 3", "text, a list or an object", "text in quotes, a list or a table"),
    (True, Literal[1], "key is True", "one of 1", "one of 1"),
    (["a", 1], tuple[str, ...], "key[1] is 1", "text", "text in quotes"),
    ({"a": [True]}, Mapping[str, tuple[int, ...]], "key.a[0] is True", "a whole number", "a whole number, written 20"),
]


@pytest.mark.parametrize(("value", "hint", "problem", "stored", "written"), PROBLEMS)
def test_values_of_other_types(value, hint, problem, stored, written):
    for error, expected in ((DatasetError, stored), (UsageError, written)):
        with pytest.raises(error, match=f"^{re.escape(f'{problem}, expected {expected}')}$"):
            convert(value, hint, "key", error=error)


@pytest.mark.parametrize(
    ("value", "hint", "problem"),
    [
        (float("inf"), float, "key is inf, expected a finite number"),
        (10**400, float, "key is beyond 64 bits, expected at most 9,223,372,036,854,775,807"),
        ([1, -(2**63)], tuple[int, ...], "key[1] is beyond 64 bits, expected at most 9,223,372,036,854,775,807"),
        ([0.9], tuple[float, float], "key has 1 values, expected 2"),
        ("finetund", Literal["finetuned"], "key is 'finetund', expected one of 'finetuned': did you mean 'finetuned'?"),
        ({}, Example, "key.text is missing"),
        ({"text": "a", "numbr": 1}, Example, "unknown key key.numbr: did you mean 'key.number'?"),
    ],
)
def test_keys_and_lengths(value, hint, problem):
    with pytest.raises(InputError, match=f"^{re.escape(problem)}$"):
        convert(value, hint, "key", error=InputError)


def test_stored_fields_may_be_missing_unknown_or_left_out():
    assert stored_values(Example, {}) == {}
    assert stored_values(Example, {"other": 1, "names": ["a"]}) == {"names": ("a",)}
    assert stored_values(Example, {"text": 7, "number": 1}, but=("text",)) == {"number": 1}
    with pytest.raises(DatasetError, match=r"^it is \[\], expected an object$"):
        stored_values(Example, [])
    with pytest.raises(DatasetError, match=r"^names\[0\] is 1, expected text$"):
        stored_values(Example, {"names": [1]})


# --- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        (" -7 ", int, -7),
        ("2e-4", float, 2e-4),
        ("7", int | str, 7),
        ("auto", int | str, "auto"),
        ("7", int | None, 7),
        ("Yes", bool, True),
        ("0", bool, False),
        ("b", Literal["a", "b"], "b"),
        (" en , de ,", tuple[str, ...], ("en", "de")),
        ("image_id=img, text= a=b ,", Mapping[str, str], {"image_id": "img", "text": " a=b "}),
    ],
)
def test_text_becomes_a_value_of_the_type(text, hint, value):
    found = convert_text(text, hint)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "hint", "message"),
    [
        ("7.5", int, "--x is '7.5', expected a whole number, written 20"),
        ("much", float, "--x is 'much', expected a number"),
        ("maybe", bool, "--x is 'maybe', expected true or false"),
        ("A", Literal["a", "b"], "--x is 'A', expected one of 'a', 'b': did you mean 'a'?"),
        ("text", Mapping[str, str], "--x has 'text', expected OURS=THEIRS with commas between"),
        ("text=a,text=b", Mapping[str, str], "--x names 'text' twice: keep one"),
    ],
)
def test_text_of_another_type_is_refused(text, hint, message):
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        convert_text(text, hint, "--x")
