from __future__ import annotations

import gzip
import pickle
from collections import Counter

import pytest

from pipelines.inputs.captions.base import EVERYTHING, RawCaption, Selection
from pipelines.inputs.captions.opening import open_captions
from schemas.errors import InputError
from tests.pipelines.inputs.reading import read, write


@pytest.fixture
def root(tmp_path):
    """Two images in train, one in val; plain and zipped files."""
    data = tmp_path / "data"
    write(data / "task1/image_splits/train.txt", "10.jpg\n20.jpg\n")
    write(data / "task1/image_splits/mscoco.txt", "COCO_1.jpg#77\nCOCO_1.jpg#78\n")
    write(data / "task1/raw/train.en.gz", "one\r\ntwo\u2028 lines\n")
    write(data / "task1/raw/train.pt-br", "\ufeffum\n\n")
    write(data / "task1/raw/mscoco.en", "a\nb")
    write(data / "task1/raw/.DS_Store", b"\xff")
    write(data / "task1/raw/README.md", "text")
    write(data / "task2/image_splits/val_images.txt", "30.jpg\n")
    write(data / "task2/image_splits/test_2017_images.txt", "40.jpg\n")
    for number in (1, 2):
        write(data / f"task2/raw/val.{number}.de.gz", f"Satz {number}\n")
    return tmp_path


EXPECTED = [
    RawCaption("COCO_1", "en", "translation", 0, "mscoco", "a"),
    RawCaption("COCO_1", "en", "translation", 0, "mscoco", "b"),
    RawCaption("10", "en", "translation", 0, "train", "one"),
    RawCaption("20", "en", "translation", 0, "train", "two\u2028 lines"),
    RawCaption("10", "pt-BR", "translation", 0, "train", "um"),
    RawCaption("20", "pt-BR", "translation", 0, "train", ""),
    RawCaption("30", "de", "comparable", 0, "val", "Satz 1"),
    RawCaption("30", "de", "comparable", 1, "val", "Satz 2"),
]


@pytest.mark.parametrize("below", ["", "data"])
def test_reads_everything_but_marks_and_line_ends_as_it_stands(root, below):
    source = open_captions("multi30k", root / below)
    assert read(source) == EXPECTED
    assert pickle.loads(pickle.dumps(source)) == source
    assert hash(source) == hash(pickle.loads(pickle.dumps(source)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("image_splits/train.txt", "10.jpg\r20.jpg\n30.jpg\n", r"train.txt', line 1: .*'\\r'; if lines end in CR alone"),
        ("image_splits/train.txt", "10.jpg\n\n", r"train.txt', line 2: the image id is empty"),
        ("raw/train.en.gz", b"fine\ncaf\xe9\n", r"task1/raw/train.en.gz' is not UTF-8: line 2, column 4 .* 0xe9"),
        ("raw/train.en.gz", "one\n", r"train.en.gz' has 1 lines, but its image list '.*splits/train.txt' has 2: line N"),
        ("raw/train.en.gz", "one\ntwo\n\n", r"train.en.gz' has 3 lines, but its image list"),
    ],
)
def test_inconsistent_files_are_refused(root, name, content, message):
    write(root / "data/task1" / name, content)
    with pytest.raises(InputError, match=message):
        read(open_captions("multi30k", root), Selection(languages=("en",), splits=("train",)))


def test_files_without_lines_are_refused(root):
    for name in ("raw/train.en.gz", "image_splits/train.txt"):
        write(root / "data/task1" / name, "")
    with pytest.raises(InputError, match=r"train.en.gz' holds no captions"):
        read(open_captions("multi30k", root), Selection(languages=("en",), splits=("train",)))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(languages=("en",)),
        Selection(languages=("PT-BR", "de")),
        Selection(portions=("comparable",)),
        Selection(splits=("train",), languages=("pt-br",)),
        Selection(splits=("mscoco", "val")),
    ],
)
def test_selection(root, selection):
    source = open_captions("multi30k", root)
    expected = [row for row in EXPECTED if selection.takes(row.language, row.portion, row.split)]
    assert expected
    assert read(source, selection) == expected
    for ask in (source.parts, source.inputs):
        with pytest.raises(InputError, match=r"no captions of split 'test' .* there are mscoco, train, val"):
            ask(Selection(splits=("test",)))


def test_inputs_are_the_files_of_the_selection(root):
    rows = open_captions("multi30k", root).inputs(Selection(portions=("comparable",)))
    names = ["task2/image_splits/val_images.txt", "task2/raw/val.1.de.gz", "task2/raw/val.2.de.gz"]
    assert [row["name"] for row in rows] == names
    everything = open_captions("multi30k", root).inputs()
    assert len(everything) == 8
    assert everything == open_captions("multi30k", root / "data").inputs()
    assert "task2/image_splits/test_2017_images.txt" not in [row["name"] for row in everything]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("task1/raw/train.english.gz", r"the name of '.*/train.english.gz': 'english' is not a language tag"),
        ("task2/raw/val.de", r"val.de' is not named 'SPLIT.N.LANG.gz'"),
        ("task2/raw/val.0.de", r"val.0.de' is not named"),
        ("task1/raw/train.en", r"train.en' and '.*train.en.gz' are the same captions: keep one"),
        ("task1/raw/new.en", r"new.en' has no image list: '.*/image_splits/new.txt' does not exist"),
    ],
)
def test_invalid_file_names_are_refused(root, name, message):
    write(root / "data" / name, "a\n")
    source = open_captions("multi30k", root)
    with pytest.raises(InputError, match=message):
        source.parts(EVERYTHING)


def test_folders_without_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not Multi30K: it holds neither 'task1' nor 'task2'"):
        open_captions("multi30k", tmp_path)
    (tmp_path / "task1").mkdir()
    with pytest.raises(InputError, match=r"no captions in .*: expected files such as 'task1/raw/train.en.gz'"):
        open_captions("multi30k", tmp_path).parts(EVERYTHING)


TRANSLATION = {"train": 29_000, "val": 1_014, "test_2016_flickr": 1_000, "test_2017_flickr": 1_000, "test_2017_mscoco": 461}
COMPARABLE = {"train": 29_000, "val": 1_014, "test_2016": 1_000}


@pytest.mark.slow
def test_real_counts_and_keys(multi30k):
    source = open_captions("multi30k", multi30k)
    expected = {(lang, "translation", split): n for lang in ("de", "en", "fr") for split, n in TRANSLATION.items()}
    expected |= {("cs", "translation", split): n for split, n in TRANSLATION.items() if "2017" not in split}
    expected |= {(lang, "translation", "test_2018_flickr"): 1_071 for lang in ("cs", "de", "en", "fr")}
    expected |= {(lang, "comparable", split): 5 * n for lang in ("de", "en") for split, n in COMPARABLE.items()}
    counts, english = Counter(), []
    for part in source.parts(EVERYTHING):
        for row in source.read(part, EVERYTHING):
            counts[(*row[1:3], row.split)] += 1
            if row.language == "en" and row.split in ("train", "val"):
                english.append(row)
    assert counts == expected
    assert sum(counts.values()) == 442_863
    assert len({row[:4] for row in english}) == len(english) == 30_014 * 6
    assert {row.image_id for row in english if row.portion == "translation"} == {
        row.image_id for row in english if row.index == 4
    }


def test_real_rows(multi30k):
    source = open_captions("multi30k", multi30k / "data")
    raw = multi30k / "data/task1/raw/test_2017_mscoco.fr.gz"
    rows = read(source, Selection(languages=("fr",), splits=("test_2017_mscoco",)))
    assert [row.text for row in rows] == gzip.decompress(raw.read_bytes()).decode().split("\n")[:-1]
    assert [row.image_id for row in rows[:2]] == ["COCO_train2014_000000117071", "COCO_val2014_000000398076"]
    assert len({row.image_id for row in rows}) == 461

    rows = read(source, Selection(languages=("de",), portions=("comparable",), splits=("test_2016",)))
    assert [row.image_id for row in rows[:2]] == ["1007129816", "1009434119"]
    assert len({row[:5] for row in rows}) == len(rows) == 5_000
    assert Counter(row.index for row in rows) == dict.fromkeys(range(5), 1_000)
