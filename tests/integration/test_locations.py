"""Every location that a command takes may be a ``file://`` address or begin with ``~``."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from schemas.dataset import open_dataset
from schemas.storage.folder import Folder

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def address(path: Path) -> str:
    return path.as_uri()


def test_captions_vocabulary_and_token_ids(imagepivot, home):
    (home / "c.csv").write_text("image_id,text\n" + "".join(f"i{n},a small dog\n" for n in range(5)))
    one = ("--workers", "1")
    arguments = ("--format", "table", "--recipe", "moses-truecase", "--shards", "2", *one)
    imagepivot("captions", address(home / "c.csv"), "~/captions", *arguments)
    imagepivot("captions", "~/c.csv", address(home / "again"), *arguments, "--truecaser", address(home / "captions"))
    imagepivot("vocabulary", address(home / "captions"), "~/v", "--min-count", "1")
    imagepivot("encode", "~/captions", address(home / "v"), "~/encoded", *one)
    assert {path.name for path in home.iterdir()} == {"c.csv", "captions", "again", "v", "encoded"}
    assert len(open_dataset("~/encoded")) == len(open_dataset(address(home / "captions"))) == 5
    imagepivot("inspect", address(home / "v"))
    imagepivot("validate", "~/encoded")
    imagepivot("diff", "~/captions", address(home / "captions"))


def test_images_weights_and_drawings(imagepivot, home):
    import timm
    import torch

    (home / "i").mkdir()
    Image.new("RGB", (60, 50), (200, 30, 20)).save(home / "i" / "a.png")
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), home / "w.pth")
    extract = ("--extractor", "timm:test_resnet.r160_in1k", "--shards", "1", "--workers", "1")
    imagepivot("features", address(home / "i"), "~/f", "--weights", "~/w.pth", *extract)
    imagepivot("features", "~/i", address(home / "g"), "--weights", address(home / "w.pth"), *extract)
    assert open_dataset("~/f").fingerprint == open_dataset("~/g").fingerprint
    imagepivot("view", "~/f", address(home / "i"), "--image", "a", "-o", address(home / "v.png"))
    assert {path.name for path in home.iterdir()} == {"i", "w.pth", "f", "g", "v.png"}


def test_imports_and_exports(imagepivot, home):
    np.save(home / "x.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    (home / "ids of x.txt").write_text("b\na\n")
    imagepivot(
        "import", address(home / "x.npy"), "~/f", "--name", "x", "--ids", address(home / "ids of x.txt"), "--shards", "1"
    )
    imagepivot("export", address(home / "f"), "~/out", "--format", "npy")
    imagepivot("export", "~/f", address(home / "out2"), "--format", "npy", "--lists", "~/ids of x.txt")
    assert np.array_equal(np.load(home / "out2" / "features.npy"), np.load(home / "x.npy"))
    assert sorted(Folder("~/out").names()) == ["_made_from.json", "features.npy", "ids.txt"]
    assert {path.name for path in home.iterdir()} == {"x.npy", "ids of x.txt", "f", "out", "out2"}
