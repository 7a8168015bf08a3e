import importlib
import re

import numpy as np
import pytest
import torch

from extractors import ExtractorRequest
from pipelines.doctor import devices
from pipelines.doctor.devices import TOLERANCES, check_devices, check_forward, forward_of, visibility
from pipelines.doctor.findings import attempt
from pipelines.doctor.rates import draw_photo
from schemas.errors import UsageError
from tests.fake_extractors import ColourExtractor
from tests.pipelines.doctor.fake_gpus import EXPECTED, FakeCuda, fake_forward

# --- which devices there are -------------------------------------------------------------------------------------------


def test_without_torch(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    (found,) = check_devices(None)
    assert (found.status, found.found) == ("note", "torch is not installed")
    with pytest.raises(
        UsageError, match=r"device is 'auto', and torch is not installed: pip install 'imagepivot\[extractors\]'"
    ):
        list(check_devices("auto"))


def test_a_torch_that_cannot_be_loaded_is_a_problem(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", broken)
    (found,) = attempt("devices", "torch", lambda: check_devices(None))
    assert (found.status, found.found) == ("problem", "OSError: libcudart.so.12: cannot open shared object file")


@pytest.mark.parametrize("device", [None, "auto", "cpu"])
def test_a_machine_without_gpus(monkeypatch, device):
    monkeypatch.setattr(devices, "_NODES", ())
    about_torch, gpu = check_devices(device, cuda=FakeCuda(0))
    assert about_torch.values["version"] == torch.__version__
    assert about_torch.values["gpus"] == 0
    assert (gpu.status, gpu.found) == ("ok", "none; models run on the CPU")


def test_a_gpu_that_is_asked_for_and_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="device 'cuda' is not on this host"):
        list(check_devices("cuda", cuda=FakeCuda(0)))


def test_another_gpu_than_those_that_are_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="device 'cuda:2' is not on this host"):
        list(check_devices("cuda:2", cuda=FakeCuda(2)))


def test_the_driver(tmp_path):
    assert devices._driver(tmp_path / "none") is None
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64  570.1\nGCC version: 12\n")
    assert devices._driver(tmp_path / "version") == "NVRM version: NVIDIA UNIX x86_64  570.1"


@pytest.mark.parametrize(
    ("nodes", "built", "chosen", "status", "advice"),
    [
        ([], "12.4", None, "ok", ""),
        (["/dev/nvidia0"], None, None, "note", "built for the CPU only"),
        (["/dev/nvidia0"], "12.4", "", "note", "CUDA_VISIBLE_DEVICES is '', which hides it"),
        (["/dev/nvidia0"], "12.4", "-1", "note", "CUDA_VISIBLE_DEVICES is '-1', which hides it"),
        (["/dev/nvidia0"], "12.4", "0", "note", "docker run --gpus all"),
    ],
)
def test_why_torch_sees_no_gpu(nodes, built, chosen, status, advice):
    found = visibility(nodes, built, chosen)
    assert found.status == status
    assert advice in found.advice


# --- what they compute -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "numbers"), [(None, [0, 1]), ("auto", [0, 1]), ("cuda", [0, 1]), ("cuda:1", [1]), ("cpu", [])]
)
def test_a_network_runs_on_each_gpu_that_is_meant(device, numbers):
    cuda = FakeCuda(2)
    _, *found = check_devices(device, cuda=cuda, forward=lambda: fake_forward(cuda))
    assert sorted(cuda.held) == numbers
    assert [(finding.subject, finding.status) for finding in found] == [(f"cuda:{n}", "ok") for n in numbers for _ in range(2)]
    if numbers:
        assert found[0].found == f"Fake {numbers[0]}, 70.0 GB of 80.0 GB free"
        assert found[0].values["capability"] == "9.0"


def test_a_gpu_that_others_fill():
    cuda = FakeCuda(free=7_000_000_000)
    _, facts, _ = check_devices(None, cuda=cuda, forward=lambda: fake_forward(cuda))
    assert (facts.status, facts.advice) == ("note", "another process uses it: see nvidia-smi")


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize(("part", "status"), [(0.9, "ok"), (1.1, "problem")])
def test_a_difference_counts_against_the_greatest_value(precision, part, status):
    cuda = FakeCuda()
    other = EXPECTED + np.float32([0, 0, 4 * part * TOLERANCES[precision]])
    found = check_forward(0, fake_forward(cuda, other, precision=precision), cuda)
    assert found.status == status
    assert found.values["difference"] == pytest.approx(part * TOLERANCES[precision], rel=1e-2)
    assert bool(found.advice) == (status == "problem")


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (np.float32([[1, np.nan, 2]]), "gives values that are no numbers"),
        (EXPECTED[:, :2], r"gives \(1, 2\), on the CPU \(1, 3\)"),
        (
            RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore"),
            "fails on it: RuntimeError",
        ),
    ],
)
def test_what_is_wrong_on_a_gpu(result, words):
    cuda = FakeCuda()
    found = check_forward(0, fake_forward(cuda, result), cuda)
    assert found.status == "problem"
    assert re.search(words, found.found)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("no kernel image is available", "install a build of torch for it"),
        ("CUDA out of memory. Tried", "another process uses its memory"),
        ("the NVIDIA driver is too old", "update the driver"),
        ("something else", "nvidia-smi"),
    ],
)
def test_advice_for_errors_of_cuda(text, advice):
    cuda = FakeCuda()
    assert advice in check_forward(0, fake_forward(cuda, RuntimeError(text)), cuda).advice


def test_a_result_that_did_not_come_from_the_gpu():
    cuda = FakeCuda()
    found = check_forward(0, fake_forward(cuda, holds=0), cuda)
    assert (found.status, found.found) == ("problem", "a network left no trace in its memory")


def test_choices_are_not_compared():
    cuda = FakeCuda()
    found = check_forward(0, fake_forward(cuda, EXPECTED + 1, is_comparable=False), cuda)
    assert (found.status, found.found) == ("ok", "a network runs on it; its choices are not compared with the CPU's")


def test_the_small_network_depends_on_no_chance():
    first, second = (devices._small_network().run("cpu") for _ in range(2))
    assert first.shape == (4, 32)
    assert np.array_equal(first, second)
    assert np.isfinite(first).all()
    assert first.std() > 0.1


def test_an_extractor_is_loaded_on_both_devices_and_run_once_on_the_cpu():
    asked = []

    def load(device):
        asked.append(device)
        return ColourExtractor()

    forward = forward_of(load, draw_photo(), "colours", "fp32")
    on_cpu, on_gpu = forward.run("cpu"), forward.run("cuda:0")
    assert asked == ["cpu", "cuda:0"]
    assert np.array_equal(on_cpu, on_gpu)
    assert (forward.what, forward.is_comparable) == ("colours", True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_computes_as_the_cpu_does():
    found = list(check_devices("cuda"))
    assert {finding.status for finding in found} <= {"ok", "note"}
    request = ExtractorRequest("resnet50-pool", weights="random:0")
    found = check_forward(0, forward_of(request.load, draw_photo(), "resnet50-pool", "fp32"), torch.cuda)
    assert found.status == "ok"
