import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors import ExtractorRequest
from schemas.errors import UsageError
from tests.extractors.images.test_preprocessing import noise

timm = pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")

from timm.data import create_transform, resolve_model_data_config  # noqa: E402

from tests.extractors.whole_image.test_timm_models import seeded  # noqa: E402

CONVOLUTIONAL, TRANSFORMER = "test_resnet.r160_in1k", "test_vit.r160_in1k"


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    return [noise(*size) for size in ((170, 160), (300, 90), (161, 200))]


def unpooled(name: str, images: list[Image.Image]) -> torch.Tensor:
    """Run timm's own model and transform."""
    model = seeded(name)
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    with torch.inference_mode():
        return model.forward_features(torch.stack([transform(image) for image in images]))


def cells(name: str, images: list[Image.Image]) -> np.ndarray:
    extractor = extractors.load_extractor(f"timm:{name}", weights="random:0", unpooled=True)
    found = extractor.extract(extractor.collate([extractor.preprocess(image) for image in images]))
    assert (found.dtype, found.shape[1:]) == (np.float32, extractor.spec.shape)
    return found


@pytest.mark.slow
def test_unpooled_convolutional_network_is_row_major(images):
    found, expected = cells(CONVOLUTIONAL, images), unpooled(CONVOLUTIONAL, images).numpy()
    assert (found.shape, expected.shape) == ((3, 25, 96), (3, 96, 5, 5))
    for y in range(5):
        for x in range(5):
            assert np.abs(found[:, 5 * y + x] - expected[:, :, y, x]).max() < 1e-5 * np.abs(expected).max()
    pooled = extractors.load_extractor(f"timm:{CONVOLUTIONAL}", weights="random:0")
    vectors = pooled.extract(pooled.collate([pooled.preprocess(image) for image in images]))
    assert np.abs(found.mean(axis=1) - vectors).max() < 1e-5 * np.abs(vectors).max()


@pytest.mark.parametrize(
    ("name", "first", "shape"),
    [
        (TRANSFORMER, 1, (101, 64)),
        *(
            pytest.param(name, first, shape, marks=pytest.mark.cluster)
            for name, first, shape in (
                ("deit_tiny_distilled_patch16_224", 2, (198, 192)),  # Class and distillation.
                ("vit_small_patch16_dinov3", 5, (261, 384)),  # Class and four registers.
                ("mixer_s32_224", 0, (49, 512)),
            )
        ),
        pytest.param("swin_tiny_patch4_window7_224", 0, (7, 7, 768), marks=pytest.mark.slow),  # Row-major.
    ],
)
def test_unpooled_prefix_tokens_are_dropped(name, first, shape, images):
    found, expected = cells(name, images[:2]), unpooled(name, images[:2]).numpy()
    assert expected.shape == (2, *shape)
    expected = expected.reshape(2, -1, shape[-1])[:, first:]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_unpooled_changes_spec_and_fingerprint():
    name = f"timm:{TRANSFORMER}"
    pooled, grid = (ExtractorRequest(name, weights="random:0", unpooled=grid).describe() for grid in (False, True))
    assert (pooled.spec.shape, grid.spec.shape) == ((64,), (100, 64))
    assert grid.parameters == {**pooled.parameters, "grid": [10, 10]}
    assert grid.spec.name == name
    assert grid.spec.source.endswith("not pooled, 10x10 in row-major order")
    assert grid == extractors.load_extractor(name, weights="random:0", unpooled=True).description
    assert ExtractorRequest(name, unpooled=True).spec() == grid.spec


@pytest.mark.slow
@pytest.mark.parametrize(("name", "shape"), [("hiera_tiny_224", "49, 768"), ("pit_ti_224", "1, 256")])
def test_unpooled_model_with_unknown_order_of_tokens_raises(name, shape):
    with pytest.raises(UsageError, match=rf"timm's model '{name}\..*' returns \[1, {shape}\] before its pooling"):
        ExtractorRequest(f"timm:{name}", unpooled=True).spec()
