"""The basis of all readers of captions: selection, language tags, columns, opening by format."""

from __future__ import annotations

import json
import pickle

import pytest

from pipelines.inputs.captions import EVERYTHING, Part, Selection, open_source
from pipelines.inputs.captions.base import check_text, require_selected
from pipelines.inputs.ids import image_id_of
from schemas.errors import InputError, UsageError
from tests.pipelines.inputs.reading import read, write


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
            Selection(("en", "cs"), ("comparable",)),
            r"no captions in language 'cs' of portion comparable in 'here': there are en",
        ),
        (Selection((), ("comparable",), ("train", "val")), r"of split 'train' of portion comparable in 'here': there are val"),
    ],
)
def test_require_selected_names_what_there_is(selection, message):
    with pytest.raises(InputError, match=message):
        require_selected(selection, KINDS, location="here")


def test_require_selected_accepts_what_is_there():
    assert require_selected(EVERYTHING, [], location="here") is None
    every = Selection(("en", "cs"), ("translation", "comparable"), ("train", "val"))
    assert require_selected(every, KINDS, location="here") is None


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


def test_a_location_may_be_relative_or_a_uri(tmp_path, monkeypatch):
    write(tmp_path / "a b" / "a.csv", "image_id,text\n1,one\n")
    monkeypatch.chdir(tmp_path / "a b")
    sources = [open_source("table", "a.csv"), open_source("table", f"file://{tmp_path}/a%20b/a.csv")]
    monkeypatch.chdir("/")
    for source in sources:  # A relative path means the same everywhere.
        assert [row.text for row in read(source)] == ["one"]
        assert source.inputs()[0]["name"] == "a.csv"
    with pytest.raises(UsageError, match=r"cannot understand the location 'nonsense://a'"):
        open_source("table", "nonsense://a")


def test_parts_are_ordered_and_picklable():
    parts = [Part("b"), Part("a", split="val"), Part("a", split="train")]
    assert sorted(parts) == [Part("a", split="train"), Part("a", split="val"), Part("b")]
    assert pickle.loads(pickle.dumps(parts)) == parts


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
        write(tmp_path / name, content + "\n")
    source = open_source(format_, tmp_path)
    assert [(row.image_id, row.text) for row in read(source)] == [("1", text)]
