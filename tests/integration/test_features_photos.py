"""resnet50-pool through the whole pipeline, on photographs, against torchvision alone; and images that cannot be used."""

import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torchvision import transforms

from schemas.dataset import open_dataset
from schemas.writing.validation import validate

pytestmark = pytest.mark.slow


def features(imagepivot, images, output, *arguments, code=0, **more):
    return imagepivot(
        *("features", images, output, "--weights", "random:0", "--device", "cpu", "--shards", "2", *arguments),
        code=code,
        **more,
    )


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """Return a PNG whose header claims a size, whatever its pixels are."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def dataset(photos, imagepivot, tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos") / "features"
    done = features(imagepivot, photos / "images", folder)
    assert "untrained: the weights of resnet50-pool (random:0) are random, the features mean nothing" in done.stderr
    return open_dataset(folder)


@pytest.fixture(scope="module")
def independent(photos) -> dict[str, np.ndarray]:
    """Features by torchvision alone, one image at a time, by image id."""
    steps = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(0)
        model = torchvision.models.resnet50(weights=None).eval()
        model.fc = torch.nn.Identity()
        vectors = {}
        for file in (photos / "images").iterdir():
            with Image.open(file) as image:
                vectors[file.stem] = model(steps(image.convert("RGB"))[None])[0].numpy()
    return vectors


def test_set_of_weights_taken_of_several_is_said_every_time(imagepivot, tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (300, 260), (200, 30, 40)).save(tmp_path / "images" / "a.png")
    state = torchvision.models.resnet50(weights=None).state_dict()
    path = tmp_path / "w.pth.tar"
    torch.save({"model": state, "model_ema": state | {"conv1.weight": 2 * state["conv1.weight"]}}, path)
    digests = set()
    for weights, taken, other in ((path, "model", "model_ema"), (f"{path}#model_ema", "model_ema", "model")):
        for _ in ("made", "nothing to do"):
            done = imagepivot("features", tmp_path / "images", tmp_path / taken, "--weights", weights, "--device", "cpu")
            assert done.stderr.count(f"using {taken}: choose another with --weights {path}#{other}") == 1
        digests.add(open_dataset(tmp_path / taken).manifest.parameters["extractor"]["weights"]["sha256"])
    assert len(digests) == 2


def test_features_are_torchvisions(dataset, independent):
    assert validate(dataset.folder.location) == []
    assert dataset.image_ids() == [name for number in range(2) for name in dataset.shard(number)["image_id"].to_pylist()]
    assert set(dataset.image_ids()) == set(independent)
    assert len(independent) == 18
    for image_id, feature in zip(dataset.image_ids(), dataset.numpy(), strict=True):
        expected = independent[image_id]
        assert feature.shape == expected.shape == (2048,)
        assert np.abs(feature - expected).max() < 1e-6 * np.abs(expected).max()


# --- images that cannot be used --------------------------------------------------------------------------------------


@pytest.fixture
def mixed(photos, tmp_path) -> Path:
    """Two good images, and one of every kind of bad image."""
    folder = tmp_path / "mixed"
    (folder / "deep" / "er").mkdir(parents=True)
    shutil.copy(photos / "images" / "cat.jpg", folder / "cat.jpg")
    shutil.copy(photos / "images" / "coins.png", folder / "deep" / "er" / "coins.png")
    whole = (photos / "images" / "flower.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "nothing.png").write_bytes(b"")
    (folder / "deep" / "page.jpg").write_text("<!DOCTYPE html><title>404</title>")
    (folder / "bomb.png").write_bytes(png(60_000, 60_000))
    (folder / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    return folder


EXPECTED = {
    "cut": ("cut.jpg", "decode", "truncated"),
    "nothing": ("nothing.png", "decode", "empty"),
    "page": ("deep/page.jpg", "decode", "not_an_image"),
    "bomb": ("bomb.png", "decode", "too_large"),
    "gone": ("gone.jpg", "read", "unreadable"),
}


def failures_of(folder) -> dict[str, tuple[str, str, str]]:
    rows = open_dataset(folder).failures().to_pylist()
    failures = {row["key"]: (row["uri"], row["stage"], row["reason"]) for row in rows}
    assert len(failures) == len(rows)
    return failures


def test_every_bad_image_is_one_failure_and_stops_nothing(mixed, dataset, imagepivot, tmp_path):
    done = features(imagepivot, mixed, tmp_path / "f", code=3)
    assert "5 inputs failed: 1 empty, 1 not_an_image, 1 too_large, 1 truncated, 1 unreadable" in done.stderr
    assert "Traceback" not in done.stderr
    assert failures_of(tmp_path / "f") == EXPECTED
    extracted = open_dataset(tmp_path / "f")
    assert sorted(extracted.image_ids()) == ["cat", "coins"]
    for name in ("cat", "coins"):
        assert np.array_equal(extracted.get(name)["feature"], dataset.get(name)["feature"])
    assert validate(tmp_path / "f") == []
    shown = imagepivot("inspect", tmp_path / "f").stdout
    assert "5 failures" in shown
    assert "deep/page.jpg" in shown
    features(imagepivot, mixed, tmp_path / "f", "--max-failures", "5", code=0)
