from types import SimpleNamespace

import pytest

from extractors.base import Description
from extractors.tokens.request import TextRequest
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec


@pytest.fixture
def loads(monkeypatch) -> list[tuple[TextRequest, str]]:
    """The requests that were loaded, and onto which devices."""
    found: list[tuple[TextRequest, str]] = []

    def load(request: TextRequest, device: str) -> SimpleNamespace:
        found.append((request, device))
        return SimpleNamespace(description=Description(FeatureSpec("bert", (4,)), {"sub_words": request.pooling}))

    monkeypatch.setattr(TextRequest, "load", load)
    return found


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return str(tmp_path)


def test_describe_loads_model_once_per_request(model, loads):
    first = TextRequest(model).describe()
    assert TextRequest(model).describe("cuda") == first
    assert TextRequest(model, "first").describe().parameters == {"sub_words": "first"}
    assert loads == [(TextRequest(model), "cpu"), (TextRequest(model, "first"), "cpu")]


def test_describe_adapter_is_not_cached(model, tmp_path, loads):
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    for _ in range(2):
        TextRequest(model).describe()
    assert len(loads) == 2


def test_describe_invalid_request_raises(model, loads):
    with pytest.raises(UsageError, match="--model is missing"):
        TextRequest("").describe()
    with pytest.raises(InputError, match="'gs://bucket/bert' is in an object store"):
        TextRequest("gs://bucket/bert").describe()
    assert loads == []
