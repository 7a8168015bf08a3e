from dataclasses import replace

import numpy as np
import torch

from tests.train.models.equations import batch_of, sigmoid
from train.config.models import MlmmeConfig
from train.models.catalogue import build_model
from train.models.mlmme import Mlmme
from train.models.retrieval_model import Dimensions, ImageBatch

LANGUAGES = ("en", "de", "fr")
DIMENSIONS = Dimensions(LANGUAGES, 9, (7,), {"de": (0, 1, 2, 3, 5, 7)})
CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]]


def build(scoring: str, **changes) -> Mlmme:
    config = MlmmeConfig(embed_dim=4, word_dim=3, hidden_size=5, scoring=scoring)
    return build_model(config, replace(DIMENSIONS, **changes), seed=0).double()


def sentence(model: Mlmme, language: str, caption: list[int]) -> np.ndarray:
    """Return the unnormalized embedding of a sentence: a numpy GRU and the projection."""
    encoder = model.sentences.of(language)
    table, values = encoder.words.weight.detach().numpy(), {k: v.detach().numpy() for k, v in encoder.reader.named_parameters()}
    w_ih, w_hh, b_ih, b_hh = (
        next(value for name, value in values.items() if part in name)
        for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    rows = caption if language != "de" else [{0: 0, 1: 1, 2: 2, 3: 3, 5: 4, 7: 5}.get(token, 3) for token in caption]
    state = np.zeros(5)
    for word in table[rows]:
        (i_r, i_z, i_n), (h_r, h_z, h_n) = np.split(w_ih @ word + b_ih, 3), np.split(w_hh @ state + b_hh, 3)
        reset, update = sigmoid(i_r + h_r), sigmoid(i_z + h_z)
        state = (1 - update) * np.tanh(i_n + reset * h_n) + update * state
    return model.projection.weight.detach().numpy() @ state + model.projection.bias.detach().numpy()


def image(model: Mlmme, feature: np.ndarray) -> np.ndarray:
    return model.images.weight.detach().numpy() @ feature + model.images.bias.detach().numpy()


def views_of(model: Mlmme, features: torch.Tensor) -> dict[str, tuple]:
    views = {"images": (model.encode_images(ImageBatch(features)), [image(model, each) for each in features.numpy()])}
    for language in LANGUAGES:
        views[language] = (
            model.encode_captions(batch_of(CAPTIONS), language),
            [sentence(model, language, each) for each in CAPTIONS],
        )
    return views


def test_scores_are_cosines():
    model = build("dot")
    assert (model.similarity, model.width, model.mappings) == ("cosine", 4, None)
    views = views_of(model, torch.randn(3, 7, dtype=torch.float64))
    for a, raw_a in views.values():
        for b, raw_b in views.values():
            wanted = [[x @ y / np.linalg.norm(x) / np.linalg.norm(y) for y in raw_b] for x in raw_a]
            np.testing.assert_allclose(model.scores(a, b).detach(), wanted, rtol=0, atol=1e-12)


def test_general_scores_are_bilinear():
    model = build("general")
    assert (model.similarity, model.width, model.vectors) == ("inner-product", 6 * 4, True)
    views = views_of(model, torch.randn(3, 7, dtype=torch.float64))
    names = list(views)
    assert list(model.mappings) == [f"{a}-{b}" for n, a in enumerate(names) for b in names[n + 1 :]]
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            matrix = model.mappings[f"{one}-{other}"].weight.detach().numpy()
            wanted = np.array([[y @ matrix @ x for y in views[other][1]] for x in views[one][1]])
            assert np.abs(wanted).max() > 1e-3
            np.testing.assert_allclose(model.scores(views[one][0], views[other][0]).detach(), wanted, rtol=0, atol=1e-12)
            np.testing.assert_allclose(model.scores(views[other][0], views[one][0]).detach(), wanted.T, rtol=0, atol=1e-12)
