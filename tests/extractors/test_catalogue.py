import hashlib
import subprocess
import sys

import pytest

import extractors
from extractors.base import Description
from schemas.errors import UsageError
from schemas.features import FeatureSpec


def test_names_and_specs():
    assert "resnet50-pool" in extractors.names()
    assert list(extractors.names()) == sorted(extractors.names())
    for name in extractors.names():
        assert extractors.spec(name).name == name
        assert extractors.ExtractorRequest(name).spec() == extractors.spec(name)
    assert extractors.spec("resnet50-pool").shape == (2048,)


@pytest.mark.parametrize("function", [extractors.spec, extractors.describe, extractors.load])
def test_unknown_name(function):
    with pytest.raises(UsageError, match=r"there is no extractor 'resnet'; choose one of .*resnet50-pool"):
        function("resnet")


def test_importing_the_package_loads_neither_torch_nor_pillow():
    code = "import extractors, sys; extractors.names(); extractors.spec('resnet50-pool'); "
    code += "print([m for m in ('torch', 'torchvision', 'PIL', 'safetensors', 'apache_beam') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_extra_says_what_to_install():
    code = "import sys; sys.modules['torchvision'] = None\nimport extractors\n"
    code += "try: extractors.load('resnet50-pool')\nexcept Exception as error: print(type(error).__name__, error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("UsageError extractor 'resnet50-pool' needs the package 'torchvision'")
    assert "pip install 'imagepivot[extractors]'" in done.stdout


def test_fingerprint_is_of_the_parameters_alone_and_not_of_their_order():
    spec = FeatureSpec(name="x", shape=(1,))
    first = Description(spec, {"a": 1, "b": [2, "é"]})
    assert first.fingerprint == Description(spec, {"b": [2, "é"], "a": 1}).fingerprint
    assert first.fingerprint != Description(spec, {"a": 1, "b": [2, "e"]}).fingerprint
    assert first.fingerprint == hashlib.sha256('{"a":1,"b":[2,"é"]}'.encode()).hexdigest()
