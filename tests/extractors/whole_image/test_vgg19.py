import functools
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file
from torchvision import transforms

import extractors
from extractors import ExtractorRequest
from extractors.options import ExtractorOptions
from extractors.weights.resolve import Weights
from extractors.whole_image import vgg19
from extractors.whole_image.vgg19 import VARIANTS, VGG19TenCrop
from schemas.errors import InputError
from tests.extractors.images.test_preprocessing import bilinear
from tests.extractors.weights.test_caffemodel import net
from tests.threads import threads_of_torch

NAMES = tuple(VARIANTS)
# A photograph, and noise whose resized width of 259 is odd, with a centre that the two variants place differently.
ODD_WH = (85, 84)


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Weights of the usual sizes; torchvision takes seconds to draw its own, and does so in one test."""
    random = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        model = vgg19.build_vgg19()
    for layer in model.to_empty(device="cpu").requires_grad_(False).modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            bound = (6 / layer.weight[0].numel()) ** 0.5
            layer.weight.uniform_(-bound, bound, generator=random)
            layer.bias.uniform_(-0.1, 0.1, generator=random)
    return Weights(model.state_dict(), random="random:0")


@pytest.fixture(scope="module")
def images(photos) -> list[Image.Image]:
    odd = np.random.default_rng(5).integers(0, 256, (*ODD_WH[::-1], 3), dtype=np.uint8)
    return [extractors.decode_image((photos / "images" / "chelsea.png").read_bytes()), Image.fromarray(odd)]


@pytest.fixture(scope="module")
def loaded(weights) -> dict[str, VGG19TenCrop]:
    """Both extractors, sharing the memory of their weights."""
    return {
        name: VGG19TenCrop(ExtractorOptions(ExtractorRequest(name).spec()), weights, torch.device("cpu")) for name in VARIANTS
    }


@pytest.fixture(scope="module")
def pixels(loaded, images) -> dict[str, list[torch.Tensor]]:
    return {name: [extractor.preprocess(image) for image in images] for name, extractor in loaded.items()}


@pytest.fixture(scope="module")
def features(loaded, pixels):
    """A function that extracts only the photograph, [1, 4096], and only once: an image takes seconds."""
    return functools.cache(lambda name: loaded[name].extract(loaded[name].collate(pixels[name][:1])))


@pytest.fixture(scope="module")
def model(weights) -> torch.nn.Module:
    """Torchvision's own model with the same weights, up to the ReLU after its second fully connected layer."""
    with torch.device("meta"):
        model = torchvision.models.vgg19(weights=None)
    model.classifier = model.classifier[:5]
    model.load_state_dict(weights.state, assign=True)
    return model.eval().requires_grad_(False).to(memory_format=torch.channels_last)


def torchvision_crops(image: Image.Image) -> torch.Tensor:
    """Make crops with torchvision's own transforms: float32 [10, 3, 224, 224]."""
    to_input = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    crops = transforms.Compose([transforms.Resize(256), transforms.TenCrop(224)])(image)
    return torch.stack([to_input(crop) for crop in crops])


def caffe_crops(image: Image.Image) -> torch.Tensor:
    """Make crops by the steps of the Caffe script in plain numpy: float32 [10, 3, 224, 224]."""
    rgb = np.asarray(image)
    height, width = rgb.shape[:2]
    height, width = (256, 256 * width // height) if height <= width else (256 * height // width, 256)
    bgr = np.rint(bilinear(rgb, height, width))[:, :, ::-1] - [103.939, 116.779, 123.68]
    starts = [(0, 0), (0, width - 224), (height - 224, 0), (height - 224, width - 224)]
    starts.append((int(height / 2 - 112), int(width / 2 - 112)))
    crops = [bgr[top : top + 224, left : left + 224] for top, left in starts]
    crops += [crop[:, ::-1] for crop in crops]
    return torch.from_numpy(np.stack(crops).transpose(0, 3, 1, 2).astype(np.float32))


REFERENCES = {"vgg19-10crop": torchvision_crops, "vgg19-10crop-caffe": caffe_crops}


# --- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_extract_equals_torchvision(model, images, features):
    found = features("vgg19-10crop")
    assert (found.dtype, found.shape) == (np.float32, (1, 4096))
    with torch.inference_mode():
        expected = torch.stack([model(crop[None])[0] for crop in torchvision_crops(images[0])]).mean(0).numpy()
    assert np.abs(found[0] - expected).max() < 1e-4 * expected.max()
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert not np.allclose(np.linalg.norm(found, axis=1), 1)


@pytest.fixture
def separate(loaded, weights):
    """A function that returns an extractor of separate crops with the layers of the loaded one."""

    def make(name: str, **options) -> VGG19TenCrop:
        settings = ExtractorOptions(ExtractorRequest(name, keep_crops=True, **options).spec(), keep_crops=True)
        extractor = VGG19TenCrop(settings, weights, torch.device("cpu"))
        extractor._convolutions, extractor._connected = loaded[name]._convolutions, loaded[name]._connected
        return extractor

    return make


@pytest.mark.cluster
def test_extract_mean_of_kept_crops_equals_feature(separate, pixels, features):
    name = "vgg19-10crop"
    crops = separate(name).extract(pixels[name][:1])
    assert (crops.dtype, crops.shape) == (np.float32, (1, 10, 4096))
    assert np.unique(crops[0], axis=0).shape == (10, 4096)
    found = crops.mean(axis=1, dtype=np.float64).astype(np.float32)
    np.testing.assert_array_max_ulp(found, features(name), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_extract_kept_crops_order(name, separate, monkeypatch):
    extractor = separate(name)
    monkeypatch.setattr(extractor, "_convolve", lambda crops: torch.zeros(len(crops), 25088))
    monkeypatch.setattr(extractor, "_connected", lambda maps: torch.arange(10.0)[:, None].expand(-1, 4096))
    with threads_of_torch(1):
        found = extractor.extract([extractor.preprocess(Image.new("RGB", (256, 256)))])
    assert found[0, :, 0].tolist() == list(range(10))


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_vgg19_connected_layers_do_not_depend_on_threads_and_batch(loaded, monkeypatch, pixels, threads):
    extractor = loaded["vgg19-10crop"]
    monkeypatch.setattr(extractor, "_convolutions", PoolOnly())
    expected = extractor.extract(pixels["vgg19-10crop"])
    with threads_of_torch(threads):
        found = extractor.extract([*pixels["vgg19-10crop"][::-1], pixels["vgg19-10crop"][0]])
    assert found.tobytes() == expected[[1, 0, 0]].tobytes()


class PoolOnly(torch.nn.Module):
    """Stands in for the convolutions: repeats the 7×7 means of the input."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(values, 7).repeat(1, 171, 1, 1)[:, :512]


class Recorder(torch.nn.Module):
    """Stands in for the convolutions: records its input, and returns the mean of each channel in the first values."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.inputs.append(values.clone())
        maps = torch.zeros(len(values), 512, 7, 7)
        maps[:, 0, 0, :3] = values.mean(dim=(2, 3))
        return maps


@pytest.fixture
def recorded(loaded, monkeypatch):
    """A function that returns the inputs of the model for images, [10 B, 3, 224, 224], in one thread, without running the model."""

    def record(name: str, batch: list[torch.Tensor]) -> torch.Tensor:
        recorder = Recorder()
        monkeypatch.setattr(loaded[name], "_convolutions", recorder)
        monkeypatch.setattr(loaded[name], "_connected", lambda maps: maps[:, :4096])
        with threads_of_torch(1):
            loaded[name].extract(batch)
        return torch.cat(recorder.inputs)

    return record


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size_wh", [(256, 256), (224, 300), (300, 224), (1, 1), (3, 2), (20, 500), (500, 21), (257, 256)])
def test_crops_equal_references(name, size_wh, loaded, recorded):
    noise = np.random.default_rng(1).integers(0, 256, (*size_wh[::-1], 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    found, expected = recorded(name, [loaded[name].preprocess(image)]), REFERENCES[name](image)
    if name == "vgg19-10crop":
        expected = expected[[0, 1, 2, 3, 4, 6, 5, 8, 7, 9]]  # torchvision lists the mirrored corners in another order
    assert found.shape == (10, 3, 224, 224)
    different = ((found - expected).abs() > 1e-4).float().mean()
    # A tie of the formula in float64 may fall to the other side, by one level.
    assert different < (1e-3 if name == "vgg19-10crop-caffe" else 1e-9)
    assert (found - expected).abs().max() < 1.001


# --- weights -----------------------------------------------------------------------------------------------------------


def tiny_state() -> dict[str, torch.Tensor]:
    """Return torchvision's names with small tensors, all different."""
    with torch.device("meta"):
        names = list(torchvision.models.vgg19(weights=None).state_dict())
    return {name: torch.arange(3.0) + index for index, name in enumerate(names)}


def without_last(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if not name.startswith("classifier.6")}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def written(state: dict[str, torch.Tensor], path) -> Path:
    save_file(state, path) if path.suffix == ".safetensors" else torch.save(state, path, _use_new_zipfile_serialization=False)
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_read_torchvision_file_drops_last_layer(tmp_path, name, suffix):
    state, read = tiny_state(), VARIANTS[name].architecture.read
    assert_same(read(written(state, tmp_path / f"w{suffix}")), without_last(state))
    assert_same(read(written(without_last(state), tmp_path / f"other{suffix}")), without_last(state))
    # Jcjohnson's conversion of 2016 is like this: dropout came first, so layers had other numbers.
    old = {key.replace("classifier.0", "classifier.1").replace("classifier.3", "classifier.4"): v for key, v in state.items()}
    assert_same(read(written(old, tmp_path / f"old{suffix}")), without_last(state))


CAFFE_NAMES = [f"conv{block}_{i}" for block, count in enumerate((2, 2, 4, 4, 4), 1) for i in range(1, count + 1)]
CAFFE_NAMES += ["fc6", "fc7", "fc8"]


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_read_caffemodel_renames_layers(tmp_path, old, last):
    """The order of Caffe's layers in the net is that of torchvision's in the state dict."""
    state = tiny_state()
    values = iter(state.values())
    layers = {name: [next(values).numpy(), next(values).numpy()] for name in CAFFE_NAMES}
    if not last:
        del layers["fc8"]
    (tmp_path / "w.caffemodel").write_bytes(net(layers, old=old))
    assert_same(VARIANTS["vgg19-10crop-caffe"].architecture.read(tmp_path / "w.caffemodel"), without_last(state))


def test_describe_caffemodel_for_torchvision_extractor_raises(tmp_path):
    (tmp_path / "w.caffemodel").write_bytes(b"\x0a\x03net")
    with pytest.raises(InputError, match=r"is a Caffe model, .*: use it with --extractor vgg19-10crop-caffe"):
        ExtractorRequest("vgg19-10crop", weights=str(tmp_path / "w.caffemodel")).describe()


def test_caffe_architecture_refuses_weights_of_torchvision():
    ours, caffe = (VARIANTS[name].architecture for name in NAMES)
    assert list(caffe.refused) == [ours.hash_prefix]
    assert "Use the extractor vgg19-10crop with them" in caffe.refused[ours.hash_prefix]
