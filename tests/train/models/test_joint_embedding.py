import numpy as np
import pytest
import torch

from train.data.packing import pack
from train.models.joint_embedding import JointEmbedding, ModelConfig

CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 7, 2]]


def build(**changes) -> JointEmbedding:
    torch.manual_seed(0)
    config = {"languages": ("en", "de"), "vocabulary_size": 9, "feature_width": 7, "embedding": 6, "words": 5}
    return JointEmbedding(ModelConfig(**config | changes))


def packed(rows=range(4)):
    return pack(np.concatenate(CAPTIONS), np.cumsum([0, *map(len, CAPTIONS)]), np.array(rows, dtype=np.int64))


def test_defaults_come_from_the_papers():
    config = ModelConfig(("en",), 9, 2048)
    assert (config.embedding, config.words, config.shared, config.similarity) == (1024, 300, True, "cosine")


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_embeddings_have_length_one(similarity):
    model = build(similarity=similarity)
    images, captions = model.embed_images(torch.randn(4, 7)), model.embed_captions(packed(), "de")
    for embeddings in (images, captions):
        assert embeddings.shape == (4, 6)
        torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(4))
        assert (embeddings.min() >= 0) == (similarity == "order")


def test_order_uses_absolute_values_of_the_cosine_embeddings():
    features = torch.randn(4, 7)
    cosine, order = build(), build(similarity="order")
    torch.testing.assert_close(order.embed_images(features), cosine.embed_images(features).abs())
    torch.testing.assert_close(order.embed_captions(packed(), "en"), cosine.embed_captions(packed(), "en").abs())


def test_captions_come_in_the_order_of_the_request():
    model = build()
    assert torch.equal(model.embed_captions(packed([3, 1, 0, 2]), "en"), model.embed_captions(packed(), "en")[[3, 1, 0, 2]])


def test_similarity_comes_from_the_configuration():
    images, captions = (torch.nn.functional.normalize(torch.rand(n, 6)) for n in (2, 3))
    torch.testing.assert_close(build().similarity(images, captions), images @ captions.T)
    expected = -(captions[None] - images[:, None]).clamp(min=0).pow(2).sum(2)
    torch.testing.assert_close(build(similarity="order").similarity(images, captions), expected)


def test_one_shared_encoder_or_one_per_language():
    shared, own = build(), build(shared=False)
    assert torch.equal(shared.embed_captions(packed(), "en"), shared.embed_captions(packed(), "de"))
    assert not torch.equal(own.embed_captions(packed(), "en"), own.embed_captions(packed(), "de"))
    own.embed_captions(packed(), "de").sum().backward()
    trained = {name.split(".")[1] for name, parameter in own.named_parameters() if parameter.grad is not None}
    assert trained == {"1"}


def test_a_language_has_only_the_words_that_it_uses():
    model = build(shared=False, language_ids={"de": [0, 1, 2, 3, 7]})
    assert [len(encoder.words.weight) for encoder in model.sentences] == [9, 5]
    # 4 is not one of its words, so to it "4" is "<unk>".
    unknown = pack(np.array([1, 3, 2]), np.array([0, 3]), np.array([0]))
    torch.testing.assert_close(model.embed_captions(packed([0]), "de"), model.embed_captions(unknown, "de"))


@pytest.mark.parametrize("similarity", ["cosine", "order"])
def test_scores_are_float32_under_autocast(similarity):
    model = build(similarity=similarity)
    features = torch.randn(4, 7)
    exact = model.similarity(model.embed_images(features), model.embed_captions(packed(), "en"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        images, captions = model.embed_images(features), model.embed_captions(packed(), "en")
        rounded = model.similarity(images, captions)
        rounded.sum().backward()
    assert {tensor.dtype for tensor in (images, captions, rounded)} == {torch.float32}
    assert torch.equal(rounded, model.similarity(images, captions))
    assert 0 < (rounded - exact).abs().max() < 0.03
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_no_images_and_no_captions():
    model = build()
    images, captions = model.embed_images(torch.zeros(0, 7)), model.embed_captions(packed([]), "en")
    assert images.shape == captions.shape == (0, 6)
    assert model.similarity(images, captions).shape == (0, 0)


def test_features_of_zeros_cause_no_division_by_zero():
    model = build()
    embeddings = model.embed_images(torch.zeros(1, 7))
    embeddings.sum().backward()
    assert embeddings.tolist() == [[0] * 6]
    assert torch.isfinite(model.images.weight.grad).all()


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="similarity is 'euclid', expected one of"):
        build(similarity="euclid")
    with pytest.raises(ValueError, match="language is 'fr', expected one of"):
        build().embed_captions(packed(), "fr")
    with pytest.raises(ValueError, match="at least one language"):
        build(languages=())
