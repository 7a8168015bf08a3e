import hashlib
import importlib
import json
import pickle
import subprocess
import sys

import pytest

import extractors
from extractors import ExtractorRequest
from extractors.base import Description
from extractors.catalogue import ENTRIES
from schemas.errors import UsageError
from schemas.features import FeatureSpec


@pytest.mark.parametrize("method", [ExtractorRequest.spec, ExtractorRequest.describe, ExtractorRequest.load])
def test_extractor_request_is_pickled_and_unknown_name_raises(method):
    request = ExtractorRequest("resnet", weights="/no/such.pth", regions=extractors.RegionOptions(10, 20))
    assert pickle.loads(pickle.dumps(request)) == request
    with pytest.raises(
        UsageError, match=r"there is no extractor 'resnet': did you mean 'resnet50-pool'\? Extractors are .*vgg19-grid"
    ):
        method(request)


def test_extractors_import_loads_neither_torch_nor_pillow():
    code = "import extractors, sys; extractors.extractor_names(); extractors.ExtractorRequest('resnet50-pool').spec(); "
    code += "print([m for m in ('torch', 'torchvision', 'PIL', 'safetensors', 'apache_beam') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package", "extra"), [("faster-rcnn-36", "torchvision", "extractors"), ("timm:resnet18", "timm", "timm")]
)
def test_import_module_missing_extra_names_it(name, package, extra):
    code = f"import sys; sys.modules[{package!r}] = None\nimport extractors\ntry: "
    code += f"extractors.load_extractor({name!r}, weights='random:0')\n"
    code += "except Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"UsageError extractor '{name}' needs the package '{package}'")
    assert f"pip install 'imagepivot[{extra}]'" in done.stdout


def test_fingerprint_does_not_depend_on_order_of_parameters():
    spec = FeatureSpec(name="x", shape=(1,))
    first = Description(spec, {"a": 1, "b": [2, "é"]})
    assert first.fingerprint == Description(spec, {"b": [2, "é"], "a": 1}).fingerprint
    assert first.fingerprint != Description(spec, {"a": 1, "b": [2, "e"]}).fingerprint
    assert first.fingerprint == hashlib.sha256('{"a":1,"b":[2,"é"]}'.encode()).hexdigest()


@pytest.mark.cluster
@pytest.mark.parametrize("name", extractors.extractor_names())
def test_entries_match_loaded_extractors(name):
    (entry,) = (entry for entry in extractors.list_extractors() if entry.name == name)
    description = ExtractorRequest(name, weights="random:0").describe()
    assert (entry.kind, entry.shape, entry.dtype) == (description.kind, description.spec.shape, description.spec.dtype)
    assert entry.preprocessing == description.parameters["transform"]
    assert entry.source == description.spec.source
    module = importlib.import_module(ENTRIES[name].module)
    variants, architectures = getattr(module, "VARIANTS", {}), getattr(module, "ARCHITECTURES", {})
    architecture = variants[name].architecture if variants else architectures.get(name) or module.ARCHITECTURE
    assert entry.weights.startswith("default: ") == (architecture.default is not None)
    if architecture.default is not None:
        assert architecture.default.name in entry.weights
    assert json.loads(json.dumps(entry.to_json())) == entry.to_json()


# --- on other machines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weights", "files", "sent"),
    [
        ("resnet50-pool", "default", (), ("resnet50-pool", "default")),
        ("resnet50-pool", "w.pth", ("w.pth",), ("resnet50-pool", "{}/w.pth")),
        ("resnet50-pool", "gs://b/w.pth", ("gs://b/w.pth",), ("resnet50-pool", "gs://b/w.pth")),
        ("detectron2:a+b/c.yaml+w.pkl", "default", ("a+b/c.yaml", "w.pkl"), ("detectron2:{}/a+b/c.yaml+{}/w.pkl", "default")),
        ("detectron2:c.yml+random:1", "default", ("c.yml",), ("detectron2:{}/c.yml+random:1", "default")),
        ("detectron2:c.yaml", "default", ("c.yaml",), ("detectron2:{}/c.yaml", "default")),
    ],
)
def test_located_request_has_absolute_paths(tmp_path, monkeypatch, name, weights, files, sent):
    monkeypatch.chdir(tmp_path)
    request = ExtractorRequest(name, weights, "bf16", True, extractors.RegionOptions(max_regions=50))
    assert request.files() == files
    located = request.located()
    paths = [text.replace("{}", str(tmp_path)) for text in sent]
    assert located == ExtractorRequest(*paths, "bf16", True, extractors.RegionOptions(max_regions=50))
