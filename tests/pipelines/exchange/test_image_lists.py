import pytest

from pipelines.exchange.image_lists import make_image_id
from schemas.errors import InputError


@pytest.mark.parametrize(
    ("entry", "rule", "image_id"),
    [
        ("1000092795.jpg", "name", "1000092795"),
        ("1000092795.jpg#4", "name", "1000092795"),
        ("COCO_train2014_000000000009.JPEG#123456", "name", "COCO_train2014_000000000009"),
        ("images/train/7.png ", "name", "7"),
        ("images/train/7.png", "path", "images/train/7"),
        ("images/7.png#1", "exact", "images/7.png#1"),
        ("a.b", "name", "a.b"),
        ("猫", "name", "猫"),
        ("no#tag", "name", "no#tag"),
    ],
)
def test_make_image_id_applies_the_rule(entry, rule, image_id):
    assert make_image_id(entry, rule, place="line 1") == image_id


@pytest.mark.parametrize("entry", ["", "  ", ".jpg", "folder/"])
def test_make_image_id_refuses_invalid_entries(entry):
    with pytest.raises(InputError, match=r"list, line 3: .* is not an image id"):
        make_image_id(entry, "name", place="list, line 3")
