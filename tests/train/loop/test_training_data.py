from collections import Counter
from dataclasses import replace

import pytest

from schemas.errors import DatasetError, UsageError
from schemas.parameters import VocabularyParameters
from schemas.vocabulary import Vocabulary
from tests.train.trainings import CONFIG as TRAINED
from tests.train.trainings import events, rewrite
from train.config.sections import from_toml
from train.data.sampling import ImageSampler, TaskSampler
from train.loop.training_data import load_training_inputs, tokens_of
from train.models.catalogue import build_model

COUNTS = {"en": {"a": 5, "b": 4, "c": 1}, "de": {"b": 9, "c": 4, "d": 3}}
CONFIG = '[data]\nportions = { de = ["comparable"], en = ["comparable", "translation"] }\n'


def test_tokens_of_a_language():
    vocabulary = Vocabulary.from_counts(COUNTS, min_count=4)
    by_language = VocabularyParameters(min_count=4, count_scope="language")
    own = {language: [vocabulary.tokens[n] for n in tokens_of(vocabulary, language, by_language)] for language in COUNTS}
    specials = ["<pad>", "<start>", "<end>", "<unk>"]
    assert own == {"en": [*specials, "b", "a"], "de": [*specials, "b", "c"]}
    # The same as the vocabulary of the language alone.
    for language, counts in COUNTS.items():
        assert set(own[language]) == set(Vocabulary.from_counts({language: counts}, min_count=4).tokens)
    joint = Vocabulary.from_counts(COUNTS, min_count=4, scope="joint")
    tokens = tokens_of(joint, "en", VocabularyParameters(min_count=4, count_scope="joint"))
    assert [joint.tokens[n] for n in tokens[4:]] == ["b", "a", "c"]
    assert len(tokens_of(joint, "fr", VocabularyParameters())) == 4


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("drawn", ["", "captions_per_image = 'one'\nimages = 'half'"])
def test_min_count_applies_to_sampled_captions(toy, shared, drawn):
    """Kádár et al. 2018, section 4, by brute force: the tokens of each caption of the row, one at a time."""
    config = from_toml(CONFIG + f"min_count = 4\n{drawn}\n[model]\nshared_encoder = {str(shared).lower()}", "test")
    training_inputs = load_training_inputs(config, toy, seed=3)
    captions, counts = training_inputs.training.captions, {name: Counter() for name in config.data.languages}
    for row in range(len(captions)):
        tokens = captions.token_ids[captions.offsets[row] : captions.offsets[row + 1]].tolist()
        counts[captions.language_names[captions.languages[row]]].update(tokens)
    for language in config.data.languages:
        of_encoder = counts["de"] + counts["en"] if shared else counts[language]
        frequent = {token for token, count in of_encoder.items() if count >= 4}
        assert training_inputs.dimensions.language_ids[language] == tuple(sorted({0, 1, 2, 3} | frequent))
        assert len(training_inputs.dimensions.language_ids[language]) < len(training_inputs.vocabulary)
    model = build_model(config.model, training_inputs.dimensions, 0)
    assert [len(encoder.words.weight) for encoder in model.sentences] == (
        [len(training_inputs.dimensions.language_ids["en"])]
        if shared
        else [len(training_inputs.dimensions.language_ids[language]) for language in config.data.languages]
    )


@pytest.mark.parametrize("l2", [True, False])
def test_training_inputs_follow_the_configuration(toy, l2):
    text = CONFIG + f"captions_per_image = 'one'\nimages = 'half'\nl2_features = {str(l2).lower()}\n"
    config = from_toml(text + "[loss]\nc2c_probability = 1.0\n[schedule]\nbatch_size = 5\nbucket_by_length = true", "test")
    training_inputs = load_training_inputs(config, toy, seed=0)
    assert training_inputs.dimensions.languages == training_inputs.training.captions.language_names == ("de", "en")
    assert training_inputs.dimensions.feature_shape == (8,)
    assert training_inputs.dimensions.vocabulary_size == len(training_inputs.vocabulary)
    assert training_inputs.captions_parameters["text"] == {"recipe": "raw"}
    assert len(training_inputs.training.captions) == 2 * 20  # One caption of each language for half of 40 images.
    assert len(training_inputs.validation.captions) == 12 * (2 + 3 + 1)  # Nothing is drawn from the validation split.
    for data, split in ((training_inputs.training, "train"), (training_inputs.validation, "val")):
        assert data.captions.split == split
        norms = (data.features[:] ** 2).sum(1) ** 0.5
        assert (abs(norms - 1).max() < 1e-6) == l2
    sampler, captions = training_inputs.sampler(config, 0), training_inputs.training.captions
    assert load_training_inputs(config, toy, seed=1).training.captions.image_ids != captions.image_ids
    expected = TaskSampler(captions, 5, seed=0, c2c_probability=1.0, bucket_by_length=True)
    assert [[side.tolist() for side in sampler.next().captions] for _ in range(9)] == [
        [side.tolist() for side in expected.next().captions] for _ in range(9)
    ]
    pivot = from_toml(text + "[loss]\ncaption_weight = 0.0\n[schedule]\nbatches = 'images'\nbatch_size = 5", "test")
    sampler, expected = training_inputs.sampler(pivot, 3), ImageSampler(captions, 5, seed=3)
    assert sampler.next().images.tolist() == expected.next().images.tolist()


@pytest.mark.parametrize("batches", ["tasks", "images"])
def test_sampler_of_a_single_image_is_refused(toy, new_captions, batches):
    config = from_toml(CONFIG + f"[schedule]\nbatches = '{batches}'\nbatch_size = 2", "test")
    rows = [
        ("a", "en", "comparable", 0, [1, 5, 2]),
        ("a", "de", "comparable", 0, [1, 6, 2]),
        ("b", "en", "comparable", 0, [1, 2]),
    ]
    training_inputs = load_training_inputs(config, toy, seed=0)

    def sampler_of(rows):
        captions = new_captions(rows, ("en", "de"))
        return replace(training_inputs, training=replace(training_inputs.training, captions=captions)).sampler(config, 0)

    with pytest.raises(UsageError, match=r"split 'train' has captions in (de|en and de) of a single image, .* no negatives"):
        sampler_of(rows)
    sampler_of([*rows, ("b", "de", "comparable", 0, [1, 2])])


@pytest.fixture
def unvalidated(toy, tmp_path):
    """The toy without German captions in the validation split."""

    def change(rows):
        return [row for row in rows if (row["split"], row["language"]) != ("val", "de")]

    return replace(toy, captions=rewrite(toy.captions, tmp_path / "few", change))


@pytest.mark.slow
def test_unmonitored_language_without_validation_captions(unvalidated, train_toy, tmp_path):
    assert train_toy(TRAINED + 'monitor_languages = ["en"]', corpus=unvalidated).progress.step == 44
    for line in events(tmp_path / "run", "evaluation"):
        assert "de" not in line
        assert line["score"] == line["en"]["sum_of_recalls"] > 0
    languages = {name for line in events(tmp_path / "run", "step") for name in line["languages"]}
    assert "de" in languages  # It is trained all the same.


def test_monitored_language_without_validation_captions_is_refused(unvalidated):
    message = r"has no captions of split 'val', language 'de', portion 'comparable'\. .* schedule\.monitor_languages"
    with pytest.raises(DatasetError, match=message):
        load_training_inputs(from_toml(TRAINED, "test"), unvalidated, seed=0)
