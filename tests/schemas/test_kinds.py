import json

import pyarrow as pa
import pytest

from schemas.features import FeatureSpec
from schemas.kinds import FAILURES, KEY_COLUMNS, group_rows, schema_of

POOL = FeatureSpec(name="resnet50-pool", shape=(2048,), source="He et al. 2016")
REGIONS16 = FeatureSpec(name="faster-rcnn-36", shape=(36, 2048), dtype="float16")

WORDS = FeatureSpec(name="word-vectors", shape=(300,))

SPECS = {"features": POOL, "regions": REGIONS16, "embeddings": POOL, "word-vectors": WORDS, "token-features": POOL}


@pytest.mark.parametrize("kind", KEY_COLUMNS)
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
    for kind in sorted({*KEY_COLUMNS} - {"regions"}):
        assert not [field for field in schema_of(kind, SPECS.get(kind)) if b"shape" in field.metadata], kind


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "rows"),
    [
        ("features", (2048,), "float32", 512),  # 4 MiB
        ("features", (10, 4096), "float32", 64),  # 10 MiB
        ("features", (196, 2048), "float16", 41),  # 31 MiB
        ("regions", (36, 2048), "float32", 64),
    ],
)
def test_row_groups_of_wide_vectors_hold_a_few_images(kind, shape, dtype, rows):
    assert group_rows(schema_of(kind, FeatureSpec("x", shape, dtype))) == rows
