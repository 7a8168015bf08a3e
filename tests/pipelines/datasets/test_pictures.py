from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from pipelines.datasets.pictures import read_pictures
from pipelines.inputs.images import open_images
from schemas.errors import InputError


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "below").mkdir(parents=True)
    Image.new("RGB", (30, 20), (255, 0, 0)).save(folder / "red.png")
    Image.new("RGB", (1000, 500), (0, 0, 255)).save(folder / "below" / "blue.png")
    (folder / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    return folder


def test_pictures_by_id_large_ones_reduced(photos):
    pictures = read_pictures(photos, ["blue", "red"], longer_side=100)
    assert list(pictures) == ["blue", "red"]
    assert pictures["red"].size_wh == (30, 20)
    assert pictures["blue"].size_wh == (1000, 500)
    assert np.array_equal(pictures["red"].pixels, np.full((20, 30, 3), (255, 0, 0), np.uint8))
    assert np.array_equal(pictures["blue"].pixels, np.full((50, 100, 3), (0, 0, 255), np.uint8))


def test_ids_of_whole_paths(photos):
    assert set(read_pictures(open_images(photos, id_rule="path"), ["below/blue"])) == {"below/blue"}


@pytest.mark.parametrize(
    ("image_id", "message"),
    [("redd", "image 'redd' is not among the images in .*did you mean 'red'"), ("broken", "broken.jpg' cannot be decoded")],
)
def test_pictures_that_are_not_there_or_damaged(photos, image_id, message):
    with pytest.raises(InputError, match=message):
        read_pictures(photos, ["red", image_id])


def test_a_table_of_images(photos):
    (photos.parent / "table.csv").write_text("name,uri\nfirst,photos/red.png\n")
    pictures = read_pictures(open_images(photos.parent / "table.csv", columns={"image_id": "name"}), ["first"])
    assert pictures["first"].size_wh == (30, 20)
