from dataclasses import replace

import numpy as np
import pytest

from extractors import ExtractorRequest
from pipelines.doctor import rates
from pipelines.doctor.model import ModelCheck
from pipelines.inputs.images import open_images
from schemas.errors import InputError, UsageError
from tests.fake_extractors import ColourExtractor
from tests.pipelines.doctor.fake_gpus import FakeCuda

REQUEST = ExtractorRequest("resnet50-pool", weights="random:3")


@pytest.fixture
def loads(monkeypatch):
    """Extractors of colours in place of all others; gives the requests and devices that were loaded."""
    asked = []

    def load(request, device):
        asked.append((request, device))
        return ColourExtractor()

    monkeypatch.setattr("extractors.ExtractorRequest.load", load)
    monkeypatch.setattr(rates, "_SECONDS", 0.0)
    return asked


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The folder of weights that were fetched, which is not there yet."""
    home = tmp_path_factory.mktemp("torch")
    monkeypatch.setenv("TORCH_HOME", str(home))
    return home / "hub" / "checkpoints"


def test_weights_that_were_fetched(cache, monkeypatch):
    (found,) = ModelCheck(None, None).weights()
    assert (found.status, found.found) == ("ok", f"none in {str(cache)!r}")
    cache.mkdir(parents=True)
    (cache / "resnet50-0676ba61.pth").write_bytes(b"12345")
    (cache / ".tmp-1").write_bytes(b"123")
    (found,) = ModelCheck(None, None).weights()
    assert (found.status, found.values) == ("ok", {"folder": str(cache), "files": {"resnet50-0676ba61.pth": 5}})
    monkeypatch.setattr("os.access", lambda path, mode: False)
    (found,) = ModelCheck(None, None).weights()
    assert (found.status, "set TORCH_HOME" in found.advice) == ("note", True)


@pytest.fixture
def weights(tmp_path):
    """A function that returns a request for a small model with a file of weights."""
    import timm
    import torch

    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), tmp_path / "w.pth")
    return str(tmp_path / "w.pth")


@pytest.mark.slow
def test_weights_that_are_right(weights):
    request = ExtractorRequest("timm:test_resnet.r160_in1k", weights=weights)
    _, found = ModelCheck(request, None).weights()
    assert found.status == "ok"
    assert found.values["fingerprint"] == request.describe().fingerprint
    assert found.values["sha256"] == request.describe().parameters["weights"]["sha256"]
    assert found.values["weights"] == weights


def test_untrained_weights_are_a_note(monkeypatch):
    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: description(untrained=True))
    _, found = ModelCheck(REQUEST, None).weights()
    assert (found.status, found.found) == ("note", "random:3 fit fake (SHA-256 of the tensors abcdefabcdef…): untrained")


def description(*, untrained: bool):
    own = ColourExtractor().description
    return replace(own, parameters={"weights": {"sha256": "abcdef" * 10 + "abcd"}, "untrained": untrained})


@pytest.mark.slow
def test_weights_of_another_model(weights, loads):
    check = ModelCheck(ExtractorRequest("resnet50-pool", weights=weights), "cpu")
    _, found = check.weights()
    assert found.status == "problem"
    assert "are not this model's" in found.found
    _, _, bound = check.rates(None, whole=True)  # Rates do not depend on them.
    assert bound.subject == "bottleneck"
    assert [(request.weights, device) for request, device in loads] == [("random:0", "cpu")]


def test_weights_that_are_nowhere(tmp_path):
    _, found = ModelCheck(replace(REQUEST, weights=str(tmp_path / "none.pth")), None).weights()
    assert found.status == "problem"
    assert "there is no weights file" in found.found


def test_an_extractor_that_does_not_exist_is_said_once(loads):
    check = ModelCheck(ExtractorRequest("resnet51-pool"), "cpu")
    with pytest.raises(UsageError, match="there is no extractor 'resnet51-pool'"):
        list(check.weights())
    assert list(check.rates(None, whole=True)) == []
    assert loads == []


def test_without_an_extractor_untrained_weights_serve_to_measure(loads):
    check = ModelCheck(None, None)
    assert [finding.subject for finding in check.weights()] == ["fetched"]
    assert [finding.subject for finding in check.rates(None, whole=True)] == ["decoding", "model", "bottleneck"]
    assert loads == [(ExtractorRequest("resnet50-pool", weights="random:0", precision="fp32"), "auto")]


@pytest.mark.parametrize(("device", "asked"), [(None, ["cpu", "cuda:0", "cuda:1"]), ("cuda:1", ["cpu", "cuda:1"]), ("cpu", [])])
def test_the_extractor_runs_on_each_gpu_in_its_precision(monkeypatch, loads, device, asked):
    cuda = FakeCuda(2, held={0: 1, 1: 1})
    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: description(untrained=False))
    request = replace(REQUEST, precision="fp16", compile=True)
    check = ModelCheck(request, device, cuda)
    list(check.weights())
    found = [finding for finding in check.devices() if finding.subject.startswith("cuda:") and "differs" in finding.found]
    assert [(request.precision, request.compile, device) for request, device in loads] == [
        ("fp32", False, name) if name == "cpu" else ("fp16", True, name) for name in asked
    ]
    assert [(finding.subject, finding.status) for finding in found] == [(name, "ok") for name in asked[1:]]


def test_without_an_extractor_a_small_network_runs_on_each_gpu(monkeypatch, loads):
    from pipelines.doctor import devices
    from tests.pipelines.doctor.fake_gpus import fake_forward

    cuda = FakeCuda(1)
    monkeypatch.setattr(devices, "_small_network", lambda: fake_forward(cuda))
    *_, found = ModelCheck(None, None, cuda).devices()
    assert (found.subject, found.status) == ("cuda:0", "ok")
    assert loads == []


def test_images_are_only_read_unless_rates_are_asked_for(loads, photos):
    check = ModelCheck(None, None)
    (found,) = check.rates(open_images(photos / "images"), whole=False)
    assert (found.subject, found.values["images"]) == ("reading", 18)
    assert loads == []
    *_, bound = check.rates(open_images(photos / "images"), whole=True)
    assert np.isfinite(bound.values["per_second"])


def test_images_that_are_no_images(tmp_path, loads):
    (tmp_path / "a.jpg").write_bytes(b"nothing")
    with pytest.raises(InputError, match="none of 1 images can be decoded"):
        list(ModelCheck(None, None).rates(open_images(tmp_path), whole=True))
