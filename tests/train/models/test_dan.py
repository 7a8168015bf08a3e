import numpy as np
import pytest
import torch

from tests.train.models.equations import batch_of, both_ways, drawn
from tests.train.models.test_memory_attention import parameters_of, steps_by_hand
from train.config.models import DanConfig
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
