import gc
import sys
import time
import weakref
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import extractors
from extractors import ExtractorRequest, catalogue
from extractors.weights import checkpoints, resolve
from extractors.weights.resolve import Architecture, resolve_weights
from schemas.errors import InputError
from schemas.features import FeatureSpec
from tests.extractors.weights.test_resolve import build

NAME = "tiny"
KINDS = ("w.pth", "old.pth", "w.safetensors", "random:3")


class Tiny(extractors.Extractor):
    def __init__(self, settings, weights, device) -> None:
        super().__init__(describe(settings, weights))
        self.state = weights.state

    def preprocess(self, image):
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def extract(self, batch):
        return np.zeros((len(batch), 1), dtype=np.float32)


def describe(settings, weights) -> extractors.Description:
    return extractors.Description(settings.spec, settings.parameters(weights))


@pytest.fixture(autouse=True)
def reads(monkeypatch) -> Counter:
    """Register the extractor ``tiny``, and count how often its weights are hashed, parsed and drawn."""
    counts: Counter = Counter()

    def counted(owner, name, what):
        function = getattr(owner, name)

        def wrapper(*args, **kwargs):
            counts[what] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    def make() -> nn.Module:
        counts["drawn"] += torch.get_default_device().type == "cpu"
        return build()

    counted(resolve, "state_sha256", "hashed")
    counted(torch, "load", "parsed")
    counted(checkpoints, "read_safetensors", "parsed")
    module = ModuleType("tiny_extractor")
    module.find_weights = lambda spec, request: resolve_weights(request, Architecture(build=make))
    module.describe, module.load = describe, Tiny
    monkeypatch.setitem(sys.modules, "tiny_extractor", module)
    entry = catalogue.Entry(FeatureSpec(name=NAME, shape=(1,), source="a test"), module="tiny_extractor")
    monkeypatch.setitem(catalogue.ENTRIES, NAME, entry)
    monkeypatch.setattr(resolve, "_stored", {})
    return counts


@pytest.fixture(params=KINDS)
def request_(request, tmp_path) -> ExtractorRequest:
    return ExtractorRequest(NAME, weights=saved(tmp_path, request.param))


def saved(folder: Path, kind: str, seed: int = 0) -> str:
    """Weights of a kind: the path of a file, or the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = build().state_dict()
    if kind.startswith("random:"):
        return kind
    if kind.endswith(".safetensors"):
        save_file(state, folder / kind)
    else:
        torch.save(state, folder / kind, _use_new_zipfile_serialization=not kind.startswith("old"))
    return str(folder / kind)


def expected_reads(request_: ExtractorRequest, times: int) -> dict[str, int]:
    kinds = ("hashed", "drawn") if request_.weights.startswith("random:") else ("hashed", "parsed")
    return dict.fromkeys(kinds, times)


def test_load_after_describe_reads_once(request_, reads):
    description = request_.describe()
    first = request_.load()
    assert +reads == expected_reads(request_, 1)
    assert first.fingerprint == description.fingerprint
    second = request_.load()
    assert +reads == expected_reads(request_, 2)
    assert all(torch.equal(first.state[name], second.state[name]) for name in second.state)


def test_load_uses_stored_weights_of_its_request_only(tmp_path, reads):
    ExtractorRequest(NAME, weights=saved(tmp_path, "a.pth", seed=1)).describe()
    path = saved(tmp_path, "b.pth", seed=2)
    extractor = extractors.load_extractor(NAME, weights=path)
    assert reads["parsed"] == 2
    assert torch.equal(extractor.state["conv1.weight"], torch.load(path)["conv1.weight"])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_load_file_changed_after_describe_is_read_again(tmp_path, reads, kind):
    path = saved(tmp_path, kind, seed=1)
    before = ExtractorRequest(NAME, weights=path).describe()
    Path(path).unlink()
    saved(tmp_path, kind, seed=2)
    after = extractors.load_extractor(NAME, weights=path)
    assert reads["hashed"] == 2
    assert after.fingerprint != before.fingerprint
    assert after.fingerprint == ExtractorRequest(NAME, weights=path).describe().fingerprint


def test_load_file_deleted_after_describe_raises(tmp_path):
    path = saved(tmp_path, "w.pth")
    ExtractorRequest(NAME, weights=path).describe()
    Path(path).unlink()
    with pytest.raises(InputError, match="there is no weights file"):
        extractors.load_extractor(NAME, weights=path)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_load_later_file_changes_do_not_affect_model(tmp_path, kind):
    path = saved(tmp_path, kind)
    extractor = extractors.load_extractor(NAME, weights=path)
    before = {name: tensor.clone() for name, tensor in extractor.state.items()}
    with Path(path).open("r+b") as file:
        file.write(bytes(Path(path).stat().st_size))
    assert all(torch.equal(extractor.state[name], tensor) for name, tensor in before.items())


def test_is_mappable_compressed_archive_is_false(tmp_path):
    import zipfile

    path = Path(saved(tmp_path, "w.pth"))
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    assert checkpoints.is_mappable(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    assert not checkpoints.is_mappable(path)
    found = resolve_weights(str(path), Architecture(build=build))
    other = torch.load(saved(tmp_path, "again.pth"))
    assert all(torch.equal(found.state[name], tensor) for name, tensor in other.items())


@pytest.mark.cluster
def test_load_releases_stored_weights(request_):
    request_.describe()
    assert len(resolve._stored) == 1
    extractor = request_.load()
    assert not resolve._stored
    tensor = weakref.ref(extractor.state["conv1.weight"])
    del extractor
    gc.collect()
    assert tensor() is None


def test_store_weights_unused_weights_are_dropped(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(resolve, "STORED_SECONDS", 0.05)
    path = saved(tmp_path, "w.pth")
    ExtractorRequest(NAME, weights=path).describe()
    deadline = time.monotonic() + 20
    while resolve._stored and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not resolve._stored
    extractors.load_extractor(NAME, weights=path)
    assert reads["parsed"] == 2


def test_describe_maps_values(tmp_path):
    path = saved(tmp_path, "w.pth")
    assert resolve_weights(path, Architecture(build=build)).mapped
    ExtractorRequest(NAME, weights=path).describe()
    with Path("/proc/self/maps").open() as maps:
        assert any(line.rstrip().endswith(path) for line in maps)
