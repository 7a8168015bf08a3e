import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import extractors
from extractors import ExtractorRequest, catalogue
from extractors.weights.resolve import Architecture, resolve_weights
from schemas.errors import InputError
from schemas.features import FeatureSpec
from tests.extractors.weights.test_resolve import build

NAME = "tiny"
KINDS = ("w.pth", "old.pth", "w.safetensors")


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
def tiny(monkeypatch) -> None:
    """Register the extractor ``tiny``."""
    module = ModuleType("tiny_extractor")
    module.find_weights = lambda spec, request: resolve_weights(request, Architecture(build=build))
    module.describe, module.load = describe, Tiny
    monkeypatch.setitem(sys.modules, "tiny_extractor", module)
    entry = catalogue.Entry(FeatureSpec(name=NAME, shape=(1,), source="a test"), module="tiny_extractor")
    monkeypatch.setitem(catalogue.ENTRIES, NAME, entry)


def saved(folder: Path, kind: str, seed: int = 0) -> str:
    """Write weights of a kind, and return the path of the file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state = build().state_dict()
    if kind.endswith(".safetensors"):
        save_file(state, folder / kind)
    else:
        torch.save(state, folder / kind, _use_new_zipfile_serialization=not kind.startswith("old"))
    return str(folder / kind)


@pytest.mark.parametrize("kind", KINDS)
def test_load_later_file_changes_do_not_affect_model(tmp_path, kind):
    path = saved(tmp_path, kind)
    extractor = extractors.load_extractor(NAME, weights=path)
    before = {name: tensor.clone() for name, tensor in extractor.state.items()}
    with Path(path).open("r+b") as file:
        file.write(bytes(Path(path).stat().st_size))
    assert all(torch.equal(extractor.state[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("kind", KINDS)
def test_load_file_changed_after_describe_has_another_fingerprint(tmp_path, kind):
    path = saved(tmp_path, kind, seed=1)
    before = ExtractorRequest(NAME, weights=path).describe()
    Path(path).unlink()
    saved(tmp_path, kind, seed=2)
    after = extractors.load_extractor(NAME, weights=path)
    assert after.fingerprint != before.fingerprint
    assert after.fingerprint == ExtractorRequest(NAME, weights=path).describe().fingerprint


def test_load_file_deleted_after_describe_raises(tmp_path):
    path = saved(tmp_path, "w.pth")
    ExtractorRequest(NAME, weights=path).describe()
    Path(path).unlink()
    with pytest.raises(InputError, match="there is no weights file"):
        extractors.load_extractor(NAME, weights=path)
