from __future__ import annotations

import pytest

from pipelines.inputs.captions.base import EVERYTHING, Selection, require_selected
from pipelines.inputs.captions.opening import open_captions
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
        (Selection(splits=("train", "test")), r"no captions of split 'test' in 'here': there are train, val"),
        (Selection(("en", "cs"), ("comparable",)), r"in language 'cs' of portion comparable in 'here': there are en"),
        (Selection((), ("comparable",), ("train", "val")), r"of split 'train' of portion comparable in 'here': there are val"),
    ],
)
def test_require_selected_names_existing_values(selection, message):
    with pytest.raises(InputError, match=message):
        require_selected(selection, KINDS, location="here")


def test_require_selected_accepts_existing_values_only():
    with pytest.raises(InputError, match="'here' holds no captions: check the program that wrote it"):
        require_selected(EVERYTHING, set(), location="here")
    every = Selection(("en", "cs"), ("translation", "comparable"), ("train", "val"))
    assert require_selected(every, KINDS, location="here") is None


@pytest.mark.parametrize(
    ("format_", "arguments", "error", "message"),
    [
        ("flickr", {}, UsageError, r"unknown format of captions 'flickr': use one of multi30k, karpathy, coco, scan, table"),
        ("table", {"columns": {"caption": "a"}}, UsageError, r"unknown column 'caption': ours are image_id, text, language, "),
        ("coco", {"columns": {"text": "a"}}, UsageError, r"only a 'table' has columns"),
        ("coco", {"delimiter": ";"}, UsageError, r"the format 'coco': only a 'table' has them"),
        ("coco", {"quoting": "none"}, UsageError, r"the format 'coco': only a 'table' has them"),
        ("karpathy", {"language": "english"}, UsageError, r"'english' is not a language tag"),
        ("multi30k", {"language": "de"}, UsageError, r"its file names say the languages"),
    ],
)
def test_open_source_refuses(tmp_path, format_, arguments, error, message):
    with pytest.raises(error, match=message):
        open_captions(format_, tmp_path, **arguments)


def test_location_may_be_relative_or_a_uri(tmp_path, monkeypatch):
    write(tmp_path / "a b" / "a.csv", "image_id,text\n1,one\n")
    monkeypatch.chdir(tmp_path / "a b")
    sources = [open_captions("table", "a.csv"), open_captions("table", f"file://{tmp_path}/a%20b/a.csv")]
    monkeypatch.chdir("/")
    for source in sources:  # A relative path means the same everywhere.
        assert [row.text for row in read(source)] == ["one"]
        assert source.inputs()[0]["name"] == "a.csv"
    with pytest.raises(UsageError, match="'nonsense://a'"):
        open_captions("table", "nonsense://a")
