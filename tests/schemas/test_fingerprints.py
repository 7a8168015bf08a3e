import hashlib

import pytest

from schemas.fingerprints import SCHEMA_VERSION, canonical_json, fingerprint_of


def test_fingerprint_of_known_text():
    fingerprint = fingerprint_of(
        kind="features",
        parameters={"weights": "sha256:00", "feature": {"shape": (2048,), "name": "pool"}, "note": "größer"},
        inputs=[{"name": "images", "fingerprint": "ab"}],
        shards=16,
    )
    text = (
        '{"inputs":[{"fingerprint":"ab","name":"images"}],"kind":"features",'
        '"parameters":{"feature":{"name":"pool","shape":[2048]},"note":"größer","weights":"sha256:00"},'
        '"schema_version":1,"shards":16}'
    )
    assert SCHEMA_VERSION == 1
    assert fingerprint == hashlib.sha256(text.encode("utf-8")).hexdigest()


def test_fingerprint_ignores_order_and_container():
    first = fingerprint_of("captions", {"a": 1, "b": {"x": [1, 2], "y": None}}, [{"n": 1, "m": 2}], 4)
    other = {"b": {"y": None, "x": (1, 2)}, "a": 1}
    assert fingerprint_of("captions", other, ({"m": 2, "n": 1},), 4) == first


BASE = {"kind": "captions", "parameters": {"a": {"b": 1}, "list": [1, 2]}, "inputs": [{"n": "x"}, {"n": "y"}], "shards": 4}


def test_every_part_counts():
    changes = [
        {},
        {"kind": "encoded"},
        {"shards": 5},
        {"parameters": {"a": {"b": 2}, "list": [1, 2]}},
        {"parameters": {"a": {"b": "1"}, "list": [1, 2]}},
        {"parameters": {"a": {"b": True}, "list": [1, 2]}},
        {"parameters": {"a": {"b": 1}, "list": [2, 1]}},
        {"parameters": {"a": {"b": 1}, "list": [1, 2], "c": None}},
        {"parameters": {"a": {"b": 1}}},
        {"parameters": {}},
        {"inputs": [{"n": "y"}, {"n": "x"}]},
        {"inputs": [{"n": "x"}]},
        {"inputs": [{"n": "x"}, {"n": "y", "more": 1}]},
        {"inputs": []},
    ]
    assert len({fingerprint_of(**{**BASE, **change}) for change in changes}) == len(changes)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_canonical_json_refuses_nan(number):
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json({"a": [number]})
    with pytest.raises(TypeError, match="not JSON serializable"):
        canonical_json({"a": {1, 2}})
