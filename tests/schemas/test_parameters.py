import pytest

from schemas.parameters import (
    CaptionsParameters,
    EncodedParameters,
    FeaturesParameters,
    VocabularyParameters,
    WordVectorsParameters,
)

# As manifests hold them, key by key.
RECIPE = {
    "recipe": "multi30k-lc",
    "lowercase": True,
    "normalize": True,
    "tokenizer": "moses",
    "truecase": False,
    "moses_commit": "3a0631a",
    "sacremoses": "0.2.0",
    "escape": True,
}
FEATURE = {"name": "resnet50-pool", "shape": [2048], "dtype": "float32", "source": "He et al. 2016"}
STORED = {
    "captions": (
        CaptionsParameters,
        {**RECIPE, "default_language": "en", "columns": {"text": "caption"}, "languages": ["de"], "portions": [], "splits": []},
    ),
    "truecased": (
        CaptionsParameters,
        {
            "recipe": "moses-truecase",
            "truecase": True,
            "languages": [],
            "portions": [],
            "splits": [],
            "train_splits": ["train"],
        },
    ),
    "vocabulary": (
        VocabularyParameters,
        {"min_count": 4, "count_scope": "language", "splits": ["train"], "languages": [], "portions": ["comparable"]},
    ),
    "encoded": (EncodedParameters, {"max_length": 100, "vocabulary_size": 388, "text": RECIPE}),
    "extracted": (
        FeaturesParameters,
        {"feature": FEATURE, "extractor": {"untrained": True, "transform": {"crop": 224}}, "extractor_fingerprint": "15a7"},
    ),
    "imported": (FeaturesParameters, {"feature": FEATURE, "imported": {"format": "npy", "id_rule": "name"}}),
    "embedded": (
        FeaturesParameters,
        {"feature": FEATURE, "model": {"weights_sha256": "ab", "similarity": "cosine", "languages": ["en", "de"]}},
    ),
    "word vectors": (WordVectorsParameters, {"feature": FEATURE, "languages": ["de", "en"], "lookup": "as they are"}),
}


@pytest.mark.parametrize(("kind", "stored"), STORED.values(), ids=STORED.keys())
def test_parameters_round_trip(kind, stored):
    assert kind.from_json(stored).to_json() == stored
