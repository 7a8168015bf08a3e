import pickle
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors import ExtractorRequest
from extractors.catalogue import ENTRIES, entry_of
from extractors.options import ExtractorOptions
from extractors.weights.resolve import Weights
from schemas.errors import UsageError


def described(name: str, **options) -> extractors.Description:
    """Describe an extractor as `describe` does, without weights."""
    request = ExtractorRequest(name, **options)
    module, settings = request._resolve()
    return module.describe(settings, Weights(state={}))


@pytest.mark.parametrize("name", [*ENTRIES])
def test_request_default_options_equal_no_options(name):
    assert described(name, dtype="float32", unpooled=False, keep_crops=False) == described(name)
    entry = entry_of(name)
    assert import_module(entry.module).describe(ExtractorOptions(entry.spec), Weights(state={})) == described(name)


@pytest.mark.parametrize("name", [*ENTRIES])
def test_request_dtype_changes_spec_and_fingerprint(name):
    whole, half = described(name), described(name, dtype="float16")
    assert (whole.spec.dtype, half.spec.dtype) == ("float32", "float16")
    assert half.parameters == {**whole.parameters, "dtype": "float16"}
    assert half.fingerprint != whole.fingerprint
    assert half.spec.to_json() == {**whole.spec.to_json(), "dtype": "float16"}
    assert ExtractorRequest(name, dtype="float16").spec() == half.spec == ExtractorRequest(name, dtype="float16").spec()


@pytest.mark.parametrize("regions", [extractors.RegionOptions(10, 100), extractors.RegionOptions(50, 50)])
def test_request_regions_keep_dtype(regions):
    assert described("faster-rcnn-36", dtype="float16", regions=regions).spec.dtype == "float16"


@pytest.mark.parametrize("name", ["vgg19-10crop", "vgg19-10crop-caffe"])
def test_request_keep_crops_changes_spec_and_fingerprint(name):
    mean, separate = described(name), described(name, keep_crops=True)
    assert (mean.spec.shape, separate.spec.shape) == ((4096,), (10, 4096))
    assert separate.parameters == {**mean.parameters, "separate": True}
    assert "each of ten crops" in separate.spec.source
    assert ExtractorRequest(name, keep_crops=True).spec() == separate.spec


@pytest.mark.parametrize("method", [ExtractorRequest.spec, ExtractorRequest.describe, ExtractorRequest.load])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet50-pool", {"dtype": "float64"}, "--dtype is 'float64', expected one of 'float32', 'float16'"),
        (
            "resnet50-pool",
            {"keep_crops": True},
            "needs one of the extractors vgg19-10crop, vgg19-10crop-caffe, not 'resnet50-pool': leave it out",
        ),
        ("resnet50-pool", {"unpooled": True}, "--unpooled works with timm:NAME only, not with extractor 'resnet50-pool'"),
        ("vgg19-grid", {"unpooled": True}, "vgg19-grid and resnet152-grid are always unpooled"),
        ("resnet", {"unpooled": True}, "there is no extractor 'resnet'"),
    ],
)
def test_request_unsupported_options_raise(method, name, options, message):
    with pytest.raises(UsageError, match=message):
        method(ExtractorRequest(name, **options))


# --- what holds for extractors of whole images --------------------------------------------------------------------------


def batch_of(extractor: extractors.Extractor, count: int) -> Any:
    noise = np.random.default_rng(3).integers(0, 256, (count, 90, 300, 3), dtype=np.uint8)
    return extractor.collate([extractor.preprocess(Image.fromarray(image)) for image in noise])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "distance", "tolerance"),
    [
        ("resnet50-pool", np.max, 0.05),
        pytest.param("resnet152-grid", np.mean, 0.05, marks=pytest.mark.cluster),
        ("timm:test_vit", np.max, 0.1),
        ("timm:test_resnet", np.max, 0.1),
    ],
)
def test_describe_equals_load_and_bf16_is_close(name, distance, tolerance):
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")
    whole, half = (extractors.load_extractor(name, weights="random:0", precision=precision) for precision in ("fp32", "bf16"))
    described = ExtractorRequest(name, weights="random:0").describe()
    assert pickle.loads(pickle.dumps(described)) == whole.description
    assert ExtractorRequest(whole.spec.name, weights="random:0").describe() == described
    others = [half.fingerprint, ExtractorRequest(name, weights="random:1").describe().fingerprint]
    assert whole.fingerprint not in others
    batch = batch_of(whole, 2)
    expected, found = whole.extract(batch), half.extract(batch)
    assert found.dtype == np.float32
    assert 0 < distance(np.abs(found - expected)) < tolerance * np.abs(expected).max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-5), ("tf32", 1e-2), ("bf16", 5e-2), ("fp16", 1e-2)])
@pytest.mark.parametrize(
    "name",
    [*(name for name in ENTRIES if name != "faster-rcnn-36"), "timm:test_vit", "timm:test_resnet", "timm:resnet18.a1_in1k"],
)
def test_gpu_agrees_with_cpu(name, precision, tolerance, tmp_path):
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="needs timm: pip install 'imagepivot[timm]'")
    state = import_module(entry_of(name).module).find_weights(ExtractorRequest(name).spec(), "random:0").state
    for key, values in state.items():
        if name == "resnet152-grid" and key.endswith("bn3.weight"):
            values *= 0.2  # Else the sums of 50 blocks are beyond what fp16 holds.
    torch.save(state, tmp_path / "w.pth")
    on_cpu, on_gpu = (
        extractors.load_extractor(name, weights=str(tmp_path / "w.pth"), device=device, precision=of)
        for device, of in (("cpu", "fp32"), ("cuda", precision))
    )
    batch = batch_of(on_cpu, 2)
    expected = on_cpu.extract(batch)
    assert np.abs(on_gpu.extract(batch) - expected).max() < tolerance * np.abs(expected).max()
