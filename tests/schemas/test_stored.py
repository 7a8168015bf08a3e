from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from schemas.errors import DatasetError
from schemas.stored import stored_values


@dataclass
class Example:
    text: str
    number: int = 0
    flag: bool = False
    maybe: int | None = None
    names: tuple[str, ...] = ()
    few: tuple[int, ...] | None = None
    counts: Mapping[str, int] | None = None
    anything: Any = None


def test_values_of_the_right_types():
    stored = {
        "text": "a",
        "number": 3,
        "flag": True,
        "maybe": None,
        "names": ["a"],
        "few": [1],
        "counts": {"a": 1},
        "anything": [7],
    }
    values = stored_values(Example, {**stored, "other": 1})
    assert values == {**stored, "names": ("a",), "few": (1,), "anything": (7,)}
    assert Example(**values).names == ("a",)


def test_fields_may_be_missing_or_left_out():
    assert stored_values(Example, {}) == {}
    assert stored_values(Example, {"text": 7, "number": 1}, but=("text",)) == {"number": 1}


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        ([], r"it holds \[\], expected an object"),
        (None, "it holds None, expected an object"),
        ({"text": None}, "text is None, expected text"),
        ({"text": b"a"}, "text is b'a', expected text"),
        ({"number": True}, "number is True, expected a whole number"),
        ({"number": 1.0}, "number is 1.0, expected a whole number"),
        ({"flag": 1}, "flag is 1, expected true or false"),
        ({"maybe": "1"}, "maybe is '1', expected a whole number or null"),
        ({"names": "abc"}, "names is 'abc', expected a list, each text"),
        ({"names": [1]}, r"names is \[1\], expected a list, each text"),
        ({"few": [True]}, r"few is \[True\], expected a list, each a whole number or null"),
        ({"counts": [["a", 1]]}, "counts is .*, expected an object, each value a whole number or null"),
        ({"text": [["x" * 999]]}, r"text is \[\['x+\.\.\., expected text$"),
    ],
)
def test_values_of_other_types(stored, problem):
    with pytest.raises(DatasetError, match=rf"^{problem}"):
        stored_values(Example, stored)
