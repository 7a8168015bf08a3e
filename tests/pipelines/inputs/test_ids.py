from __future__ import annotations

import random
from functools import partial
from pathlib import PurePosixPath

import pytest

from pipelines.inputs.captions.opening import open_captions
from pipelines.inputs.ids import KeyHashes, extension_remark, id_of_path, image_id_of
from pipelines.inputs.images.opening import open_images
from schemas.errors import InputError, UsageError


@pytest.mark.parametrize(
    ("path", "name", "whole"),
    [
        ("a.jpg", "a", "a"),
        ("x.y/a.b.jpg", "a.b", "x.y/a.b"),
        ("./x//a.jpg", "a", "x/a"),
        ("x.y/a", "a", "x.y/a"),
        (".hidden", ".hidden", ".hidden"),
        ("x/ .jpg", " ", "x/ "),
        ("/x/É.JPG", "É", "/x/É"),
    ],
)
def test_id_of_path_drops_the_last_extension_alone(path, name, whole):
    assert (id_of_path(path, "name"), id_of_path(path, "path")) == (name, whole)
    pure = PurePosixPath(path)
    assert (pure.stem, str(pure.with_suffix(""))) == (name, whole)


@pytest.mark.parametrize("ids", ["name", "path"])
def test_image_id_of_file_name_with_a_backslash_is_refused(ids):
    assert image_id_of("images/a.png", ids, place="x") == ("a" if ids == "name" else "images/a")
    with pytest.raises(InputError, match=r"^x: the file name 'images\\\\a.png' has a backslash, expected '/'"):
        image_id_of("images\\a.png", ids, place="x")


@pytest.mark.parametrize("open_source", [partial(open_captions, "coco"), open_images])
def test_a_wrong_id_rule_names_the_option(tmp_path, open_source):
    with pytest.raises(UsageError, match="--id-rule is 'stem', expected one of 'name', 'path'"):
        open_source(tmp_path, id_rule="stem")


@pytest.mark.parametrize("seed", range(20))
def test_repeat_returns_the_first_duplicate_key(seed):
    generator = random.Random(seed)
    keys = [generator.choice([str, int])(generator.randrange(60)) for _ in range(generator.randrange(40))]
    hashes = KeyHashes()
    for key in keys:
        hashes.add(key)
    second = next((n for n, key in enumerate(keys) if key in keys[:n]), None)
    expected = None if second is None else (keys[second], keys.index(keys[second]), second)
    assert hashes.repeat((key, n) for n, key in enumerate(keys)) == expected


def test_repeat_compares_keys_and_reads_them_only_for_equal_hashes():
    hashes = KeyHashes()
    hashes.add(-1)
    assert hashes.repeat(iter(())) is None
    hashes.add(-2)
    assert hash(-1) == hash(-2)
    assert hashes.repeat([(-1, 0), (-2, 1)]) is None
    remaining = iter([("a", 0)])
    assert KeyHashes().repeat(remaining) is None
    assert list(remaining) == [("a", 0)]


@pytest.mark.parametrize(
    ("image_ids", "is_remarked"),
    [(["1.jpg", "2.JPEG"], True), (["1.jpg", "2"], False), (["1.0", "Mr. A"], False), ([], False)],
)
def test_extension_remark_needs_an_image_extension_in_every_id(image_ids, is_remarked):
    assert ("'1.jpg'" in extension_remark(image_ids)) == bool(extension_remark(image_ids)) == is_remarked
