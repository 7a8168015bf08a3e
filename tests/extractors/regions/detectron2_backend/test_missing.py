"""Without detectron2, extractors that need it say how to install it, and everything else works."""

import re
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
@pytest.mark.parametrize(
    "request_",
    [
        ExtractorRequest("faster-rcnn-36", weights="random:0", regions=RegionOptions(backend="detectron2")),
        ExtractorRequest("detectron2:a.yaml+b.pth"),
    ],
    ids=["backend", "model"],
)
def test_request_without_detectron2_raises(method, request_):
    with pytest.raises(UsageError, match=f"'{re.escape(request_.name)}' with detectron2 needs the package {HOW}"):
        method(request_)


def test_torchvision_backend_needs_no_detectron2():
    with pytest.raises(InputError, match=r"no weights file 'nowhere\.pth'"):
        ExtractorRequest("faster-rcnn-36", weights="nowhere.pth", regions=RegionOptions(backend="torchvision")).describe()
