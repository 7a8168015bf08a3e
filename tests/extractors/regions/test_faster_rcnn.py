import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

import extractors
from extractors import DecodeError, ExtractorRequest, decode_image
from extractors.options import ExtractorOptions, RegionOptions
from extractors.regions import faster_rcnn
from extractors.regions.bottom_up import network
from extractors.regions.bottom_up.preprocessing import send
from extractors.regions.faster_rcnn import ARCHITECTURE, FasterRCNNRegions
from extractors.weights.resolve import resolve_weights
from tests.extractors.regions import reference_detector
from tests.fake_gpu import fake_gpu
from tests.threads import threads_of_torch

THIN = (2000, 20)
"""Width and height of a picture with more than a hundred proposals, whose feature map has one row and is quick to compute."""
EMPTY = (2000, 16)
"""Width and height of a picture without proposals: boxes must be higher than 16 pixels."""
PROPOSALS = 12
"""Proposals per image in most tests: more than a pass of the last stage takes. Each costs a fortieth of a second."""


@pytest.fixture(scope="module")
def weights():
    """The weights of seed 0, drawn once because that takes seconds."""
    return resolve_weights("random:0", ARCHITECTURE)


@pytest.fixture(autouse=True)
def _weights_are_drawn_once(monkeypatch, weights):
    find_weights = faster_rcnn.find_weights
    monkeypatch.setattr(
        faster_rcnn, "find_weights", lambda spec, request: weights if request == "random:0" else find_weights(spec, request)
    )


@pytest.fixture(autouse=True)
def _few_proposals(request, monkeypatch):
    if "gpu" not in request.keywords:
        monkeypatch.setattr(network, "PROPOSALS", PROPOSALS)


@pytest.fixture(scope="module")
def extractor(weights):
    return FasterRCNNRegions(settings(), weights, torch.device("cpu"))


@pytest.fixture(scope="module")
def state(weights):
    return weights.state


@pytest.fixture(scope="module")
def thin(extractor):
    """The regions of the thin picture."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(network, "PROPOSALS", PROPOSALS)
        return regions(extractor, picture(*THIN))


def settings(precision="fp32", **regions):
    options = RegionOptions(**regions)
    return ExtractorOptions(ExtractorRequest("faster-rcnn-36").spec(), precision, regions=options)


def picture(width, height, seed=0):
    """Make coarse noise of any size, smooth enough to have objects."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def regions(extractor, *images):
    return extractor.extract_columns(extractor.collate([extractor.preprocess(image) for image in images]))


def proposed(extractor, pixels):
    """Return the proposals of an image, [P, 4], and its feature map."""
    with torch.inference_mode():
        image = send(pixels, torch.device("cpu"))
        maps = extractor._maps([image])
        boxes, are_kept = network.suppress(*extractor._propose(maps, [image]))
    return boxes[0, : int(are_kept.sum())], maps


def check_agrees(found, expected, *, image=0, tolerance=1e-5):
    """Check that the boxes are the same set, and that matched boxes have the same features and classes."""
    count = int(found["num_regions"][image])
    assert count == len(expected["boxes"])
    boxes = found["boxes"][image, :count]
    sides = np.minimum(boxes[:, None, 2:], expected["boxes"][:, 2:]) - np.maximum(boxes[:, None, :2], expected["boxes"][:, :2])
    shared = (sides + 1).clip(0).prod(axis=2)
    areas, others = ((b[:, 2:] - b[:, :2] + 1).prod(axis=1) for b in (boxes, expected["boxes"]))
    overlaps = shared / (areas[:, None] + others - shared)
    match = overlaps.argmax(axis=1)
    assert sorted(match) == list(range(count))
    assert overlaps.max(axis=1).min() > 0.999
    size = expected["features"].max()
    np.testing.assert_allclose(found["features"][image, :count], expected["features"][match], rtol=0, atol=tolerance * size)
    for label in ("class", "attribute"):
        np.testing.assert_array_equal(found[f"{label}_ids"][image, :count], expected[f"{label}_ids"][match])
        np.testing.assert_allclose(found[f"{label}_scores"][image, :count], expected[f"{label}_scores"][match], atol=1e-4)


def check_is_empty(found, *, image=0):
    assert found["num_regions"][image] == 0
    assert not any(values[image].any() for name, values in found.items() if name not in ("width", "height"))


@pytest.mark.slow
def test_preprocess_copies_pixels_and_refuses_thin_images(extractor):
    image = picture(40, 30)
    pixels = extractor.preprocess(image)
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 30, 40))
    np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), np.asarray(image))
    for size, resized in (((1, 10000), "0×1000"), ((1, 500), "2×1000"), ((2000, 5), "1000×2")):
        with pytest.raises(DecodeError, match=rf"resized to {resized}, expected .* no side under 3"):
            extractor.preprocess(picture(*size))


@pytest.mark.slow
def test_extract_thin_image_equals_reference(state, thin):
    expected = reference_detector.detect(state, np.asarray(picture(*THIN)), proposals=PROPOSALS)
    assert len(expected["proposals"]) > 100
    assert len(expected["boxes"]) == PROPOSALS
    check_agrees(thin, expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (300, 10), (3, 1000)])
def test_extract_without_proposals_is_empty(extractor, size):
    found = regions(extractor, picture(*size))
    assert (found["width"].tolist(), found["height"].tolist()) == ([size[0]], [size[1]])
    check_is_empty(found)
    assert extractor.extract([]).shape == (0, 36, 2048)


@pytest.mark.cluster
def test_extract_does_not_depend_on_batch_and_threads(extractor):
    images = [picture(*THIN), picture(*EMPTY), picture(1000, 18)]
    together = regions(extractor, *images)
    with threads_of_torch(torch.get_num_threads() + 2):
        alone = [regions(extractor, image) for image in images]
    for name, values in together.items():
        assert values.tobytes() == b"".join(found[name].tobytes() for found in alone)
    assert (together["num_regions"] > 0).tolist() == [True, False, True]
    np.testing.assert_array_equal(extractor.extract([extractor.preprocess(images[0])])[0], together["features"][0])


@pytest.mark.slow
def test_extract_adaptive_number_of_regions():
    options = RegionOptions(min_regions=2, max_regions=4, score_threshold=0.01)
    adaptive = extractors.load_extractor("faster-rcnn-36", weights="random:0", regions=options)
    assert (adaptive.spec.name, adaptive.spec.shape) == ("faster-rcnn-2-4", (4, 2048))
    assert "2 to 4 best regions" in adaptive.spec.source
    found = regions(adaptive, picture(*THIN))
    assert 2 <= found["num_regions"][0] <= 4
    assert found["features"].shape == (1, 4, 2048)


@pytest.mark.cluster
def test_extract_on_fake_gpu_equals_cpu(extractor, weights):
    images = [picture(*THIN), picture(*EMPTY), picture(1000, 18), picture(4000, 40, seed=1), picture(*THIN, seed=2)]
    expected = regions(extractor, *images)
    assert (expected["num_regions"] > 0).tolist() == [True, False, True, True, True]
    with fake_gpu() as gpu:
        there = FasterRCNNRegions(settings(), weights, torch.device("cuda", 0))
        gpu.reset()
        found = regions(there, *images)
        assert_few_launches(gpu, len(images))
        gpu.reset()
        alone = regions(there, images[0])
        assert_few_launches(gpu, 1)
        check_is_empty(regions(there, images[1]))
        assert there.extract([]).shape == (0, 36, 2048)
    check_is_empty(found, image=1)
    for i in (0, 2, 3, 4):
        check_agrees(found, used(expected, i), image=i)
    check_agrees(alone, used(expected, 0))


@pytest.mark.cluster
@pytest.mark.parametrize(("precision", "tolerance"), [("tf32", 1e-5), ("bf16", 0.02), ("fp16", 0.02)])
def test_extract_on_fake_gpu_in_other_precisions_is_close(weights, thin, precision, tolerance):
    with fake_gpu():
        found = regions(FasterRCNNRegions(settings(precision), weights, torch.device("cuda", 0)), picture(*THIN))
    np.testing.assert_array_equal(found["boxes"], thin["boxes"])
    np.testing.assert_allclose(found["features"], thin["features"], rtol=0, atol=tolerance * thin["features"].max())


def used(found, image):
    """Return the rows of an image that are in use."""
    return {name: values[image, : found["num_regions"][image]] for name, values in found.items() if values.ndim > 1}


def assert_few_launches(gpu, images):
    assert gpu.launches.total() <= 1000 * images, gpu.report()
    # Whether the boxes of a block, and of the classes, are settled, whether there are enough, and the result.
    assert gpu.waits.total() <= 6, gpu.report()
    assert sum(number for event, number in gpu.waits.items() if event.operation == "copy to the CPU") <= 2, gpu.report()
    assert [event.operation for event in gpu.copies.elements()] == ["copy to the GPU"] * images, gpu.report()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_extract_launches_per_image_fall_with_batch_size(weights, precision):
    """16 images of three sizes. Convolutions that give zeros cost no time, and do not change the launches."""
    images = [picture(*[THIN, (20, 2000), (1000, 18)][i % 3], seed=i) for i in range(16)]
    with fake_gpu(hollow=True) as gpu:
        there = FasterRCNNRegions(settings(precision), weights, torch.device("cuda", 0))
        gpu.reset()
        regions(there, images[0])
        assert gpu.launches.total() <= 1000, gpu.report()
        alone = gpu.launches.total()
        gpu.reset()
        regions(there, *images)
        assert_few_launches(gpu, len(images))
        assert gpu.launches.total() <= 16 * alone / 4, gpu.report()


@pytest.mark.cluster
def test_extract_many_shared_bins_are_split(extractor, thin, monkeypatch):
    monkeypatch.setattr(faster_rcnn, "_SHARED_BINS", 1)
    for name, values in regions(extractor, picture(*THIN)).items():
        np.testing.assert_allclose(values, thin[name], rtol=0, atol=1e-6 * max(1, abs(values).max()), err_msg=name)


@pytest.mark.cluster
def test_out_of_memory_in_last_stage_halves_the_images(extractor, monkeypatch):
    images = [extractor.preprocess(picture(*THIN, seed=seed)) for seed in range(3)]
    expected = torch.cat([extractor._detect_on_gpu([image]) for image in images])
    run = extractor._head

    def runs_out(pooled):
        if len(pooled) > PROPOSALS:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return run(pooled)

    monkeypatch.setattr(extractor, "_head", runs_out)
    assert torch.equal(extractor._detect_on_gpu(images), expected)


@pytest.mark.slow
def test_describe_equals_load_and_is_picklable(extractor, weights):
    description = ExtractorRequest("faster-rcnn-36", weights="random:0").describe()
    assert pickle.loads(pickle.dumps(description)) == extractor.description
    assert (description.kind, description.batch_size) == ("regions", 2)
    assert (description.classes, description.attributes) == (1600, 400)

    def fingerprint(*precision: str, **regions) -> str:
        return faster_rcnn.describe(settings(*precision, **regions), weights).fingerprint

    for options in ({"min_regions": 10, "max_regions": 100}, {"score_threshold": 0.3}, {"backend": "detectron2"}):
        assert fingerprint(**options) != description.fingerprint
    assert fingerprint(class_names="names.txt") == description.fingerprint


@pytest.mark.cluster
def test_extract_photograph_equals_reference(extractor, state, photos, monkeypatch):
    """Compare all 300 proposals, and the 36 best regions among 40 of them: features of 300 would take a minute."""
    image = decode_image((photos / "images" / "china.jpg").read_bytes())
    expected = reference_detector.detect(state, np.asarray(image), proposals=40)
    assert len(expected["proposals"]) == 300
    assert len(set(expected["class_ids"].tolist())) > 1
    monkeypatch.setattr(network, "PROPOSALS", 300)
    pixels = extractor.preprocess(image)
    proposals = proposed(extractor, pixels)[0].numpy()
    distances = np.abs(proposals[:, None] - expected["proposals"]).max(axis=2)
    assert distances.min(axis=1).max() < 1e-2
    assert sorted(distances.argmin(axis=1)) == list(range(300))
    monkeypatch.setattr(network, "PROPOSALS", 40)
    check_agrees(regions(extractor, image), expected)


@pytest.mark.cluster
def test_bf16_is_close_with_equal_proposals(extractor):
    image = picture(*THIN)
    half = extractors.load_extractor("faster-rcnn-36", weights="random:0", precision="bf16")
    assert half.fingerprint != extractor.fingerprint
    (found, _), (boxes, maps) = (proposed(e, e.preprocess(image)) for e in (half, extractor))
    assert torch.equal(found, boxes)
    rough, fine = (e._head(reference_pool(maps, boxes[:40])) for e in (half, extractor))
    assert 0 < (rough - fine).abs().max() < 0.05 * fine.max()


def reference_pool(maps, boxes):
    return torch.stack([reference_detector.roi_pool(maps[0], box) for box in boxes.numpy()])


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_gpu_agrees_with_cpu(extractor, precision):
    images = [picture(640, 480), picture(500, 375, seed=1)]
    on_gpu = extractors.load_extractor("faster-rcnn-36", weights="random:0", device="cuda", precision=precision)
    expected, found = regions(extractor, *images), regions(on_gpu, *images)
    assert found["num_regions"].tolist() == expected["num_regions"].tolist()
    if precision == "fp32":
        for i in range(len(images)):
            check_agrees(found, {name: values[i] for name, values in expected.items()}, image=i)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_agrees(extractor):
    compiled = extractors.load_extractor("faster-rcnn-36", weights="random:0", device="cuda", compile=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = regions(compiled, picture(640, 480))
    expected = regions(extractor, picture(640, 480))
    check_agrees(found, {name: values[0] for name, values in expected.items()})
    assert compiled.parameters["compiled"] is True
