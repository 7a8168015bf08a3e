import numpy as np
import pytest
import torch

from train.data.packing import pack
from train.models.encoders import ImageEncoder, SentenceEncoder


def packed(captions: list[list[int]]):
    return pack(np.concatenate(captions), np.cumsum([0, *map(len, captions)]), np.arange(len(captions)))


def test_images_are_mapped_affinely_and_initialized_as_in_vsepp():
    torch.manual_seed(0)
    encoder = ImageEncoder(200, 100)
    bound = (6 / 300) ** 0.5
    assert encoder.weight.shape == (100, 200)
    assert 0.99 * bound < encoder.weight.abs().max() <= bound
    assert encoder.weight.mean().abs() < 0.01 * bound
    assert encoder.bias.abs().max() == 0
    features = torch.randn(3, 200)
    torch.testing.assert_close(encoder(features), features @ encoder.weight.T + encoder.bias)


def test_words_start_uniform_in_a_tenth():
    torch.manual_seed(0)
    words = SentenceEncoder(500, 30, 8).words.weight
    assert words.shape == (500, 30)
    assert 0.099 < words.abs().max() <= 0.1
    assert words.mean().abs() < 0.002


def test_a_sentence_is_the_state_after_its_last_token_in_any_batch():
    torch.manual_seed(0)
    encoder = SentenceEncoder(9, 5, 6)
    captions = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]]
    together = encoder(packed(captions))
    for row, caption in enumerate(captions):
        torch.testing.assert_close(together[row], encoder(packed([caption]))[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(together[0], together[3])


def test_an_unshared_encoder_has_only_the_words_of_its_language():
    torch.manual_seed(0)
    encoder = SentenceEncoder(9, 5, 6, ids=[0, 1, 2, 3, 5, 7])
    assert encoder.words.weight.shape == (6, 5)
    whole = SentenceEncoder(9, 5, 6)
    with torch.no_grad():
        whole.words.weight[[0, 1, 2, 3, 5, 7]] = encoder.words.weight
    whole.gru.load_state_dict(encoder.gru.state_dict())
    captions = [[1, 5, 2], [1, 7, 8, 2], [1, 4, 2]]
    known = [[1, 5, 2], [1, 7, 3, 2], [1, 3, 2]]
    torch.testing.assert_close(encoder(packed(captions)), whole(packed(known)))


def test_the_state_holds_only_trained_parameters():
    encoder = SentenceEncoder(9, 5, 6, ids=[0, 1, 2, 3, 5])
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert list(encoder.state_dict()) == ["words.weight", *(f"gru.{name}" for name in torch.nn.GRU(5, 6).state_dict())]


def test_only_words_that_occur_have_a_gradient():
    torch.manual_seed(0)
    encoder = SentenceEncoder(9, 5, 6)
    encoder(packed([[1, 4, 4, 2], [1, 6, 2]])).sum().backward()
    assert encoder.words.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [1, 2, 4, 6]


def test_ids_without_unknown_are_refused():
    with pytest.raises(ValueError, match="must have <unk>"):
        SentenceEncoder(9, 5, 6, ids=[0, 1, 2, 5])
