"""Joining captions and features, and everything that is refused before a training starts."""

import hashlib
import json
import shutil

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from tests.train.trainings import ALL_PORTIONS, rewrite
from train.data.captions import disjoint_halves, half_of_images, one_caption_per_image, read_captions
from train.data.features import extractor_fingerprint
from train.data.splits import MissingFeatures, check_fingerprints, open_data

COMPARABLE = {"en": ("comparable",), "de": ("comparable",)}
EN_DE = {language: ALL_PORTIONS[language] for language in ("en", "de")}


def same_captions(a, b) -> bool:
    names = ("token_ids", "offsets", "images", "languages", "portions", "indices")
    return a.image_ids == b.image_ids and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)


@pytest.mark.parametrize(
    ("arguments", "regime"),
    [
        ({}, lambda captions, seed: captions),
        ({"captions_per_image": "one"}, one_caption_per_image),
        ({"images": "half"}, half_of_images),
        ({"images": "disjoint"}, disjoint_halves),
        ({"captions_per_image": "one", "images": "half"}, lambda c, seed: half_of_images(one_caption_per_image(c, seed), seed)),
    ],
)
def test_open_data_joins_captions_of_a_regime_and_features(toy, arguments, regime):
    data = open_data(toy.captions, toy.features, toy.vocabulary, split="train", portions=COMPARABLE, seed=4, **arguments)
    captions = read_captions(open_dataset(toy.captions), split="train", portions=COMPARABLE)
    assert same_captions(data.captions, regime(captions, 4).compact())
    # Only the training data is read.
    assert data.features.shape == (20 if arguments.get("images") == "half" else 40, 8)
    by_id = {row["image_id"]: row["feature"].tolist() for row in open_dataset(toy.features)}
    assert data.features[:].tolist() == [by_id[image_id] for image_id in data.captions.image_ids]
    named = {name: open_dataset(getattr(toy, name)).fingerprint for name in ("captions", "features", "vocabulary")}
    assert data.fingerprints == {**named, "extractor": extractor_fingerprint(open_dataset(toy.features))}


def test_other_vocabulary_is_refused(toy, other_toy, tmp_path):
    encoded, other = (open_dataset(location).fingerprint[:12] for location in (toy.vocabulary, other_toy.vocabulary))
    with pytest.raises(DatasetError, match=rf"another vocabulary \(fingerprint {encoded}\.\.\.\) than .*\({other}\.\.\.\)"):
        open_data(toy.captions, toy.features, other_toy.vocabulary, split="val", portions=ALL_PORTIONS)
    encoded = rewrite(toy.captions, tmp_path, list, inputs=())
    with pytest.raises(DatasetError, match="does not name its vocabulary"):
        open_data(encoded, toy.features, split="val", portions=ALL_PORTIONS)


def test_vocabulary_without_a_language_is_refused(toy, tmp_path):
    vocabulary = rewrite(toy.vocabulary, tmp_path / "voc", list, parameters={"languages": ["de", "en"]}, shards=1)
    inputs = ({"name": "vocabulary", "fingerprint": open_dataset(vocabulary).fingerprint},)
    folders = rewrite(toy.captions, tmp_path / "encoded", list, inputs=inputs), toy.features, vocabulary
    assert len(open_data(*folders, split="val", portions=EN_DE).captions)
    with pytest.raises(DatasetError, match="was counted on captions in de, en: those in fr"):
        open_data(*folders, split="val", portions=ALL_PORTIONS)


def test_missing_features_are_refused(toy, tmp_path):
    few = rewrite(
        toy.features, tmp_path / "few", lambda rows: [row for row in rows if row["image_id"] not in ("val-003", "val-007")]
    )
    # An image has three English and two German captions.
    message = r"features of 2 of 12 images of split 'val', with 10 of 60 captions: val-003, val-007\. .*--allow"
    with pytest.raises(DatasetError, match=message):
        open_data(toy.captions, few, split="val", portions=COMPARABLE)


def test_portion_without_any_features_is_refused(toy, tmp_path):
    """It would silently have no part in the training."""

    def only_english(rows):
        return [row for row in rows if row["language"] == "en" or row["image_id"] == "val-003"]

    captions = rewrite(toy.captions, tmp_path / "captions", only_english)
    features = rewrite(toy.features, tmp_path / "few", lambda rows: [row for row in rows if row["image_id"] != "val-003"])
    with pytest.raises(DatasetError, match="lacks the features of all images with captions in de comparable of split 'val'"):
        open_data(captions, features, split="val", portions=COMPARABLE, allow_missing_features=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vocabulary", "was encoded with another vocabulary, with other token ids"),
        ("extractor", "comes from another extractor, or from other weights or settings"),
    ],
)
def test_unexpected_fingerprints_are_refused(toy, name, message):
    known = open_data(toy.captions, toy.features, split="val", portions=ALL_PORTIONS).fingerprints
    fingerprints = {key: known[key] for key in ("vocabulary", "extractor")}
    data = open_data(toy.captions, toy.features, split="val", portions=ALL_PORTIONS, expected=fingerprints)
    assert data.fingerprints == known
    shown = rf"\(fingerprint {fingerprints[name][:12]}\.\.\., expected 0123\.\.\.\)"
    with pytest.raises(DatasetError, match=f"{message}.* {shown}"):
        open_data(toy.captions, toy.features, split="val", portions=ALL_PORTIONS, expected={**fingerprints, name: "0123"})
    with pytest.raises(DatasetError, match=message):
        check_fingerprints(fingerprints, {name: "0123"}, captions="c", features="f")


def test_open_data_checks_before_reading_features(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.splits.read_features", lambda *args, **kwargs: pytest.fail("features were read"))
    shutil.copytree(toy.features, tmp_path / "features")
    manifest = json.loads((tmp_path / "features" / "_manifest.json").read_text())
    (tmp_path / "features" / "_manifest.json").write_text(json.dumps({**manifest, "fingerprint": "0123"}))
    for folders, message in (
        ((toy.captions, str(tmp_path / "features")), "was changed since it was written"),
        ((toy.captions, toy.features, toy.captions), "holds encoded, expected vocabulary"),
    ):
        with pytest.raises(DatasetError, match=message):
            open_data(*folders, split="val", portions=ALL_PORTIONS)


def test_missing_features_are_excluded(toy, gappy):
    lacking = [f"train-{n:03d}" for n in (3, 5, 7, 11, 13, 17, 19)]
    whole = open_data(toy.captions, toy.features, split="train", portions=EN_DE)
    data = open_data(gappy.captions, gappy.features, split="train", portions=EN_DE, allow_missing_features=True)
    kept = [image_id not in lacking for image_id in whole.captions.image_ids]
    assert same_captions(data.captions, whole.captions.select(np.array(kept)[whole.captions.images]).compact())
    assert np.array_equal(data.features[:], whole.features[:][kept])
    assert data.missing_features == MissingFeatures(
        split="train",
        images=7,
        captions=7 * (3 + 2 + 1),
        first=("train-003", "train-005", "train-007", "train-011", "train-013"),
        sha256=hashlib.sha256("".join(f"{name}\n" for name in lacking).encode()).hexdigest(),
    )
    # Samples are those of all images.
    sampled = {"split": "train", "portions": {"en": ["comparable"]}, "images": "half", "seed": 3}
    half = open_data(toy.captions, toy.features, **sampled).captions.image_ids
    some = open_data(gappy.captions, gappy.features, **sampled, allow_missing_features=True).captions.image_ids
    assert some == tuple(image_id for image_id in half if image_id not in lacking) != half
