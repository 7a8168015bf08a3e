import json
import unicodedata

import pytest

from schemas.errors import DatasetError, ImagepivotError, InputError
from schemas.escapes import escape_text, to_json

BIDIRECTIONAL = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
# The basic plane and its neighbours; downwards, since halves of surrogate pairs must not form pairs.
EVERY = "".join(map(chr, range(0x1FFFF, -1, -1)))


def is_unsafe(character: str) -> bool:
    """Return whether a character commands a terminal or reorders text, by the Unicode database."""
    unsafe = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    return unsafe or unicodedata.bidirectional(character) in BIDIRECTIONAL


def test_escape_text_escapes_exactly_the_unsafe_characters():
    changed = {character for character in EVERY if escape_text(character) != character}
    assert changed == {character for character in EVERY if is_unsafe(character)}
    assert len(changed) == 65 + 2 + 9 + 2048


def test_escape_text_writes_escapes_as_python_does():
    text = "esc \x1b[31mred\x07 line\rover \n\t\x7f\x9b \u202enp.exe \ud800 é 猫 \\x1b"
    expected = r"esc \x1b[31mred\x07 line\rover \n\t\x7f\x9b \u202enp.exe \ud800 é 猫 \x1b"
    assert escape_text(text) == expected
    assert escape_text(text, lines=True) == expected.replace(r"\n", "\n")
    assert escape_text(expected) == expected


def test_to_json_is_safe_and_parses_to_the_value():
    value = {EVERY: [EVERY, {"a": 1.5, "b": None}]}
    for indent in (None, 2):
        text = to_json(value, indent=indent)
        assert [character for character in text.replace("\n", "") if is_unsafe(character)] == []
        assert json.loads(text) == value
    assert to_json({"é": "猫"}) == '{"é": "猫"}'
    assert to_json(["é\x7f"], ensure_ascii=True) == r'["\u00e9\u007f"]'


@pytest.mark.parametrize("error", [ImagepivotError, InputError, DatasetError])
def test_messages_of_errors_hold_no_control_character(error):
    assert str(error("a\x1b[31m.txt\u202e\nb: 猫")) == "a\\x1b[31m.txt\\u202e\nb: 猫"
