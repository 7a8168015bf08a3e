import errno
import os
import socket
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from extractors import ExtractorRequest
from pipelines import doctor
from pipelines.doctor import Check, check_device, check_output, check_versions, check_weights, compare_with_cpu, run_checks
from schemas.errors import DatasetError, InputError, UsageError
from tests.fake_extractors import ColourExtractor

EXPECTED = np.array([[1.0, -4.0, 2.0]])
REQUEST = ExtractorRequest("resnet50-pool", weights="random:3")


@pytest.fixture
def gpus(monkeypatch):
    """Let torch report a number of GPUs, which compute as the CPU does."""

    def report(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Fake {torch.device(device).index}")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "")
    monkeypatch.setattr(doctor, "_run_network", lambda device, dtype: EXPECTED.astype(dtype))
    return report


# --- all checks --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_checks_without_arguments_uses_no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    checks = run_checks(device="cpu")
    names = [check.name for check in checks if check.status == "ok" and check.name != "gpu"]
    assert names == ["imagepivot", "packages", "extras", "cpu"]


def test_run_checks_after_a_missing_device_verifies_weights_and_output(monkeypatch, tmp_path, gpus):
    gpus(0)
    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: description())
    checks = run_checks(str(tmp_path), REQUEST, "cuda")[-3:]
    assert [(check.name, check.status) for check in checks] == [("device", "failed"), ("weights", "ok"), ("output", "ok")]


def test_unexpected_error_is_a_failed_check_after_those_before_it():
    def checks():
        yield Check("a", "ok", "1")
        raise RuntimeError("driver is gone\nat 0x12")

    assert doctor._attempt("device", checks()) == [
        Check("a", "ok", "1"),
        Check("device", "failed", "RuntimeError: driver is gone", "report it with this output"),
    ]


def test_keys_in_the_output_address_are_hidden():
    failed = run_checks("s3://AKIA:wJ/alr@bucket/x", device="cpu")[-1]
    assert failed.status == "failed"
    assert failed.result.startswith("cannot understand the location 's3://***@bucket/x': ")
    assert "alr" not in failed.result


# --- versions ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Write the metadata of distributions, and hide all others."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def write(name: str, version: str, *lines: str) -> None:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = "\n".join(("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines))
        (folder / "METADATA").write_text(text + "\n")

    write(
        "imagepivot",
        "0.1",
        *(f"Provides-Extra: {extra}" for extra in ("extractors", "pipelines", "gcp", "fasttext", "dev")),
        "Requires-Dist: numpy>=1.26",
        'Requires-Dist: torch>=2.9; extra == "extractors"',
        'Requires-Dist: imagepivot[extractors]; extra == "pipelines"',
        'Requires-Dist: apache-beam<3,>=2.77; extra == "pipelines"',
        'Requires-Dist: apache-beam[gcp]; extra == "gcp"',
        'Requires-Dist: gensim<5,>=4.4; python_version < "3" and extra == "fasttext"',
        'Requires-Dist: pytest>=8; extra == "dev"',
    )
    write("numpy", "2.0.1")
    return write


def texts(checks) -> list[tuple[str, str, str, str]]:
    return [(check.name, check.status, check.result, check.advice) for check in checks]


def test_versions_without_extras(installed):
    own, *rest = check_versions()
    assert own.result.startswith(f"0.1, Python {sys.version_info.major}.{sys.version_info.minor}.")
    assert texts(rest) == [
        ("packages", "ok", "numpy 2.0.1", ""),
        # Of fasttext nothing is required on this Python.
        ("extras", "ok", "installed: fasttext; not installed: extractors, pipelines, gcp", ""),
    ]


def test_versions_outside_the_requirements_are_warnings(installed):
    installed("apache_beam", "3.0.0")
    installed("torch", "2.8")
    installed("pytest", "1")
    assert texts(check_versions())[1:-1] == [
        ("packages", "ok", "torch 2.8, apache-beam 3.0.0, numpy 2.0.1", ""),
        ("torch", "warning", "2.8 is installed, expected >=2.9", "pip install --upgrade 'imagepivot[extractors]'"),
        ("apache-beam", "warning", "3.0.0 is installed, expected <3,>=2.77", "pip install --upgrade 'imagepivot[pipelines]'"),
    ]


# --- device ------------------------------------------------------------------------------------------------------------


def test_missing_torch_is_a_warning_unless_a_device_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    (check,) = check_device()
    assert (check.status, check.result) == ("warning", "torch is not installed")
    message = r"device is 'cuda', and torch is not installed, .*: pip install 'imagepivot\[extractors\]'"
    with pytest.raises(UsageError, match=message):
        list(check_device("cuda"))


@pytest.mark.parametrize(
    ("device", "names"),
    [("auto", ["cuda:0", "cuda:1"]), ("cuda", ["cuda:0", "cuda:1"]), ("cuda:1", ["cuda:1"]), ("cpu", ["cpu"])],
)
def test_every_requested_gpu_computes(gpus, device, names):
    gpus(2)
    checks = list(check_device(device))
    assert [(check.name, check.status) for check in checks] == [(name, "ok") for name in names]
    assert all(check.result.startswith(f"Fake {check.name[-1]}: ") for check in checks if check.name != "cpu")


def test_missing_gpu(gpus):
    gpus(0)
    missing, check = check_device()
    assert (missing.name, missing.status, missing.advice) == ("gpu", "ok", "")
    assert (check.name, check.status) == ("cpu", "ok")
    with pytest.raises(UsageError, match="device 'cuda' is not on this host"):
        list(check_device("cuda"))


@pytest.mark.parametrize(("part", "status"), [(0.9, "ok"), (1.1, "failed"), (np.nan, "failed"), (np.inf, "failed")])
def test_difference_is_relative_to_the_largest_value(part, status, monkeypatch):
    values = (EXPECTED + np.array([0, 0, 4 * part * 1e-4])).astype(np.float32)
    monkeypatch.setattr(doctor, "_run_network", lambda device, dtype: EXPECTED if device == "cpu" else values)
    check = compare_with_cpu("cuda:0", "Fake")
    assert check.status == status
    assert f"by {part * 1e-4:.1e} of the largest value" in check.result
    assert bool(check.advice) == (status == "failed")


def test_errors_of_cuda_have_advice(monkeypatch):
    def compute(device, dtype):
        if device == "cuda:0":
            raise RuntimeError("CUDA out of memory. Tried\nmore")
        return EXPECTED

    monkeypatch.setattr(doctor, "_run_network", compute)
    check = compare_with_cpu("cuda:0", "Fake")
    assert (check.name, check.status) == ("cuda:0", "failed")
    assert check.result.endswith("a small network fails with RuntimeError: CUDA out of memory. Tried")
    assert "another process uses its memory" in check.advice


def test_network_equals_numpy():
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 3, 64, 64), (16, 3, 3, 3), (16, 32)
    pixels, kernel, matrix = (torch.randn(*shape, generator=generator).double().numpy() for shape in shapes)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), axis=(2, 3))
    maps = np.maximum(np.einsum("nchwij,ocij->nohw", windows, kernel, optimize=True), 0)
    expected = maps.mean(axis=(2, 3)) @ matrix
    np.testing.assert_allclose(doctor._run_network("cpu", "float64"), expected, rtol=1e-9, atol=1e-12)
    assert np.abs(expected).max() > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_computes_as_the_cpu_does():
    checks = run_checks(extractor=REQUEST, device="cuda")
    assert {check.status for check in checks if check.name.startswith("cuda:")} == {"ok"}
    assert checks[-1] == Check("extractor", "ok", "resnet50-pool computes float32[2048] for one image")


# --- weights -----------------------------------------------------------------------------------------------------------


def description(**parameters):
    own = ColourExtractor().description
    return replace(own, parameters={"weights": {"sha256": "abcdef" * 10 + "abcd"}, **parameters})


@pytest.fixture
def loads(monkeypatch):
    """Load extractors of colours in place of all others, with the values of the image; returns the devices."""
    devices = []

    class Extractor(ColourExtractor):
        values = np.float32([[1, 2, 3]])

        def extract(self, batch):
            return self.values

    def load(request, device):
        devices.append(device)
        return Extractor()

    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: description())
    monkeypatch.setattr("extractors.ExtractorRequest.load", load)
    return devices, Extractor


def test_extractor_runs_once_on_the_device(loads):
    weights, run = check_weights(replace(REQUEST, weights="w.pth"), "cuda:1")
    assert texts([weights]) == [("weights", "ok", "w.pth for fake, SHA-256 abcdefabcdef…", "")]
    assert texts([run]) == [("extractor", "ok", "fake computes float32[3] for one image", "")]
    assert loads[0] == ["cuda:1"]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_features_fail(loads, value):
    loads[1].values = np.float32([[1, value, 3]])
    *_, run = check_weights(REQUEST, "cpu")
    assert (run.status, run.result) == ("failed", "fake computes float32[3] for one image, with NaN or infinity")


def test_untrained_weights_are_a_warning(loads, monkeypatch):
    monkeypatch.setattr("extractors.ExtractorRequest.describe", lambda request: description(untrained=True))
    check, _ = check_weights(REQUEST, "cpu")
    assert (check.status, check.result) == ("warning", "random:3 for fake, SHA-256 abcdefabcdef…, untrained")


@pytest.mark.slow
def test_weights_of_the_right_and_of_another_model(tmp_path):
    import timm

    path = str(tmp_path / "w.pth")
    model = timm.create_model("test_resnet.r160_in1k", num_classes=0)
    torch.save(model.state_dict(), path)
    request = ExtractorRequest("timm:test_resnet.r160_in1k", weights=path)
    weights, run = check_weights(request, "cpu")
    digest = request.describe().parameters["weights"]["sha256"]
    assert (weights.status, weights.result) == ("ok", f"{path} for {request.name}, SHA-256 {digest[:12]}…")
    assert (run.status, run.result) == ("ok", f"{request.name} computes float32[{model.num_features}] for one image")
    with pytest.raises(InputError, match="are not this model's"):
        list(check_weights(replace(request, name="resnet50-pool"), "cpu"))


# --- output ------------------------------------------------------------------------------------------------------------


def test_new_folder_is_removed_again_and_an_existing_one_is_left_as_it_was(tmp_path):
    (tmp_path / "_manifest.json").write_text("{}")
    for location in (str(tmp_path / "new" / "features"), str(tmp_path)):
        (check,) = check_output(location)
        assert texts([check]) == [("output", "ok", f"a file was written to {location!r} and deleted", "")]
        assert [path.name for path in tmp_path.iterdir()] == ["_manifest.json"]


@pytest.mark.parametrize(
    ("location", "kind", "message"),
    [
        ("file/features", DatasetError, "a part of the path is a file, not a folder"),
        ("link/features", DatasetError, "the path is a file or a link to nothing"),
        ("https://host/x", UsageError, "cannot write to 'https://host/x': give a local folder, gs://BUCKET/PATH or"),
    ],
)
def test_check_output_unwritable_location_fails(tmp_path, monkeypatch, location, kind, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(kind, match=message):
        list(check_output(location))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "link"]


def test_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DatasetError, match="the disk is full"):
        list(check_output(str(tmp_path / "features")))
    assert list(tmp_path.iterdir()) == []
