import json

import pyarrow as pa
import pytest

from schemas.features import FeatureSpec
from schemas.kinds import FAILURES, KEY_COLUMNS, schema_of

POOL = FeatureSpec(name="resnet50-pool", shape=(2048,), source="He et al. 2016")
REGIONS16 = FeatureSpec(name="faster-rcnn-36", shape=(36, 2048), dtype="float16")

WORDS = FeatureSpec(name="word-vectors", shape=(300,))

LABEL = "dictionary<values=string, indices=int32, ordered=0>"
CAPTION_KEY = [("image_id", "string"), ("language", LABEL), ("portion", LABEL), ("index", "int16"), ("split", LABEL)]
# The columns of design.md, section 4.
EXPECTED = {
    "captions": [*CAPTION_KEY, ("text", "string"), ("tokens", "list<item: string not null>")],
    "encoded": [*CAPTION_KEY, ("token_ids", "list<item: int32 not null>"), ("length", "int32")],
    "vocabulary": [("id", "int32"), ("token", "string"), ("count", "int64"), ("counts", "map<string, int64>")],
    "features": [("image_id", "string"), ("feature", "fixed_size_list<item: float not null>[2048]")],
    "regions": [
        ("image_id", "string"),
        ("width", "int32"),
        ("height", "int32"),
        ("num_regions", "int16"),
        ("boxes", "fixed_size_list<item: float not null>[144]"),
        ("features", "fixed_size_list<item: halffloat not null>[73728]"),
        ("class_ids", "fixed_size_list<item: int16 not null>[36]"),
        ("class_scores", "fixed_size_list<item: float not null>[36]"),
        ("attribute_ids", "fixed_size_list<item: int16 not null>[36]"),
        ("attribute_scores", "fixed_size_list<item: float not null>[36]"),
    ],
    "embeddings": [*CAPTION_KEY, ("embedding", "fixed_size_list<item: float not null>[2048]")],
    "word-vectors": [
        *(("language", LABEL), ("id", "int32"), ("token", "string")),
        ("vector", "fixed_size_list<item: float not null>[300]"),
    ],
    "token-features": [*CAPTION_KEY, ("length", "int32"), ("vectors", "list<item: float not null>")],
}
SPECS = {"features": POOL, "regions": REGIONS16, "embeddings": POOL, "word-vectors": WORDS, "token-features": POOL}


@pytest.mark.parametrize("kind", EXPECTED)
def test_columns(kind):
    schema = schema_of(kind, SPECS.get(kind))
    assert [(field.name, str(field.type)) for field in schema] == EXPECTED[kind]
    assert all(name in schema.names for name in KEY_COLUMNS[kind])


@pytest.mark.parametrize("kind", EXPECTED)
def test_nothing_is_nullable_and_everything_is_described(kind):
    for field in [*schema_of(kind, SPECS.get(kind)), *FAILURES]:
        assert not field.nullable, field.name
        assert len(field.metadata[b"description"]) > 5, field.name
        if pa.types.is_list(field.type) or pa.types.is_fixed_size_list(field.type):
            assert not field.type.value_field.nullable, field.name


def test_vectors_of_several_dimensions_state_their_shape_as_json():
    stated = {field.name: json.loads(field.metadata.get(b"shape", b"null")) for field in schema_of("regions", REGIONS16)}
    assert {name: shape for name, shape in stated.items() if shape} == {"boxes": [36, 4], "features": [36, 2048]}
    crops = FeatureSpec("crops", (10, 4096))
    assert schema_of("features", crops).field("feature").metadata[b"shape"] == b"[10, 4096]"
    for kind in sorted({*EXPECTED} - {"regions"}):
        assert not [field for field in schema_of(kind, SPECS.get(kind)) if b"shape" in field.metadata], kind
