import hashlib

from schemas.fingerprints import SCHEMA_VERSION, fingerprint_of


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
