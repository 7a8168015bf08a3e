from functools import partial

import pytest
import torch

from tests.train.models.equations import batch_of
from train.config.models import VseConfig
from train.models.catalogue import build_model
from train.models.retrieval_model import Dimensions, ImageBatch
from train.models.vse import JointEmbedding

batch = partial(batch_of, [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]])


def build(**choices) -> JointEmbedding:
    torch.manual_seed(0)
    return JointEmbedding(VseConfig(embed_dim=6, word_dim=5, **choices), Dimensions(("en", "de"), 9, (7,)))


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


@pytest.mark.parametrize("count", [4, 0])
def test_scores_and_embeddings_follow_the_configured_similarity(count):
    images, captions = ImageBatch(torch.randn(count, 7)), batch(range(count))
    encoded, scores = {}, {}
    for similarity in ("cosine", "order"):
        model = build(similarity=similarity)
        sides = model.encode_images(images), model.encode_captions(captions, "de")
        encoded[similarity], scores[similarity] = [side.values for side in sides], model.scores(*sides)
        assert model.attention_weights(images, captions, "de") is None
    for cosine, order in zip(encoded["cosine"], encoded["order"], strict=True):
        torch.testing.assert_close(cosine.norm(dim=1), torch.ones(count))
        torch.testing.assert_close(order, cosine.abs())
    a, b = encoded["order"]
    torch.testing.assert_close(scores["order"], -(b[None] - a[:, None]).clamp(min=0).pow(2).sum(2))
    a, b = encoded["cosine"]
    torch.testing.assert_close(scores["cosine"], a @ b.T)
    with pytest.raises(ValueError, match="at least one language"):
        Dimensions((), 9, (7,))
