from __future__ import annotations

import gzip
import json
import pickle
import random
import re

import pytest

from pipelines.inputs.captions.base import EVERYTHING, Part, RawCaption, Selection
from pipelines.inputs.captions.opening import open_captions
from schemas.errors import InputError
from tests.pipelines.inputs.reading import read, write

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


def _naive_karpathy(path) -> list[RawCaption]:
    """Read the whole file at once."""
    images = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())["images"]
    return [
        RawCaption(image["filename"][: -len(".jpg")], "en", "comparable", index, image["split"], sentence["raw"])
        for image in images
        for index, sentence in enumerate(image["sentences"])
    ]


def _write(path, value, **options):
    return write(path, json.dumps(value, **options))


@pytest.mark.parametrize("name", ["dataset_flickr30k.json", "dataset_coco.json.gz"])
@pytest.mark.parametrize("options", [{"ensure_ascii": False}, {"ensure_ascii": True}, {"indent": 1}, {"sort_keys": True}])
def test_karpathy_equals_a_naive_reading(tmp_path, name, options):
    path = _write(tmp_path / name, _dataset(seed=1, images=200), **options)
    expected = _naive_karpathy(path)
    assert len(expected) > 500
    assert read(open_captions("karpathy", path)) == expected
    assert read(open_captions("karpathy", tmp_path)) == expected


def test_karpathy_language_and_selection(tmp_path):
    dataset = _dataset(seed=3, images=50)
    sections = {"info": {"images": [1]}, "dataset": "x", "images": dataset["images"]}  # In another order.
    path = _write(tmp_path / "dataset_a.json", sections)
    source = open_captions("karpathy", path, language="PT-br")
    assert source.parts(EVERYTHING) == [Part("dataset_a.json", language="pt-BR", portion="comparable")]
    selection = Selection(languages=("pt-BR",), splits=("val", "restval"))
    expected = [row._replace(language="pt-BR") for row in _naive_karpathy(path) if row.split in ("val", "restval")]
    assert read(source, selection) == expected
    assert pickle.loads(pickle.dumps(source)) == source
    assert [row["name"] for row in source.inputs(selection)] == [path.name]
    with pytest.raises(InputError, match=r"no captions in language 'de' in '.*/dataset_a.json': there are pt-BR;"):
        source.parts(Selection(languages=("de",)))
    with pytest.raises(InputError, match=r"no captions of split 'test_2016' .* there are restval, test, train, val;"):
        read(source, Selection(splits=("test", "test_2016")))


def test_karpathy_folder_with_several_files_is_refused(tmp_path):
    (tmp_path / "dataset_coco.json").touch()
    (tmp_path / "dataset_flickr8k.json").touch()
    with pytest.raises(InputError, match=r"holds several files, 'dataset_coco.json', 'dataset_flickr8k.json': name the one"):
        open_captions("karpathy", tmp_path)


SENTENCE = {"raw": "a", "tokens": ["a"]}
SPLIT_IMAGE = {"filename": "a.jpg", "split": "train", "sentences": [SENTENCE]}
BROKEN_IMAGES = [
    ({"filename": 7}, r"image number 1: the image id is 7, expected a string"),
    ({"filename": "a\n.jpg"}, r"image number 1: the image id 'a\\n.jpg' has the control character '\\n'"),
    ({"split": None}, r"image number 1 \('a'\): 'split' is None, expected a name"),
    ({"sentences": "a"}, r"image number 1 \('a'\): 'sentences' is 'a', expected a list"),
    ({"sentences": [{"raw": "x\ud800"}]}, r"sentence 0: the text 'x\\ud800' has half a surrogate pair"),
    ({"sentids": [1, 2]}, r"\('a'\): 'sentids' is \[1, 2\], but its sentences are 1: some are missing"),
    ({"sentids": [1], "sentences": [{"raw": "a", "sentid": 2}]}, r"'sentids' is \[1\], but its sentences are \[2\]"),
    ({"sentences": [{"raw": "a", "sentid": 2}] * 2}, r"two of its sentences have the 'sentid' 2"),
    ({"imgid": 1, "sentences": [{"raw": "a", "imgid": 2}]}, r"its 'imgid' is 1, but that of a sentence is 2"),
]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], r"dataset_a.json' has no 'images' at its top level: is it a 'dataset_\*.json'"),
        ([{"filename": "a.jpg", "sentences": []}], r"image number 1: no 'split' in it"),
        *(([{**SPLIT_IMAGE, **change}], message) for change, message in BROKEN_IMAGES),
    ],
)
def test_karpathy_broken_content(tmp_path, images, message):
    with pytest.raises(InputError, match=message):
        read(open_captions("karpathy", _write(tmp_path / "dataset_a.json", {"images": images})))


# --- COCO -------------------------------------------------------------------------------------------------------------


def _captions(seed: int, images: int, prefix: str) -> dict:
    """Make random images; their annotations are spread over the file, with ids in no order."""
    rng = random.Random(seed)
    entries = [{"id": rng.randrange(10**6) * 1000 + n, "file_name": f"{prefix}{n:012d}.jpg"} for n in range(images)]
    owners = [entry["id"] for entry in entries for _ in range(rng.randint(0, 7))]
    rng.shuffle(owners)
    annotations = [
        {
            "image_id": owner,
            "id": rng.randrange(10**9),
            "caption": "".join(rng.choices("ab é\n\u2028中😀", k=rng.randint(0, 20))),
        }
        for owner in owners
    ]
    return {"info": {"images": 3}, "images": entries, "licenses": [], "annotations": annotations}


def _naive_coco(path, split) -> list[RawCaption]:
    """Read the whole file at once."""
    content = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    names = {image["id"]: image["file_name"].removesuffix(".jpg") for image in content["images"]}
    rows: list[RawCaption] = []
    for annotation in content["annotations"]:
        image_id = names[annotation["image_id"]]
        index = sum(row.image_id == image_id for row in rows)
        rows.append(RawCaption(image_id, "en", "comparable", index, split, annotation["caption"]))
    return rows


@pytest.fixture
def folder(tmp_path):
    _write(tmp_path / "captions_train2014.json", _captions(1, images=100, prefix="COCO_train2014_"))
    _write(tmp_path / "captions_val2014.json.gz", _captions(2, images=30, prefix="COCO_val2014_"))
    _write(tmp_path / "instances_val2014.json", {})
    return tmp_path


def test_coco_equals_a_naive_reading(folder):
    train = _naive_coco(folder / "captions_train2014.json", "train2014")
    val = _naive_coco(folder / "captions_val2014.json.gz", "val2014")
    assert len(train) > 200
    assert read(open_captions("coco", folder)) == train + val
    assert read(open_captions("coco", folder / "captions_val2014.json.gz")) == val
    assert read(open_captions("coco", folder), Selection(splits=("val2014",))) == val
    source = open_captions("coco", folder, language="ja")
    assert read(source) == [row._replace(language="ja") for row in train + val]
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize("order", [["annotations", "images"], ["licenses", "annotations", "info", "images"]])
@pytest.mark.parametrize("options", [{"ensure_ascii": False}, {"indent": 2}])
def test_coco_sections_in_another_order(tmp_path, order, options):
    content = _captions(3, images=40, prefix="")
    path = _write(tmp_path / "captions_a.json", {key: content[key] for key in order}, **options)
    assert read(open_captions("coco", path)) == _naive_coco(path, "a")


def test_coco_parts_and_inputs(folder):
    source = open_captions("coco", folder)
    assert source.parts(Selection(splits=("val2014",))) == [
        Part("captions_val2014.json.gz", language="en", portion="comparable", split="val2014")
    ]
    assert [row["name"] for row in source.inputs()] == ["captions_train2014.json", "captions_val2014.json.gz"]
    assert [row["name"] for row in source.inputs(Selection(splits=("train2014",)))] == ["captions_train2014.json"]


IMAGE = {"id": 1, "file_name": "a.jpg"}
CAPTION = {"id": 5, "image_id": 1, "caption": "text"}


@pytest.mark.parametrize(
    ("images", "annotations", "message"),
    [
        ([], [CAPTION], r"captions_x.json' has no 'images' at its top level"),
        ([IMAGE, 3], [], r"image number 2: no 'id' or no 'file_name' in it"),
        ([IMAGE, {"id": 1, "file_name": "a.png"}], [], r"image number 2: the id 1 belongs to 'a.jpg' and 'a.png'"),
        ([IMAGE, {"id": True, "file_name": "b.jpg"}], [], r"image number 2: no 'id'"),
        ([IMAGE], [{**CAPTION, "image_id": True}], r"annotation number 1: its image True is not among"),
        ([IMAGE], [{**CAPTION, "image_id": "1"}], r"annotation number 1: its image '1' is not among"),
        ([IMAGE], [CAPTION, {**CAPTION, "id": 6}, CAPTION], r"number 1 and 3 both have the id '5' and describe the image 1"),
        ([IMAGE], [CAPTION, {**CAPTION, "image_id": 2}], r"annotation number 2: its image 2 is not among the 'images'"),
        ([IMAGE], [{**CAPTION, "caption": None}], r"annotation number 1 \(image 'a'\): 'text' is None"),
        ([IMAGE], [{**CAPTION, "caption": "\ud83d"}], r"the text '\\ud83d' has half a surrogate pair"),
    ],
)
def test_coco_broken_content(tmp_path, images, annotations, message):
    path = _write(tmp_path / "captions_x.json", {"images": images, "annotations": annotations})
    with pytest.raises(InputError, match=message):
        read(open_captions("coco", path))


RENAME = "rename one of them, here and on the disk, or write a table"


@pytest.mark.parametrize(
    ("second", "advice"),
    [("b/a.jpg", f"make ids of whole paths with --id-rule path, or {RENAME}"), ("a/a.png", f"{RENAME} with ids of your own")],
)
def test_images_of_one_name_are_refused(tmp_path, second, advice):
    images = [{"id": "9", "file_name": "a/a.jpg"}, {"id": "10", "file_name": second}]
    annotations = [{"id": number, "image_id": key, "caption": key} for number, key in enumerate(["9", "10"])]
    path = _write(tmp_path / "captions_x.json", {"images": images, "annotations": annotations})
    message = f"image number 2: the images '9' ('a/a.jpg') and '10' ({second!r}) would both be 'a': {advice}"
    with pytest.raises(InputError, match=re.escape(message)):
        read(open_captions("coco", path))
    source = open_captions("coco", path, id_rule="path")
    if second == "b/a.jpg":
        assert source.parameters() == {"default_language": "en", "ids": "path"}
        assert [(row.image_id, row.index, row.text) for row in read(source)] == [("a/a", 0, "9"), ("b/a", 0, "10")]
    else:
        with pytest.raises(InputError, match=f"would both be 'a/a': {RENAME}"):
            read(source)


def test_ids_of_annotations_may_start_again_for_another_image(tmp_path):
    images = [IMAGE, {"id": 2, "file_name": "b.jpg"}, IMAGE]
    annotations = [CAPTION, {**CAPTION, "image_id": 2}, {"image_id": 1, "caption": "x"}, {"image_id": 1, "caption": "x"}]
    path = _write(tmp_path / "captions_x.json", {"images": images, "annotations": annotations})
    assert [(row.image_id, row.index) for row in read(open_captions("coco", path))] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]
