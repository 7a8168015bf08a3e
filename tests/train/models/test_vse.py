from functools import partial

import pytest
import torch

from tests.train.models.equations import batch_of
from train.config.models import VseConfig
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, Encoded, ImageBatch
from train.models.vse import JointEmbedding

batch = partial(batch_of, [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]])


def build(**choices) -> JointEmbedding:
    torch.manual_seed(0)
    return JointEmbedding(VseConfig(embed_dim=6, word_dim=5, **choices), Dimensions(("en", "de"), 9, (7,)))


def images_of(model: JointEmbedding, features: torch.Tensor) -> torch.Tensor:
    return model.encode_images(ImageBatch(features)).values


def captions_of(model: JointEmbedding, rows=None) -> torch.Tensor:
    return model.encode_captions(batch(rows), "de").values


def scores(model: JointEmbedding, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return model.scores(Encoded(a), Encoded(b))


@pytest.mark.parametrize("shared", [True, False])
def test_orthogonal_initialization_changes_text_encoders_only(shared):
    plain, orthogonal, again = (
        build_model(
            VseConfig(embed_dim=6, word_dim=5, shared_encoder=shared, initialization=name), Dimensions(("en", "de"), 9, (7,)), 3
        )
        for name in ("torch", "orthogonal", "orthogonal")
    )
    for (name, values), other, same in zip(
        plain.state_dict().items(), orthogonal.state_dict().values(), again.state_dict().values(), strict=True
    ):
        assert torch.equal(other, same)
        assert torch.equal(values, other) == ("reader" not in name)


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_embeddings_have_length_one(similarity):
    model = build(similarity=similarity)
    images, captions = images_of(model, torch.randn(4, 7)), captions_of(model)
    for embeddings in (images, captions):
        assert embeddings.shape == (4, 6)
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
        assert (embeddings.min() >= 0) == (similarity == "order")


def test_order_embeddings_are_absolute_values():
    features = torch.randn(4, 7)
    cosine, order = build(), build(similarity="order")
    torch.testing.assert_close(images_of(order, features), images_of(cosine, features).abs())
    torch.testing.assert_close(captions_of(order), captions_of(cosine).abs())


def test_scores_follow_the_configured_similarity():
    images, captions = (torch.nn.functional.normalize(torch.rand(n, 6)) for n in (2, 3))
    torch.testing.assert_close(scores(build(), images, captions), images @ captions.T)
    expected = -(captions[None] - images[:, None]).clamp(min=0).pow(2).sum(2)
    torch.testing.assert_close(scores(build(similarity="order"), images, captions), expected)


def test_model_without_images_and_captions():
    model = build()
    images, captions = images_of(model, torch.zeros(0, 7)), captions_of(model, [])
    assert images.shape == captions.shape == (0, 6)
    assert scores(model, images, captions).shape == (0, 0)


def test_model_without_languages_is_refused():
    with pytest.raises(ValueError, match="at least one language"):
        Dimensions((), 9, (7,))


def test_attention_weights_are_none():
    assert build().attention_weights(ImageBatch(torch.ones(1, 7)), batch([0]), "en") is None
