"""Every location that a command takes may be a ``file://`` address or begin with ``~``."""

from pathlib import Path

import pytest
from PIL import Image

from schemas.dataset import open_dataset

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


def made_in(home: Path) -> set[str]:
    """Names in the home folder, without those of caches of libraries."""
    return {path.name for path in home.iterdir() if not path.name.startswith(".")}


def test_captions_vocabulary_and_token_ids(imagepivot, home):
    (home / "c.csv").write_text("image_id,text\n" + "".join(f"i{n},a small dog\n" for n in range(5)))
    one = ("--workers", "1")
    arguments = ("--format", "table", "--recipe", "moses-truecase", "--shards", "2", *one)
    imagepivot("captions", (home / "c.csv").as_uri(), "~/captions", *arguments)
    imagepivot("captions", "~/c.csv", (home / "again").as_uri(), *arguments, "--truecaser", (home / "captions").as_uri())
    imagepivot("vocabulary", (home / "captions").as_uri(), "~/v", "--min-count", "1")
    imagepivot("encode", "~/captions", (home / "v").as_uri(), "~/encoded", *one)
    assert made_in(home) == {"c.csv", "captions", "again", "v", "encoded"}
    assert len(open_dataset("~/encoded")) == len(open_dataset((home / "captions").as_uri())) == 5
    imagepivot("inspect", (home / "v").as_uri())
    imagepivot("validate", "~/encoded")
    imagepivot("diff", "~/captions", (home / "captions").as_uri())


def test_images_weights_and_drawings(imagepivot, home):
    import timm
    import torch

    (home / "i").mkdir()
    Image.new("RGB", (60, 50), (200, 30, 20)).save(home / "i" / "a.png")
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), home / "w.pth")
    extract = ("--extractor", "timm:test_resnet.r160_in1k", "--shards", "1", "--workers", "1")
    imagepivot("features", (home / "i").as_uri(), "~/f", "--weights", "~/w.pth", *extract)
    imagepivot("features", "~/i", (home / "g").as_uri(), "--weights", (home / "w.pth").as_uri(), *extract)
    assert open_dataset("~/f").fingerprint == open_dataset("~/g").fingerprint
    imagepivot("view", "~/f", (home / "i").as_uri(), "--image", "a", "-o", (home / "v.png").as_uri())
    assert made_in(home) == {"i", "w.pth", "f", "g", "v.png"}
