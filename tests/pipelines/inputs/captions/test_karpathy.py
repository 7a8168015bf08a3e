"""Karpathy's ``dataset_*.json``."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import random

import pytest

from pipelines.inputs.captions import EVERYTHING, Part, RawCaption, Selection, open_source
from schemas.errors import InputError

ALPHABET = 'abc éß\u2028\r\n\t"\\中\U0001f600'


def _dataset(seed: int, images: int) -> dict:
    """Make random images with 0 to 7 sentences; a few sentences are empty."""
    rng = random.Random(seed)
    entries, sentence = [], 0
    for number in range(images):
        sentences = []
        for _ in range(rng.randint(0, 7)):
            raw = "".join(rng.choices(ALPHABET, k=rng.randint(0, 30)))
            sentences.append({"tokens": raw.split(), "raw": raw, "imgid": number, "sentid": sentence})
            sentence += 1
        ids = [entry["sentid"] for entry in sentences]
        name = f"{rng.randrange(10**9)}_{number}.jpg"
        split = rng.choice(["train", "restval", "val", "test"])
        entries.append({"sentids": ids, "imgid": number, "sentences": sentences, "split": split, "filename": name})
    return {"images": entries, "dataset": "flickr30k"}


def _naive(path) -> list[RawCaption]:
    """Read the whole file at once."""
    images = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())["images"]
    return [
        RawCaption(image["filename"][: -len(".jpg")], "en", "comparable", index, image["split"], sentence["raw"])
        for image in images
        for index, sentence in enumerate(image["sentences"])
    ]


def _write(path, value, **options):
    data = json.dumps(value, **options).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _read(source, selection=EVERYTHING):
    return [row for part in source.parts(selection) for row in source.read(part, selection)]


@pytest.mark.parametrize("name", ["dataset_flickr30k.json", "dataset_coco.json.gz"])
@pytest.mark.parametrize("options", [{"ensure_ascii": False}, {"ensure_ascii": True}, {"indent": 1}, {"sort_keys": True}])
def test_equals_a_naive_reading(tmp_path, name, options):
    path = _write(tmp_path / name, _dataset(seed=1, images=200), **options)
    expected = _naive(path)
    assert len(expected) > 500
    assert _read(open_source("karpathy", path)) == expected
    assert _read(open_source("karpathy", tmp_path)) == expected


def test_sections_in_another_order(tmp_path):
    dataset = _dataset(seed=2, images=20)
    path = _write(tmp_path / "dataset.json", {"info": {"images": [1]}, "dataset": "x", "images": dataset["images"]})
    assert _read(open_source("karpathy", path)) == _naive(path)


def test_language_and_selection(tmp_path):
    path = _write(tmp_path / "dataset_a.json", _dataset(seed=3, images=50))
    source = open_source("karpathy", path, language="PT-br")
    assert source.parts(EVERYTHING) == [Part("dataset_a.json", language="pt-BR", portion="comparable")]
    selection = Selection(languages=("pt-BR",), splits=("val", "restval"))
    expected = [row._replace(language="pt-BR") for row in _naive(path) if row.split in ("val", "restval")]
    assert _read(source, selection) == expected
    assert pickle.loads(pickle.dumps(source)) == source


def test_what_is_not_there(tmp_path):
    source = open_source("karpathy", _write(tmp_path / "dataset_a.json", _dataset(seed=3, images=50)))
    with pytest.raises(InputError, match=r"no captions in language 'de' in '.*/dataset_a.json': there are en;"):
        source.parts(Selection(languages=("de",)))
    with pytest.raises(InputError, match=r"no captions of portion 'translation' .* there are comparable;"):
        source.parts(Selection(portions=("translation",)))
    with pytest.raises(InputError, match=r"no captions of split 'test_2016' .* there are restval, test, train, val;"):
        _read(source, Selection(splits=("test", "test_2016")))


def test_inputs(tmp_path):
    path = _write(tmp_path / "dataset_a.json", _dataset(seed=4, images=3))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    expected = [{"name": "dataset_a.json", "bytes": path.stat().st_size, "sha256": digest}]
    assert open_source("karpathy", tmp_path).inputs() == expected
    assert open_source("karpathy", path).inputs(Selection(splits=("val",))) == expected


def test_folder_with_none_or_several(tmp_path):
    (tmp_path / "captions.json").touch()
    with pytest.raises(InputError, match=r"no 'dataset_\*\.json' in '.*'; it holds 'captions.json'\. Name the file itself"):
        open_source("karpathy", tmp_path)
    (tmp_path / "dataset_coco.json").touch()
    (tmp_path / "dataset_flickr8k.json").touch()
    with pytest.raises(InputError, match=r"holds several files, 'dataset_coco.json', 'dataset_flickr8k.json': name the one"):
        open_source("karpathy", tmp_path)


SENTENCE = {"raw": "a", "tokens": ["a"]}
IMAGE = {"filename": "a.jpg", "split": "train", "sentences": [SENTENCE]}


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], r"dataset_a.json' has no 'images' at its top level: is it a 'dataset_\*.json'"),
        ({"a": IMAGE}, r"has no 'images' at its top level"),
        ([IMAGE, 3], r"image number 2: no 'filename' in it"),
        ([{**IMAGE, "filename": 7}], r"image number 1: the image id is 7, expected a string"),
        ([{**IMAGE, "filename": "a\n.jpg"}], r"image number 1: the image id 'a\\n.jpg' has the control character '\\n'"),
        ([{"filename": "a.jpg", "sentences": []}], r"image number 1: no 'split' in it"),
        (
            [{**IMAGE, "split": None}],
            r"image number 1 \('a'\): 'split' is None, expected a name .*; write the split of the image$",
        ),
        ([{**IMAGE, "sentences": "a"}], r"image number 1 \('a'\): 'sentences' is 'a', expected a list"),
        ([{**IMAGE, "sentences": [SENTENCE, {"tokens": []}]}], r"\('a'\): sentence 1 has no 'raw' text"),
        ([{**IMAGE, "sentences": [{"raw": None}]}], r"\('a'\), sentence 0: the text of the caption is None"),
        ([{**IMAGE, "sentences": [{"raw": "x\ud800"}]}], r"sentence 0: the text 'x\\ud800' has half a surrogate pair"),
        ([{**IMAGE, "sentids": [1, 2]}], r"\('a'\): 'sentids' is \[1, 2\], but its sentences are 1: some are missing"),
        (
            [{**IMAGE, "sentids": []}],
            r"\('a'\): 'sentids' is \[\], but its sentences are 1: some are missing or belong to another",
        ),
        (
            [{**IMAGE, "sentids": [1], "sentences": [{"raw": "a", "sentid": 2}]}],
            r"'sentids' is \[1\], but its sentences are \[2\]",
        ),
        ([{**IMAGE, "sentences": [{"raw": "a", "sentid": 2}] * 2}], r"two of its sentences have the 'sentid' 2: remove one"),
        ([{**IMAGE, "imgid": 1, "sentences": [{"raw": "a", "imgid": 2}]}], r"its 'imgid' is 1, but that of a sentence is 2"),
    ],
)
def test_broken_content(tmp_path, images, message):
    source = open_source("karpathy", _write(tmp_path / "dataset_a.json", {"images": images}))
    with pytest.raises(InputError, match=message):
        _read(source)


def test_paths_keep_images_of_one_name_apart(tmp_path):
    images = [{**IMAGE, "filepath": folder, "imgid": 3} for folder in ("train2014", "val2014")]
    path = _write(tmp_path / "dataset_a.json", {"images": images})
    source = open_source("karpathy", path, id_rule="path")
    assert [row.image_id for row in _read(source)] == ["train2014/a", "val2014/a"]
    assert source.parameters() == {"default_language": "en", "ids": "path"}
    assert "make ids of whole paths with --id-rule path" in open_source("karpathy", path).repeat_advice
    assert "--ids" not in source.repeat_advice


def test_cut_short(tmp_path):
    path = _write(tmp_path / "dataset_a.json", _dataset(seed=5, images=20))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"dataset_a.json' is not well-formed JSON: .* after \d+ items of 'images'"):
        _read(open_source("karpathy", path))
