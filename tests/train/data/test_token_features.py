from dataclasses import replace

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from tests.train.trainings import ALL_PORTIONS, rewrite
from train.data.batches import CaptionBatch
from train.data.splits import open_data


def opened(corpus, split="val", **options):
    options = {"portions": ALL_PORTIONS, "token_features": corpus.token_features, "token_width": 4, **options}
    return open_data(corpus.captions, corpus.features, split=split, **options)


def by_key(location):
    return {(row["image_id"], row["language"], row["portion"], row["index"]): row["vectors"] for row in open_dataset(location)}


def key_of(captions, row):
    return (
        captions.image_ids[captions.images[row]],
        captions.language_names[captions.languages[row]],
        captions.portion_names[captions.portions[row]],
        int(captions.indices[row]),
    )


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_token_vectors_of_a_batch(toy, write_tokens, tmp_path, mapped, dtype):
    corpus = replace(toy, token_features=write_tokens(tmp_path, dtype=dtype))
    data = opened(corpus, memory_map=str(tmp_path / "maps") if mapped else None)
    stored, captions = by_key(corpus.token_features), data.captions
    assert captions.vectors.stored.dtype == np.dtype(dtype)
    assert isinstance(captions.vectors.stored, np.memmap) == mapped
    rows = np.array([5, 0, 5, len(captions) - 1])
    expected = np.concatenate([stored[key_of(captions, row)] for row in rows])
    for batch in (captions.batch(rows), captions.batch(rows).compact(), captions.select(rows).batch(np.arange(4))):
        found = batch.token_vectors()
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected.astype(np.float32))
        np.testing.assert_array_equal(batch.lengths, captions.lengths[rows])
        np.testing.assert_array_equal(batch.padded(-1), captions.batch(rows).padded(-1))
    empty = captions.batch(np.zeros(0, np.int64))
    assert empty.token_vectors().shape == empty.compact().token_vectors().shape == (0, 4)
    without = CaptionBatch(captions.token_ids, captions.offsets, np.arange(2)).compact()
    with pytest.raises(ValueError, match="the captions have no token vectors"):
        without.token_vectors()


def test_token_fingerprints(toy_tokens):
    found = opened(toy_tokens).fingerprints
    assert found["token_features"] == open_dataset(toy_tokens.token_features).fingerprint
    assert found["token_model"] == "f" * 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expected": {"token_model": "0" * 64}}, "the token features come from another model"),
        ({"token_features": "captions"}, "holds encoded, expected token-features"),
        ({"token_features": "other"}, r"belongs to other captions \(fingerprint dddddddddddd\.\.\.\) than"),
        ({"token_features": "short"}, r"has 5 vectors of the caption [\w/-]+, which has \d token ids"),
    ],
)
def test_unfitting_token_features_are_refused(toy_tokens, write_tokens, tmp_path, options, message):
    inputs = ({"name": "captions", "fingerprint": "d" * 64},)
    locations = {
        "captions": lambda: toy_tokens.captions,
        "other": lambda: rewrite(toy_tokens.token_features, tmp_path / "other", list, inputs=inputs),
        "short": lambda: write_tokens(tmp_path, cut=3),
    }
    if "token_features" in options:
        options = {"token_features": locations[options["token_features"]]()}
    with pytest.raises(DatasetError, match=message):
        opened(toy_tokens, **options)


def test_missing_captions_are_refused(toy_tokens, tmp_path):
    failure = {"key": "x", "uri": "", "stage": "extract", "reason": "not_finite", "message": ""}
    location = rewrite(
        toy_tokens.token_features,
        tmp_path / "lacks",
        lambda rows: [row for row in rows if row["image_id"] != "val-003"],
        failures=[failure],
    )
    message = r"lacks \d+ of \d+ captions: val-003/\w+/comparable/0, .* \(1 captions failed there\)"
    with pytest.raises(DatasetError, match=message):
        opened(replace(toy_tokens, token_features=location))
    assert len(opened(replace(toy_tokens, token_features=location), "train").captions)


@pytest.mark.parametrize("mapped", [False, True])
def test_nonfinite_token_vectors_are_refused(toy_tokens, tmp_path, mapped):
    def spoil(rows):
        rows[7]["vectors"] = np.full_like(rows[7]["vectors"], np.nan)
        return rows

    location = rewrite(toy_tokens.token_features, tmp_path / "nan", spoil)
    with pytest.raises(DatasetError, match="has a NaN or infinite vector of"):
        opened(replace(toy_tokens, token_features=location), memory_map=str(tmp_path / "maps") if mapped else None)
