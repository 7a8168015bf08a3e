import pytest

from schemas.errors import InputError, UsageError
from schemas.keys import CaptionKey, check_image_id, check_language, normalization_hint, shard_of


@pytest.mark.parametrize(
    ("image_id", "shards", "expected"),
    # Computed with coreutils: printf scene-00007 | b2sum
    [("scene-00007", 64, 15), ("猫-ä", 64, 34), ("猫-ä", 1000, 274)],
)
def test_shards_never_change(image_id, shards, expected):
    assert shard_of(image_id, shards) == expected


OTHER_IDS = (
    *("a", "train2014/a.b", "../a", "/", ".", " a ", "A", "猫", "=1+1", 'a"b,c;d|e\\', "x" * 10_000, "caf\u00e9", "cafe\u0301"),
    *("\u00a0", "\U0001f600", "\u202e", "a\u2028b\u2029", "\ufeff", "\ue000", "\U0010ffff"),
)


@pytest.mark.parametrize("image_id", OTHER_IDS)
def test_check_image_id_returns_any_other_text_unchanged(image_id):
    assert check_image_id(image_id, place="here") == image_id


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0)])
def test_check_image_id_refuses_each_control_character(code):
    control = repr(chr(code)).replace("\\", r"\\")
    with pytest.raises(
        InputError, match=f"here: the image id .* has the control character {control}; (take it out|if lines end)"
    ):
        check_image_id(f"a{chr(code)}b", place="here")


@pytest.mark.parametrize(
    ("image_id", "message"),
    [
        ("", "here: the image id is empty"),
        (7, "here: the image id is 7, expected a string"),
        ("a\ud800", r"here: the image id 'a\\ud800' has half a surrogate pair, '\\ud800', which is not a character"),
        ("\udfff", "half a surrogate pair"),
        ("a.jpg\r", r"here: the image id 'a.jpg\\r' has the control character '\\r'; if lines end in CR alone, as on old Macs"),
    ],
)
def test_check_image_id_refuses(image_id, message):
    with pytest.raises(InputError, match=message):
        check_image_id(image_id, place="here")


@pytest.mark.parametrize(
    ("missing", "present", "words"),
    [
        (["x", "caf\u00e9"], ["y", "cafe\u0301"], r"'caf\xe9' (NFC) is 'cafe\u0301' (NFD) there"),
        (["\u00e9e\u0301"], ["\u00e9\u00e9"], r"'\xe9e\u0301' (mixed) is '\xe9\xe9' (NFC) there"),
    ],
)
def test_normalization_hint_names_both_forms(missing, present, words):
    assert normalization_hint(missing, present).startswith(f"Unicode normalization differs: {words}. Give ")


def test_caption_keys_sort_by_image_language_portion_index():
    keys = [CaptionKey("a", "de", "x", 3), CaptionKey("a", "en", "x", 2), CaptionKey("a", "en", "x", 10)]
    assert sorted(keys, reverse=True) == keys[::-1]
    assert str(keys[2]) == "a/en/x/10"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("EN", "en"),
        ("gsw", "gsw"),
        ("zh-hant-tw", "zh-Hant-TW"),
        ("es-419", "es-419"),
        ("DE-ch-1901-rozaj", "de-CH-1901-rozaj"),
    ],
)
def test_language_tags_get_their_usual_case(tag, expected):
    assert check_language(tag) == expected


@pytest.mark.parametrize(
    "tag", ["", "e", "english", "en_US", "en-", "-en", "en--US", "e1", "de-1996-1996", "en\n", "en/de", "дe"]
)
def test_other_language_tags_are_refused(tag):
    with pytest.raises(UsageError, match="is not a language tag: use a BCP 47 tag such as 'en' or 'pt-BR'"):
        check_language(tag)
