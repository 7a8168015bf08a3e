"""Features of trained weights, against the networks' own libraries and against meaning: classes, similar pictures and sentences.

All other tests draw their weights. The packages are of the extra `dev`: EfficientNet-Lite0 of ImageNet, and MiniLM, a BERT of six
layers that sentence-transformers trained.
"""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from pipelines.demo.run import trained_weights
from schemas.dataset import open_dataset
from tests.trained_pair import efficientnet, mean_vectors, unpack_minilm
from train.sts.correlation import cosines
from train.sts.pairs import read_sts

pytestmark = pytest.mark.slow

# PARALLEL-ASYM, the best of table 4 of Gella et al. 2017.
GELLA_BEST = {"images-2014": 84.5, "images-2015": 91.5}


# --- EfficientNet-Lite0 ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classifier():
    return efficientnet()


@pytest.fixture(scope="module")
def features(classifier, photos, imagepivot, tmp_path_factory) -> dict[str, np.ndarray]:
    """Our features of the photographs, by image id."""
    folder = tmp_path_factory.mktemp("trained") / "features"
    options = ("--extractor", "timm:tf_efficientnet_lite0", "--weights", trained_weights(), "--device", "cpu", "--workers", "1")
    done = imagepivot("features", photos / "images", folder, *options)
    assert "untrained" not in done.stdout + done.stderr
    dataset = open_dataset(folder)
    assert dataset.manifest.parameters["extractor"]["untrained"] is False
    return dict(zip(dataset.image_ids(), dataset.numpy(), strict=True))


def test_features_of_trained_weights_equal_timm(classifier, features, photos):
    import torch
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    transform = create_transform(**resolve_model_data_config(classifier), is_training=False)
    for file in sorted((photos / "images").iterdir()):
        with Image.open(file) as image, torch.inference_mode():
            maps = classifier.forward_features(transform(image.convert("RGB"))[None])
            expected = classifier.forward_head(maps, pre_logits=True)[0].numpy()
        assert np.abs(features[file.stem] - expected).max() < 1e-5 * np.abs(expected).max(), file.stem


def test_classifier_on_features_names_the_photographs(classifier, features):
    import torch
    from timm.data import ImageNetInfo

    names = ImageNetInfo("imagenet-1k").label_descriptions()  # timm's list of the classes in the order of ILSVRC 2012.
    found = {}
    for image_id in ("coffee", "camera", "voc_004545"):
        with torch.inference_mode():
            shares = classifier.get_classifier()(torch.from_numpy(features[image_id])).softmax(-1)
        found[image_id] = (names[int(shares.argmax())], pytest.approx(float(shares.max()), abs=0.005))
    assert found == {"coffee": ("espresso", 0.951), "camera": ("tripod", 0.939), "voc_004545": ("sorrel", 0.813)}


def test_nearest_photographs_are_one_in_colour_and_grey(features):
    first, second = zip(*combinations(sorted(features), 2), strict=True)
    similarities = cosines([features[image_id] for image_id in first], [features[image_id] for image_id in second])
    order = np.argsort(-similarities)
    assert [(first[pair], second[pair]) for pair in order[:2]] == [("cat", "cat_gray"), ("chelsea", "voc_000542")]  # Cats, all.


# --- MiniLM ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def minilm(tmp_path_factory) -> Path:
    return unpack_minilm(tmp_path_factory.mktemp("minilm"))


@pytest.mark.cluster  # Twice 2,527 sentences: 20 seconds of a core.
def test_token_features_of_minilm_compare_sentences_as_people_do(minilm, sts_pairs, imagepivot, tmp_path):
    sentences = list(dict.fromkeys(sentence for data in read_sts(sts_pairs) for sentence in data.sentences))
    lines = ["image_id\ttext", *(f"{row:04d}\t{sentence}" for row, sentence in enumerate(sentences))]
    (tmp_path / "raw.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    captions, tokens = tmp_path / "captions", tmp_path / "tokens"
    imagepivot("captions", tmp_path / "raw.tsv", captions, "--format", "table", "--quoting", "none", "--workers", "1")
    imagepivot("text-features", captions, tokens, "--model", minilm, "--device", "cpu")
    means = {sentences[int(row["image_id"])]: row["vectors"].mean(0) for row in open_dataset(tokens)}
    assert set(means) == set(sentences)
    ours, theirs = (
        {
            pairs.name: pairs.correlation(cosines([by[a] for a in pairs.first], [by[b] for b in pairs.second])).pearson
            for pairs in read_sts(sts_pairs)
        }
        for by in (means, dict(zip(sentences, mean_vectors(minilm, sentences), strict=True)))
    )
    assert ours == {"images-2014": pytest.approx(90.3, abs=0.2), "images-2015": pytest.approx(92.4, abs=0.2)}
    assert theirs == {"images-2014": pytest.approx(90.3, abs=0.2), "images-2015": pytest.approx(92.5, abs=0.2)}
    assert all(ours[name] > published for name, published in GELLA_BEST.items())
