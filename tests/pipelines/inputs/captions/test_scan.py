from __future__ import annotations

import pickle

import pytest

from pipelines.inputs.captions.base import RawCaption, Selection
from pipelines.inputs.captions.opening import open_captions
from schemas.errors import InputError
from tests.pipelines.inputs.reading import read, write


def write_files(folder, **files: str):
    for name, text in files.items():
        write(folder / f"{name}.txt", text)
    return folder


def lines(*texts: object) -> str:
    return "".join(f"{text}\n" for text in texts)


def caption(image_id: str, index: int, split: str, text: str, language: str = "en") -> RawCaption:
    return RawCaption(image_id, language, "comparable", index, split, text)


@pytest.fixture
def precomp(tmp_path):
    return write_files(
        tmp_path / "f30k_precomp",
        train_caps=lines(*(f"train {number}" for number in range(10))),
        train_ids=lines("31", "7"),
        dev_caps=lines(*(f"dev {number}" for number in range(5))),
        dev_ids=lines("31.x/ü"),
    )


def test_folder_of_splits_with_one_id_for_each_image(precomp):
    expected = [caption("31.x/ü", index, "dev", f"dev {index}") for index in range(5)]
    expected += [caption(("31", "7")[n // 5], n % 5, "train", f"train {n}") for n in range(10)]
    assert read(open_captions("scan", precomp)) == expected


def test_ids_repeated_for_each_caption(tmp_path):
    folder = write_files(tmp_path / "p", test_caps=lines(*"abcd"), test_ids=lines("9", "9", "4", "9"))
    expected = [caption(key, index, "test", text, "de") for key, index, text in zip("9949", (0, 1, 0, 2), "abcd", strict=True)]
    assert read(open_captions("scan", folder, language="de")) == expected


def test_without_ids_positions_name_the_images_of_each_split(tmp_path):
    folder = write_files(tmp_path / "p", test_caps=lines(*range(10)), testall_caps=lines(*range(5)))
    rows = read(open_captions("scan", folder))
    assert [row.image_id for row in rows] == ["test-0"] * 5 + ["test-1"] * 5 + ["testall-0"] * 5
    assert [row.index for row in rows] == [0, 1, 2, 3, 4] * 3
    assert [row.text for row in rows] == [*map(str, range(10)), *map(str, range(5))]


def test_one_file_plain_or_compressed(precomp):
    for name in ("train_caps.txt", "train_ids.txt"):
        write(precomp / f"{name}.gz", (precomp / name).read_bytes())
    expected = read(open_captions("scan", precomp / "dev_caps.txt"))
    assert {row.split for row in expected} == {"dev"}
    plain = read(open_captions("scan", precomp / "train_caps.txt"))
    (precomp / "train_ids.txt").unlink()
    assert read(open_captions("scan", precomp / "train_caps.txt.gz")) == plain
    with pytest.raises(InputError, match=r"'train_caps.txt' and 'train_caps.txt.gz' in .* are the same split: keep one"):
        open_captions("scan", precomp)


def test_selections_and_inputs(precomp):
    source = open_captions("scan", precomp)
    assert pickle.loads(pickle.dumps(source)) == source
    assert {row.split for row in read(source, Selection(splits=("train",)))} == {"train"}
    assert [entry["name"] for entry in source.inputs()] == ["dev_caps.txt", "dev_ids.txt", "train_caps.txt", "train_ids.txt"]
    assert [entry["name"] for entry in source.inputs(Selection(splits=("train",)))] == ["train_caps.txt", "train_ids.txt"]
    assert source.parameters() == {"default_language": "en"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a_caps": lines(*range(9)), "a_ids": lines(1, 2)}, r"a_caps.txt' has 9 captions, but '.*a_ids.txt' has 2 ids"),
        ({"a_caps": lines(*range(2)), "a_ids": lines(1, 2, 3)}, r"has 2 captions, but .* has 3 ids"),
        ({"a_caps": lines(*range(9))}, r"has 9 captions, expected 5 for each image, or their image ids in 'a_ids.txt'"),
        ({"a_caps": lines(*range(2)), "a_ids": lines(1, "")}, r"a_ids.txt', line 2: the image id is empty"),
        ({"a_caps": lines(*range(6)), "a_ids": lines("x", "y", "x")}, r"for 2 captions each, but the lines 1 and 3 are both"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, files, message):
    source = open_captions("scan", write_files(tmp_path / "p", **files))
    with pytest.raises(InputError, match=message):
        read(source)
