"""The report of a GPU, tried without one: on the CPU, and the parts that only a GPU has on a fake one."""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu import commands, extraction, training
from tests.benchmarks.gpu.__main__ import PARTS, main
from tests.benchmarks.gpu.clocks import nothing_waits, waits_of
from tests.benchmarks.gpu.reporting import Part, Settings, UnmeasurableError, load_report, markdown, run_parts
from tests.fake_gpu import fake_gpu

ROOT = Path(__file__).parents[3]
ON_CPU = Settings(torch.device("cpu"), is_quick=True)
ON_GPU = Settings(torch.device("cuda", 0), is_quick=True)
# Parts of which a CPU has nothing.
OF_GPUS = {"tests", "waits", "memory", "busy"}


@pytest.fixture(autouse=True)
def _forget():
    """What one test has loaded is not another's."""
    yield
    for cached in (extraction._loaded, extraction._pixels, extraction._on_cpu):
        cached.cache_clear()


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *map(str, arguments)])
    return main()


@pytest.mark.cluster
def test_report_of_a_cpu_is_complete(monkeypatch, tmp_path):
    assert call(monkeypatch, "--device", "cpu", "--quick", "--output", tmp_path) == 0
    report = load_report(tmp_path / "gpu-report.json")
    assert (report["device"], report["quick"], report["machine"]["gpu"]) == ("cpu", True, None)
    assert report["parts"].keys() == PARTS.keys()
    for name, part in report["parts"].items():
        assert part["rows"]
        for row in part["rows"]:
            assert list(row) == [*PARTS[name].keys, *PARTS[name].values, "reason", "error"]
            assert row["error"] is None
            values = [row[column] for column in PARTS[name].values]
            assert None not in values or row["reason"], row
            assert name not in OF_GPUS or (set(values) == {None} and row["reason"].startswith("the device is the CPU: "))
            assert name in OF_GPUS or name == "rates" or any(value is not None for value in values), row
    text = (tmp_path / "gpu-report.md").read_text(encoding="utf-8")
    assert text.startswith("# A trial of the script on a CPU: no GPU was measured\n")
    assert text == markdown(report)
    for row in report["parts"]["agreement"]["rows"]:
        assert row["repeats_bit_for_bit"] is True
        assert (row["difference"] == 0) == (row["precision"] == "fp32")
    assert all(row["ratio"] > 0 for row in report["parts"]["speed"]["rows"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_claimed(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, "--output", tmp_path / "out") == 1
    assert capsys.readouterr().err.startswith("no CUDA device: nothing was measured, and no report was written\n")
    assert not (tmp_path / "out").exists()


def test_page_names_every_part():
    lines = (ROOT / "docs/internals/gpus.md").read_text(encoding="utf-8").splitlines()
    assert [name for name in PARTS if sum(line.startswith(f"| `{name}` |") for line in lines) != 1] == []


def test_files_with_gpu_tests_are_found():
    found = commands.files_with_gpu_tests()
    assert "tests/extractors/test_request.py" in found
    assert "tests/test_docs.py" not in found


# --- the report ------------------------------------------------------------------------------------------------------


def part(measure, **more):
    return Part("part", "title", ("what",), ("one", "two"), lambda settings: [("a",), ("b",)], measure, **more)


def test_run_parts_continues_after_a_failed_row(tmp_path):
    def measure(settings, what):
        if what == "a":
            raise ValueError("broken\nsecond line")
        return {"one": 1, "two": 2}

    report = run_parts([part(measure)], ON_CPU, {"gpu": "x"}, tmp_path)
    first, second = report["parts"]["part"]["rows"]
    assert (first["what"], first["one"], first["reason"]) == ("a", None, "ValueError: broken")
    assert "second line" in first["error"]
    assert second == {"what": "b", "one": 1, "two": 2, "reason": None, "error": None}
    assert json.loads((tmp_path / "gpu-report.json").read_text()) == report


def test_parts_join_those_of_the_same_machine_only(tmp_path):
    run_parts([part(lambda settings, what: {"one": 1, "two": 2})], ON_CPU, {"gpu": "x"}, tmp_path)
    other = Part("other", "", ("what",), ("one",), lambda settings: [("a",)], lambda settings, what: {"one": 3})
    assert run_parts([other], ON_CPU, {"gpu": "x"}, tmp_path)["parts"].keys() == {"part", "other"}
    with pytest.raises(SystemExit, match="is the report of another machine"):
        run_parts([other], ON_CPU, {"gpu": "y"}, tmp_path)


def test_reasons(tmp_path):
    def refuse(settings):
        raise UnmeasurableError("no kernels")

    def fill(settings, what):
        raise torch.cuda.OutOfMemoryError("2 GB")

    late = Settings(torch.device("cpu"), end=0.0)
    for settings, refusing, reason in (
        (ON_CPU, {"prepare": refuse}, "no kernels"),
        (ON_CPU, {}, "out of memory"),
        (late, {}, "the time was up"),
    ):
        rows = part(fill, **refusing).rows(settings)
        assert [(row["one"], row["reason"], row["error"]) for row in rows] == [(None, reason, None)] * 2


# --- what only a GPU has ---------------------------------------------------------------------------------------------


@pytest.fixture
def debug_modes(monkeypatch):
    """What ``set_sync_debug_mode`` was set to."""
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    return modes


def test_waits_are_counted_by_line(debug_modes):
    with waits_of(ON_GPU) as lines:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert debug_modes == ["default", "warn", "default"]
    assert lines == Counter({"?": 2})  # No line of the packages has done it.


def test_only_results_may_be_waited_for(debug_modes, monkeypatch):
    seen = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: seen.append(debug_modes[-1]))
    with nothing_waits():
        seen.append(debug_modes[-1])
        torch.zeros(1).cpu()
        seen.append(debug_modes[-1])
    assert seen == ["error", "default", "error"]
    assert debug_modes[-1] == "default"


@pytest.fixture
def gpu(monkeypatch, debug_modes):
    """A fake GPU with memory, of which a batch takes 600 bytes."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 600)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    with fake_gpu():
        yield


@pytest.mark.cluster
def test_parts_of_a_gpu_run(gpu):
    name = "timm:resnet18"
    assert extraction._measure_waits(ON_GPU, name, "fp32") == {"waits": 0, "lines": "", "other_waits": "none"}
    found = extraction._measure_speed(ON_GPU, name, "fp32", 2)
    assert (found["ratio"] > 0, found["peak_bytes"]) == (True, 600)
    found = extraction._measure_agreement(ON_GPU, name, "bf16")
    assert found["repeats_bit_for_bit"]
    assert 0 < found["difference"] < 0.05
    assert 0.999 < found["cosine"] < 1


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("preset", ["huang2019/mha-d", "scan/t2i-avg", "dan"])
def test_presets_of_several_features_train_on_invented_data(preset, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "PRESETS", {preset: (3, 8)})
    real = training.write_corpus
    monkeypatch.setattr(training, "write_corpus", lambda folder, sizes, shape: real(tmp_path, sizes, (3, 8)))
    found = training._measure(ON_CPU, preset, "fp32")
    assert found["batch"] == 8
    assert found["steps_per_second"] > 0
