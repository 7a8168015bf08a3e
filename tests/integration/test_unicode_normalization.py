"""Datasets whose ids differ in Unicode normalization alone: wherever they are joined, the message names that as the cause."""

import unicodedata

import numpy as np
import pytest
from PIL import Image

from schemas.features import FeatureSpec
from tests.builders import write_rows

NAMES = ["caf\u00e9", "M\u00fcnchen", "\ud55c"]
NFD = [unicodedata.normalize("NFD", name) for name in NAMES]
CAUSE = "Unicode normalization differs: "


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Captions in NFC; features and pictures of the same images in NFD."""
    folder = tmp_path_factory.mktemp("unlike")
    key = {"language": "en", "portion": "comparable", "index": 0, "split": "train"}
    captions = [{"image_id": name, **key, "text": "a", "tokens": ["a"]} for name in NAMES]
    write_rows(folder / "captions", "captions", captions, parameters={"text": {"recipe": "raw"}})
    for name, image_ids in {"features": NFD, "composed": NAMES}.items():
        rows = [{"image_id": image_id, "feature": np.zeros(4, np.float32)} for image_id in image_ids]
        write_rows(folder / name, "features", rows, FeatureSpec("toy", (4,)))
    (folder / "photos").mkdir()
    for name in NFD:
        Image.new("RGB", (20, 10)).save(folder / "photos" / f"{name}.png")
    return folder


@pytest.mark.parametrize(
    "line",
    [
        "export features {out}/x --format scan --captions captions --language en",
        "view features photos --image café -o {out}/a.png",
        "diff features composed",
    ],
)
def test_commands_name_unicode_normalization(line, imagepivot, unlike, tmp_path):
    done = imagepivot(*line.format(out=tmp_path).split(), cwd=unlike, code=(0, 1))
    words = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert CAUSE in words
    assert "extract their features first" not in words
