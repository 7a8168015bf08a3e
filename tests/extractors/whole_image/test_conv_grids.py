import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

import extractors
from extractors.whole_image.conv_grids import ARCHITECTURES, FeatureMapExtractor
from tests.threads import threads_of_torch

NAMES = tuple(ARCHITECTURES)
WIDTHS = {"vgg19-grid": 512, "resnet152-grid": 2048}
MODELS = {"vgg19-grid": torchvision.models.vgg19, "resnet152-grid": torchvision.models.resnet152}


def seeded(name: str) -> torch.nn.Module:
    """Make torchvision's own model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name](weights=None).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=NAMES)
def pair(request) -> tuple[FeatureMapExtractor, torch.nn.Module]:
    """An extractor, and torchvision's model with the same seed."""
    return extractors.load_extractor(request.param, weights="random:0"), seeded(request.param)


@pytest.fixture(scope="module")
def images(photos) -> list[Image.Image]:
    noise = np.random.default_rng(3).integers(0, 256, (90, 300, 3), dtype=np.uint8)
    return [extractors.decode_image((photos / "images" / "chelsea.png").read_bytes()), Image.fromarray(noise)]


def independent(model: torch.nn.Module, name: str, images: list[Image.Image]) -> np.ndarray:
    """Run the layers of torchvision's model by hand, on its own transforms: cell by cell, row after row."""
    steps = [transforms.Resize((448, 448)), transforms.ToTensor()]
    steps.append(transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    values = torch.stack([transforms.Compose(steps)(image) for image in images])
    with torch.inference_mode():
        if name == "vgg19-grid":
            for layer in model.features:
                values = layer(values)
        else:
            values = model.maxpool(model.relu(model.bn1(model.conv1(values))))
            for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
                values = stage(values)
    rows = [[values[:, :, y, x].numpy() for x in range(values.shape[3])] for y in range(values.shape[2])]
    return np.stack([cell for row in rows for cell in row], axis=1)


@pytest.mark.cluster
def test_extract_equals_torchvision_layers(pair, images):
    extractor, model = pair
    name = extractor.spec.name
    pixels = [extractor.preprocess(image) for image in images]
    found = extractor.extract(extractor.collate(pixels))
    assert (found.dtype, found.shape) == (np.float32, (2, 196, WIDTHS[name]))
    assert found.shape[1:] == extractor.spec.shape
    expected = independent(model, name, images)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    # The same bytes, whatever the batch and the threads.
    with threads_of_torch(3):
        again = extractor.extract(pixels[1][None])
    assert again.tobytes() == found[1:].tobytes()


def meta_state(name: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        return ARCHITECTURES[name].build().state_dict()


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_read_drops_layers_after_feature_map(tmp_path, name, suffix):
    with torch.device("meta"):
        names = MODELS[name](weights=None).state_dict()
    state, path = {key: torch.full((2,), float(n)) for n, key in enumerate(names)}, tmp_path / f"w{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    found = ARCHITECTURES[name].read(path)
    assert sorted(found) == sorted(meta_state(name))
    assert all(torch.equal(found[key], state[key]) for key in found)
