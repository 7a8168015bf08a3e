import hashlib

import pytest

from schemas.errors import InputError, UsageError
from schemas.keys import MAX_SHARDS, CaptionKey, check_image_id, check_language, normalization_hint, shard_name, shard_of


@pytest.mark.parametrize("shards", [1, 2, 3, 16, 64, 1000, MAX_SHARDS])
@pytest.mark.parametrize("image_id", ["", "0", "1000092795", "scene-00007", "bild-ä", "猫", "a b/c", "x" * 500])
def test_shard_is_the_digest_modulo_the_number_of_shards(image_id, shards):
    assert shard_of(image_id, shards) == int(hashlib.blake2b(image_id.encode()).hexdigest(), 16) % shards


@pytest.mark.parametrize(
    ("image_id", "shards", "expected"),
    # Computed with coreutils: printf scene-00007 | b2sum
    [("scene-00007", 64, 15), ("猫-ä", 64, 34), ("猫-ä", 1000, 274)],
)
def test_shards_never_change(image_id, shards, expected):
    assert shard_of(image_id, shards) == expected


def test_shard_names_sort_by_number():
    assert shard_name(3, 64) == "part-00003-of-00064.parquet"
    assert shard_name(99_998, MAX_SHARDS) == "part-99998-of-99999.parquet"
    names = [shard_name(number, 12_345) for number in (0, 9, 10, 99, 100, 12_344)]
    assert names == sorted(names)


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
        (None, "here: the image id is None, expected a string"),
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
        (["cafe\u0301"], ["caf\u00e9"], r"'cafe\u0301' (NFD) is 'caf\xe9' (NFC) there"),
        (["\ud55c"], ["\u1112\u1161\u11ab"], r"'\ud55c' (NFC) is '\u1112\u1161\u11ab' (NFD) there"),
        (["\u00e9e\u0301"], ["\u00e9\u00e9"], r"'\xe9e\u0301' (mixed) is '\xe9\xe9' (NFC) there"),
    ],
)
def test_normalization_hint_names_both_forms(missing, present, words):
    assert normalization_hint(missing, present).startswith(f"Unicode normalization differs: {words}. Give ")


@pytest.mark.parametrize(
    ("missing", "present"),
    [([], ["a"]), (["a"], ["b", "caf\u00e9"]), (["caf\u00e9"], ["cafe", "Caf\u00e9", "caf\u00e8"]), (["caf\u00e9"], [])],
)
def test_normalization_hint_is_empty_for_other_ids(missing, present):
    assert normalization_hint(missing, present) == ""


def test_caption_keys_sort_by_image_language_portion_index():
    keys = [CaptionKey("a", "de", "x", 3), CaptionKey("a", "en", "x", 2), CaptionKey("a", "en", "x", 10)]
    assert sorted(keys, reverse=True) == keys[::-1]
    assert str(keys[2]) == "a/en/x/10"


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("en", "en"),
        ("EN", "en"),
        ("gsw", "gsw"),
        ("pt-br", "pt-BR"),
        ("zh-hant-tw", "zh-Hant-TW"),
        ("es-419", "es-419"),
        ("sl-rozaj-1994", "sl-rozaj-1994"),
        ("DE-ch-1901", "de-CH-1901"),
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
