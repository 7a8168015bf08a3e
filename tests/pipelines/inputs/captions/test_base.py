"""The basis of all readers of captions: selection, language tags, columns, opening by format."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from pipelines.inputs.captions import EVERYTHING, Part, Selection, open_source
from pipelines.inputs.captions.base import Tally, check_text, require_selected
from pipelines.inputs.ids import image_id_of
from schemas.errors import InputError, UsageError
from schemas.keys import check_language


@pytest.mark.parametrize(
    ("tag", "canonical"),
    [
        ("en", "en"),
        ("EN", "en"),
        ("ast", "ast"),
        ("pt-br", "pt-BR"),
        ("ZH-hans-cn", "zh-Hans-CN"),
        ("es-419", "es-419"),
        ("de-CH-1901", "de-CH-1901"),
        ("sl-ROZAJ-biske", "sl-rozaj-biske"),
        ("sr-latn", "sr-Latn"),
    ],
)
def test_check_language_gives_the_usual_case(tag, canonical):
    assert check_language(tag) == canonical


@pytest.mark.parametrize(
    "tag", ["english", "xx_YY", "", "e", "en-", "-en", "en--US", " en", "en\n", "én", "en-US-GB", "de-1901-1901", "e1", "x-en"]
)
def test_check_language_refuses(tag):
    with pytest.raises(
        UsageError, match=rf"{re.escape(repr(tag))} is not a language tag: use a BCP 47 tag such as 'en' or 'pt-BR'"
    ):
        check_language(tag)


def test_selection_brings_languages_to_their_usual_case():
    selection = Selection(languages=("PT-br",), splits=("train",))
    assert selection.languages == ("pt-BR",)
    assert selection.takes("pt-BR", "comparable", "train")
    assert not selection.takes("pt-PT", "comparable", "train")
    assert not selection.takes("pt-BR", "comparable", "val")
    assert EVERYTHING.takes("xx", "anything", "at all")
    with pytest.raises(UsageError, match="'german'"):
        Selection(languages=("german",))


KINDS = [("en", "translation", "train"), ("cs", "translation", "train"), ("en", "comparable", "val")]


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(languages=("en", "it")), r"no captions in language 'it' in 'here': there are cs, en; change the selection"),
        (Selection(portions=("task1",)), r"no captions of portion 'task1' in 'here': there are comparable, translation"),
        (Selection(splits=("test",)), r"no captions of split 'test' in 'here': there are train, val"),
        (
            Selection(languages=("en", "cs"), portions=("comparable",)),
            r"no captions in language 'cs' of portion comparable in 'here': there are en",
        ),
        (
            Selection(portions=("comparable",), splits=("train", "val")),
            r"no captions of split 'train' of portion comparable in 'here': there are val",
        ),
    ],
)
def test_require_selected_names_what_there_is(selection, message):
    with pytest.raises(InputError, match=message):
        require_selected(selection, KINDS, location="here")


def test_require_selected_accepts_what_is_there():
    assert require_selected(EVERYTHING, [], location="here") is None
    every = Selection(("en", "cs"), ("translation", "comparable"), ("train", "val"))
    assert require_selected(every, KINDS, location="here") is None


def test_tally_is_bounded():
    tally = Tally("here")
    for number in range(10_000):
        tally.add(("en", "comparable", str(number)))
    tally.add(("en", "comparable", "0"))
    with pytest.raises(InputError, match=r"'here' has more than 10000 combinations .* wrong column"):
        tally.add(("en", "comparable", "one more"))


@pytest.mark.parametrize(
    ("file_name", "image_id"),
    [
        ("1000092795.jpg", "1000092795"),
        ("COCO_val2014_000000398076.jpg", "COCO_val2014_000000398076"),
        ("val2014/a.b.jpeg", "a.b"),
        ("no_extension", "no_extension"),
        (".jpg", ".jpg"),
        ("é ü.png", "é ü"),
    ],
)
def test_image_id_of(file_name, image_id):
    assert image_id_of(file_name, place="here") == image_id


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "here: the image id is empty"),
        ("folder/", "here: the image id is empty"),
        (None, "here: the image id is None, expected a string"),
        (7, "here: the image id is 7, expected a string"),
        ("a\tb", r"here: the image id 'a\\tb' has the control character '\\t'; take it out"),
        ("a.jpg\r", r"if lines end in CR alone, as on old Macs, convert the file: tr '\\r' '\\n' < OLD > NEW"),
        ("a\u0085b", r"control character '\\x85'"),
        ("a\ud800", r"half a surrogate pair, '\\ud800'"),
    ],
)
def test_image_id_of_refuses(value, message):
    with pytest.raises(InputError, match=message):
        image_id_of(value, place="here")


def test_checks_let_unusual_values_through():
    assert check_text("", place="here") == ""
    assert check_text("\ufeff a\r\n\u2028 ", place="here") == "\ufeff a\r\n\u2028 "


@pytest.mark.parametrize("value", [None, 3, ["a"]])
def test_check_text_refuses_what_is_no_string(value):
    with pytest.raises(InputError, match=r"here: the text of the caption is .*, expected a string"):
        check_text(value, place="here")


@pytest.mark.parametrize(
    ("format_", "arguments", "error", "message"),
    [
        ("flickr", {}, UsageError, r"unknown format of captions 'flickr': use one of multi30k, karpathy, coco, scan, table"),
        ("table", {"columns": {"caption": "a"}}, UsageError, r"unknown column 'caption': ours are image_id, text, language, "),
        ("coco", {"columns": {"text": "a"}}, UsageError, r"only a 'table' has columns"),
        ("table", {"columns": {"caption": "a"}}, UsageError, r"unknown column 'caption'"),
        ("karpathy", {"language": "english"}, UsageError, r"'english' is not a language tag"),
        ("multi30k", {"language": "de"}, UsageError, r"its file names say the languages"),
    ],
)
def test_open_source_refuses(tmp_path, format_, arguments, error, message):
    with pytest.raises(error, match=message):
        open_source(format_, tmp_path, **arguments)


@pytest.mark.parametrize("format_", ["multi30k", "karpathy", "coco", "scan", "table"])
def test_open_source_of_nothing(tmp_path, format_):
    with pytest.raises(InputError, match=r"the source '.*/nothing.csv' does not exist: check the path"):
        open_source(format_, tmp_path / "nothing.csv")


def test_open_source_refuses_a_location_that_cannot_be():
    with pytest.raises(UsageError, match=r"cannot understand the location 'nonsense://a'"):
        open_source("table", "nonsense://a")


def test_a_relative_path_means_the_same_everywhere(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("image_id,text\n1,one\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    source = open_source("table", "a.csv")
    monkeypatch.chdir("/")
    assert [row.text for row in source.read(Part("a.csv"), EVERYTHING)] == ["one"]


def test_a_source_can_be_a_uri(tmp_path):
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "captions.csv").write_text("image_id,text\n1,one\n", encoding="utf-8")
    source = open_source("table", f"file://{tmp_path}/a%20b/captions.csv")
    assert [row.text for row in source.read(*_only(source))] == ["one"]
    assert source.inputs()[0]["name"] == "captions.csv"


def test_parts_are_ordered_and_picklable():
    parts = [Part("b"), Part("a", split="val"), Part("a", split="train")]
    assert sorted(parts) == [Part("a", split="train"), Part("a", split="val"), Part("b")]
    assert pickle.loads(pickle.dumps(parts)) == parts


def _only(source):
    (part,) = source.parts(EVERYTHING)
    return part, EVERYTHING


@pytest.mark.parametrize("format_", ["multi30k", "karpathy", "coco", "scan"])
def test_a_caption_may_have_any_length(tmp_path, format_):
    text = "abcd é" * 50_000
    entry = {"filename": "1.jpg", "split": "train", "sentences": [{"raw": text}]}
    annotation = {"image_id": 1, "caption": text}
    files = {
        "multi30k": {"task1/raw/train.en": text, "task1/image_splits/train.txt": "1.jpg"},
        "karpathy": {"dataset.json": json.dumps({"images": [entry]})},
        "coco": {"captions_train.json": json.dumps({"images": [{"id": 1, "file_name": "1.jpg"}], "annotations": [annotation]})},
        "scan": {"train_caps.txt": text, "train_ids.txt": "1"},
    }
    for name, content in files[format_].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    source = open_source(format_, tmp_path)
    captions = [(row.image_id, row.text) for part in source.parts(EVERYTHING) for row in source.read(part, EVERYTHING)]
    assert captions == [("1", text)]
