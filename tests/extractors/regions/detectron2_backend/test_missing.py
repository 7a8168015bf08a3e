"""Without detectron2, extractors that need it say how to install it, and everything else works."""

import re
import sys

import pytest

from extractors import ExtractorRequest
from extractors.options import RegionOptions
from schemas.errors import UsageError

HOW = r"'detectron2'.*--no-build-isolation.*github\.com/facebookresearch/detectron2\.git@[0-9a-f]{40}"


@pytest.fixture(autouse=True)
def _without_detectron2(monkeypatch):
    for module in [name for name in sys.modules if name.startswith(("detectron2", "extractors.regions.detectron2_backend."))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "detectron2", None)


@pytest.mark.parametrize(
    "request_",
    [
        ExtractorRequest("faster-rcnn-36", weights="random:0", regions=RegionOptions(backend="detectron2")),
        ExtractorRequest("detectron2:a.yaml+b.pth"),
    ],
    ids=["backend", "model"],
)
def test_request_without_detectron2_raises(request_):
    with pytest.raises(UsageError, match=f"'{re.escape(request_.name)}' with detectron2 needs the package {HOW}"):
        request_.describe()
