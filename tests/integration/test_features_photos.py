"""resnet50-pool through the whole pipeline, on photographs, against torchvision alone; and images that cannot be used."""

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
