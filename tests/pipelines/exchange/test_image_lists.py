import numpy as np
import pytest

from pipelines.exchange.image_lists import make_image_id
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from schemas.dataset import open_dataset
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
        *((text, "exact", text) for text in (" a ", "cafe\u0301", "caf\u00e9", "a\u2028b", "\u202eb", "A.b", "x" * 200)),
    ],
)
def test_make_image_id_applies_the_rule(entry, rule, image_id):
    assert make_image_id(entry, rule, place="line 1") == image_id


@pytest.mark.parametrize(
    ("entry", "rule", "message"),
    [
        *((entry, "name", ".* is not an image id") for entry in ("", "  ", ".jpg", "folder/")),
        *((f"a{control}b", "exact", ".* has the control character") for control in "\0\t\x1b\x7f\x85\x9b\n"),
    ],
)
def test_make_image_id_refuses_invalid_entries(entry, rule, message):
    with pytest.raises(InputError, match=f"^list, line 3: {message}"):
        make_image_id(entry, rule, place="list, line 3")


@pytest.mark.parametrize(
    ("array", "list_"),
    [
        ("train-surrogate.npy", "train-surrogate.ids"),
        ("train.npy", "train.txt"),
        ("dev_ims.npy", "dev_ids.txt"),
        ("features.npy", "ids.txt"),
    ],
)
def test_list_beside_an_array_is_found(tmp_path, array, list_):
    np.save(tmp_path / array, np.ones((2, 6), np.float32))
    (tmp_path / list_).write_text("a.jpg\nb.jpg\n")
    import_features(ImportJob((str(tmp_path / array),), output=str(tmp_path / "out"), name="toy"))
    assert sorted(open_dataset(tmp_path / "out").image_ids()) == ["a", "b"]
