"""Without detectron2, extractors that need it say how to install it, and everything else works."""

import sys

import pytest

from extractors import ExtractorRequest
from extractors.options import RegionOptions
from schemas.errors import InputError, UsageError

HOW = r"'detectron2'.*--no-build-isolation.*github\.com/facebookresearch/detectron2\.git@[0-9a-f]{40}"


@pytest.fixture(autouse=True)
def _without_detectron2(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("detectron2", "extractors.regions.detectron2_backend."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "detectron2", None)


@pytest.mark.parametrize("method", [ExtractorRequest.describe, ExtractorRequest.load])
def test_backend_without_detectron2_raises(method):
    with pytest.raises(UsageError, match=f"'faster-rcnn-36' with detectron2 needs the package {HOW}"):
        method(ExtractorRequest("faster-rcnn-36", weights="random:0", regions=RegionOptions(backend="detectron2")))


@pytest.mark.parametrize("method", [ExtractorRequest.spec, ExtractorRequest.describe, ExtractorRequest.load])
def test_detectron2_model_without_detectron2_raises(method):
    with pytest.raises(UsageError, match=rf"'detectron2:a\.yaml\+b\.pth' with detectron2 needs the package {HOW}"):
        method(ExtractorRequest("detectron2:a.yaml+b.pth"))


def test_torchvision_backend_needs_no_detectron2():
    with pytest.raises(InputError, match=r"no weights file 'nowhere\.pth'"):
        ExtractorRequest("faster-rcnn-36", weights="nowhere.pth", regions=RegionOptions(backend="torchvision")).describe()
