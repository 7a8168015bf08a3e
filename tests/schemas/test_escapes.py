import json
import unicodedata

import pytest

from schemas.errors import InputError
from schemas.escapes import escape_text, redact, redact_address, to_json

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("'s3://AKIA:wJal%2Fr@bucket/x' and 's3://B:c@d'", "'s3://***@bucket/x' and 's3://***@d'"),
        ("s3://AKIA:wJ/al/r@bucket/x", "s3://***@bucket/x"),
        ("s3://AKIA:12/al/r@bucket/x", "s3://***@bucket/x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("cannot parse 's3://AKIA:wJ' at 13", "cannot parse 's3://***' at 13"),
        ("http://[::1]:80/@me/a.jpg and https://h:80?m=a@b", "http://[::1]:80/@me/a.jpg and https://h:80?m=a@b"),
        ("http://u:p@host/w.pth?Signature=12ab&sig=9%3D, check", "http://***@host/w.pth?Signature=***&sig=***, check"),
        ("http://me@corp.com:pw@h", "http://***@h"),
        ("http://u:p@s/s@h:80/x", "http://***@h:80/x"),
        ("https://token@h/a", "https://***@h/a"),
        ("https://archive/http://u:p@h/x", "https://***@h/x"),
        ("url: /a?x=1&api_key=12ab#access_token=34", "url: /a?x=1&api_key=***#access_token=***"),
        ("write to anna@example.org: is a=b? 1:2@3", "write to anna@example.org: is a=b? 1:2@3"),
    ],
)
def test_passwords_leave_messages(text, expected):
    assert redact(text) == expected
    assert redact(expected) == expected
    assert escape_text(text) == expected
    assert str(InputError(text)) == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("photos/a b@c?sig=1", "photos/a b@c?sig=1"),
        ("https://host/get?key=a.jpg&id=2", "https://host/get?key=a.jpg&id=2"),
        ("http://u:p w'@host/a.jpg", "http://***@host/a.jpg"),
        (
            "https://b/a?X-Amz-Date=1&X-Amz-Credential=2&X-Amz-Signature=3",
            "https://b/a?X-Amz-Date=***&X-Amz-Credential=***&X-Amz-Signature=***",
        ),
        ("https://b/a?X-Goog-Signature=3&alt=media", "https://b/a?X-Goog-Signature=***&alt=media"),
        ("https://b/a?Expires=1&Signature=2,3&Key-Pair-Id=4", "https://b/a?Expires=***&Signature=***&Key-Pair-Id=***"),
        ("https://b/a?sv=2024&se=1&sig=2", "https://b/a?sv=2024&se=***&sig=***"),
        ("https://b/a?se=1&st=2&token=3#p", "https://b/a?se=1&st=2&token=***#p"),
    ],
)
def test_addresses_are_stored_without_password_and_signature(address, expected):
    assert redact_address(address) == expected
    assert redact_address(expected) == expected


def test_passwords_are_found_in_linear_time():
    for text in ("http://u:p@", "://", "http://h ", "?a=", "sig", "s3://a:"):
        redact("?" + text * 60_000)
        redact_address(f"https://?{text * 60_000}")
