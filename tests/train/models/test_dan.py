from dataclasses import replace

import numpy as np
import pytest
import torch

from schemas.errors import UsageError
from tests.train.models.equations import both_ways
from tests.train.models.test_memory_attention import parameters_of, steps_by_hand
from train.config.models import DanConfig
from train.data.batches import CaptionBatch
from train.models.catalogue import build_model
from train.models.dan import Dan
from train.models.dimensions import Dimensions
from train.models.retrieval_model import Encoded, ImageBatch

CONFIG = DanConfig(embed_dim=4, word_dim=3, attention_steps=2, attention_dim=5, dropout=0.0)
DIMENSIONS = Dimensions(("en", "de"), 9, (6, 8), {"de": (0, 1, 2, 3, 5, 7)})


@pytest.fixture
def model() -> Dan:
    model = build_model(CONFIG, DIMENSIONS, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


def batch_of(captions: list[list[int]]) -> CaptionBatch:
    return CaptionBatch(np.concatenate(captions), np.cumsum([0, *map(len, captions)]), np.arange(len(captions)))


def drawn(rng: np.random.Generator, count: int) -> list[list[int]]:
    return [[1, *rng.integers(3, 9, rng.integers(0, 7)).tolist(), 2] for _ in range(count)]


def test_an_image_is_its_contexts(model):
    features = torch.randn(5, 6, 8, dtype=torch.float64)
    encoded = model.encode_images(ImageBatch(features))
    assert (encoded.mask, encoded.values.shape, model.width, model.heads) == (None, (5, 12), 12, 1)
    for row, image in enumerate(features.numpy()):
        wanted, _ = steps_by_hand(image, parameters_of(model.attention), 2)
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("language", ["en", "de"])
def test_a_caption_is_its_contexts(model, language):
    encoder, captions = model.sentences.of(language), drawn(np.random.default_rng(0), 8)
    encoded = model.encode_captions(batch_of(captions), language)
    table, parameters = encoder.words.weight.detach().numpy(), parameters_of(encoder.reader.lstm)
    for row, caption in enumerate(captions):
        # In German ids without a vector of their own are read as <unk>.
        rows = caption if language == "en" else [{0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 7: 5}.get(token, 3) for token in caption]
        words = sum(both_ways(table[rows], parameters))  # The sum of both directions.
        wanted, _ = steps_by_hand(words, parameters_of(encoder.pooling), 2)
        np.testing.assert_allclose(encoded.values[row].detach(), wanted.ravel(), rtol=0, atol=1e-12)


def test_a_score_is_the_sum_over_the_steps(model):
    images = model.encode_images(ImageBatch(torch.randn(5, 6, 8, dtype=torch.float64)))
    captions = model.encode_captions(batch_of(drawn(np.random.default_rng(1), 3)), "en")
    scores = model.scores(images, captions)
    assert scores.shape == (5, 3)
    for row, image in enumerate(images.values.detach().numpy().reshape(5, 3, 4)):
        for column, caption in enumerate(captions.values.detach().numpy().reshape(3, 3, 4)):
            wanted = sum(image[step] @ caption[step] for step in range(3))
            np.testing.assert_allclose(scores[row, column].detach(), wanted, rtol=0, atol=1e-12)
    assert (model.similarity, model.vectors) == ("inner-product", True)


@pytest.mark.parametrize("seed", range(10))
def test_absent_regions_and_padding_change_nothing(model, seed):
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random((7, 6)) < rng.choice([0.3, 0.8]))
    features = torch.from_numpy(rng.standard_normal((7, 6, 8)))
    features[~mask] = torch.tensor(rng.choice([np.nan, np.inf, 1e6, 0.5], (int((~mask).sum()), 8)))
    together = model.encode_images(ImageBatch(features, mask)).values
    for row in range(7):
        kept = features[row][mask[row]][None]
        alone = model.encode_images(ImageBatch(kept)).values[0] if mask[row].any() else torch.zeros(12, dtype=torch.float64)
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-12)
    captions = drawn(rng, 7)
    encoded = model.encode_captions(batch_of(captions), "en").values
    for row, caption in enumerate(captions):
        torch.testing.assert_close(encoded[row], model.encode_captions(batch_of([caption]), "en").values[0], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_gradients_of_a_whole_model():
    small = DanConfig(embed_dim=2, word_dim=2, attention_steps=2, attention_dim=3, dropout=0.0)
    model = build_model(small, Dimensions(("en",), 6, (6, 3)), seed=0).double()
    features = torch.randn(3, 6, 3, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[6], [2], [4]])
    captions = batch_of([[1, 4, 2], [1, 4, 5, 2], [1, 3, 2]])
    chosen = [name for name, _ in model.named_parameters() if name.startswith(("attention", "sentences.0"))]

    class Shell(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self):
            images, sentences = self.model.encode_images(ImageBatch(features, mask)), self.model.encode_captions(captions, "en")
            return self.model.scores(images, sentences)

    def function(*values):
        named = {f"model.{name}": value for name, value in zip(chosen, values, strict=True)}
        return torch.func.functional_call(Shell(), named, ())

    assert torch.autograd.gradcheck(function, [model.get_parameter(name) for name in chosen])


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "compiled"])
def test_other_precisions_and_compilation(precision):
    model = build_model(replace(CONFIG, dropout=0.5), DIMENSIONS, seed=0).eval()
    images = ImageBatch(torch.randn(4, 6, 8), torch.arange(6) < torch.tensor([[6], [2], [4], [1]]))
    captions = batch_of(drawn(np.random.default_rng(0), 4))

    def scores(images):
        return model.scores(model.encode_images(images), model.encode_captions(captions, "en"))

    expected = scores(images)
    if precision == "bf16":
        with torch.autocast("cpu", torch.bfloat16):
            found = scores(images)
    else:
        torch._dynamo.reset()
        found = torch.compile(scores, backend="aot_eager")(images)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if precision == "bf16" else 1e-6)
    model.train()
    found = torch.compile(scores, backend="aot_eager")(images) if precision == "compiled" else scores(images)
    found.sum().backward()
    assert all(parameter.grad.isfinite().all() for name, parameter in model.named_parameters() if "sentences.1" not in name)


def test_features_of_one_vector_and_unknown_languages_are_refused(model):
    with pytest.raises(UsageError, match=r"the shape \[2048\], but a model of the kind 'dan' attends to several features"):
        build_model(CONFIG, replace(DIMENSIONS, feature_shape=(2048,)), seed=0)
    with pytest.raises(ValueError, match=r"language is 'cs', expected one of \('en', 'de'\)"):
        model.encode_captions(batch_of([[1, 2]]), "cs")


def test_each_language_has_an_encoder_of_its_own(model):
    assert model.modules_by_language() == {"sentences.0": ("en",), "sentences.1": ("de",)}
    model.encode_captions(batch_of([[1, 4, 2]]), "de").values.sum().backward()
    assert all((parameter.grad is not None) == name.startswith("sentences.1.") for name, parameter in model.named_parameters())


def test_attention_weights_make_the_embeddings(model):
    """The contexts of a caption are means of its words under the weights that are shown, those of an image are made of such."""
    features = torch.randn(1, 6, 8, dtype=torch.float64)
    images = ImageBatch(features, torch.tensor([[True, True, False, True, True, False]]))
    captions = batch_of([[1, 5, 4, 6, 2]])
    found = model.attention_weights(images, captions, "de")
    assert (found.regions.shape, found.words.shape, found.pairs) == ((2, 4), (2, 5), None)
    for weights in (found.regions, found.words):
        np.testing.assert_allclose(weights.detach().sum(1), 1, atol=1e-12)
        assert float(weights.detach().max() - weights.detach().min()) > 0.01
    words = 2 * model.sentences[1].states(captions).values[0]
    contexts = model.encode_captions(captions, "de").values[0].view(3, 4)
    torch.testing.assert_close(contexts, torch.cat([words.mean(0, keepdim=True), found.words @ words]), rtol=0, atol=1e-12)
    contexts = model.encode_images(images).values[0].view(3, 4)
    pooled = found.regions @ features[0][images.mask[0]]
    for step in range(2):
        torch.testing.assert_close(
            contexts[step + 1], (model.attention.maps[step + 1].weight @ pooled[step]).tanh(), rtol=0, atol=1e-12
        )


def test_a_search_among_vectors_finds_what_scores_do(model):
    """Joint vectors are all that scores need: an index of inner products ranks as they do."""
    images = model.encode_images(ImageBatch(torch.randn(20, 6, 8, dtype=torch.float64)))
    caption = model.encode_captions(batch_of([[1, 4, 5, 2]]), "en")
    stored = Encoded(images.values.detach().clone())
    by_index = (stored.values.numpy() * caption.values[0].detach().numpy()).sum(1).argsort()[::-1]
    assert by_index.tolist() == model.scores(stored, caption)[:, 0].argsort(descending=True).tolist()
