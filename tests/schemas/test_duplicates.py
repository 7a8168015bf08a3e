"""Lists of duplicates: written, read, and refused."""

import re
from dataclasses import replace

import pytest

from schemas.duplicates import Duplicate, duplicates_csv, read_duplicates
from schemas.errors import InputError
from schemas.fingerprints import sha256_of_bytes

DUPLICATES = [
    Duplicate(0, "hash", 0.98, 'a, "b"\nc', "train"),
    Duplicate(0, "hash", 0.98, "=d", "test,test_2016"),
    Duplicate(1, "text", 1.0, "e", "train", "de", "comparable", "3"),
    Duplicate(1, "words", 1.0, "f", "val", "de", "comparable", "0"),
]


def write(path, text: str) -> str:
    path.write_text(text, encoding="utf-8", newline="")
    return str(path)


def test_lists_read_as_they_were_written(tmp_path):
    text = duplicates_csv(DUPLICATES)
    assert text.splitlines()[0] == "group,kind,similarity,image_id,split,language,portion,index"
    assert read_duplicates(write(tmp_path / "list.csv", text)) == (DUPLICATES, sha256_of_bytes(text.encode()))
    assert read_duplicates(write(tmp_path / "none.csv", duplicates_csv([])))[0] == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("image_id,text\na,b\n", "its columns are 'image_id,text', expected 'group,kind,similarity,"),
        (duplicates_csv(DUPLICATES).replace("0.98", "x"), "could not convert string to float: 'x'"),
        (duplicates_csv([replace(duplicate, split="") for duplicate in DUPLICATES]), "it has no splits"),
    ],
)
def test_other_files_are_refused(tmp_path, text, reason):
    path = write(tmp_path / "list.csv", text)
    message = f"{path!r} is not a list of duplicates with splits"
    with pytest.raises(InputError, match=f"{re.escape(message)} .*{re.escape(reason)}.*: write it with imagepivot duplicates"):
        read_duplicates(path)
