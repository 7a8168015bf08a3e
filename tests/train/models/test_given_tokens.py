"""Sentence encoders over given vectors of tokens, against torch's own networks over padded sentences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from train.config.models import MhaDConfig, ScanConfig, VseConfig
from train.data.batches import CaptionBatch, TokenVectors
from train.models.catalogue import build_model
from train.models.dimensions import Dimensions
from train.models.encoders import READERS, GivenTokens, SentenceEncoder, WordTable, words_of
from train.models.retrieval_model import ImageBatch

LENGTHS = [3, 6, 2, 4]
ROWS = [2, 1, 1, 3]


def batch(rows=ROWS) -> tuple[CaptionBatch, list[torch.Tensor]]:
    """Captions with vectors that lie in another order than the captions, and the vectors of each."""
    rng = np.random.default_rng(0)
    vectors = [rng.standard_normal((length, 5)).astype(np.float32) for length in LENGTHS]
    order = [3, 0, 2, 1]
    stored = np.concatenate([vectors[number] for number in order])
    starts = np.zeros(4, np.int64)
    starts[order] = np.cumsum([0, *(LENGTHS[number] for number in order)])[:-1]
    captions = CaptionBatch(
        np.full(sum(LENGTHS), 7), np.cumsum([0, *LENGTHS]), np.array(rows, np.int64), TokenVectors(stored, starts)
    )
    return captions, [torch.from_numpy(vectors[row]) for row in rows]


def alone(vectors):
    """The same captions in a dataset of their own."""
    lengths = [len(one) for one in vectors]
    offsets = np.cumsum([0, *lengths])
    stored = torch.cat(vectors).numpy()
    return CaptionBatch(np.zeros(sum(lengths)), offsets, np.arange(len(vectors)), TokenVectors(stored, offsets[:-1]))


@pytest.mark.parametrize("reader", ["gru", "bilstm", "bigru"])
def test_a_reader_reads_the_vectors(reader):
    torch.manual_seed(0)
    encoder = SentenceEncoder(GivenTokens(), READERS[reader](5, 4))
    captions, vectors = batch()
    found = encoder.states(captions)
    plain = (torch.nn.LSTM if reader == "bilstm" else torch.nn.GRU)(5, 4, batch_first=True, bidirectional=reader != "gru")
    network = getattr(encoder.reader, "lstm" if reader == "bilstm" else "gru")
    plain.load_state_dict(network.state_dict())
    padded = torch.nn.utils.rnn.pad_sequence(vectors, batch_first=True)
    lengths = torch.tensor([len(one) for one in vectors])
    states, _ = pad_packed_sequence(
        plain(pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False))[0], batch_first=True
    )
    if reader == "gru":
        torch.testing.assert_close(
            found.values, torch.stack([row[length - 1] for row, length in zip(states, lengths, strict=True)])
        )
    else:
        expected = states.unflatten(2, (2, 4)).mean(2)
        for row, length in enumerate(lengths):
            torch.testing.assert_close(found.values[row, :length], expected[row, :length])
        assert torch.equal(found.mask, torch.arange(6) < lengths[:, None])


MODELS = [
    VseConfig(embed_dim=6, word_dim=5, word_vectors="precomputed"),
    VseConfig(embed_dim=6, word_dim=5, word_vectors="precomputed", shared_encoder=False, text_encoder="bilstm"),
    MhaDConfig(embed_dim=6, word_dim=5, word_vectors="precomputed", num_heads=2, attention_dim=3, context_dim=3),
    ScanConfig(embed_dim=6, word_dim=5, word_vectors="precomputed"),
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_models_read_them_in_any_batch(config):
    shape = (8,) if config.kind == "vse" else (3, 8)
    model = build_model(config, Dimensions(("en", "de"), 9, shape, token_width=5), seed=0)
    assert not any("words" in name for name in model.state_dict())
    captions, vectors = batch()
    together = model.encode_captions(captions, "de")
    for row, one in enumerate(vectors):
        (values,) = model.encode_captions(alone([one]), "de").values
        torch.testing.assert_close(together.values[row][: len(values)] if values.dim() == 2 else together.values[row], values)
    empty = model.encode_captions(batch([])[0], "de")
    assert len(empty) == 0
    images = model.encode_images(ImageBatch(torch.randn(4, *shape)))
    scores = model.scores(images, together)
    scores.sum().backward()
    gradients = [parameter.grad for name, parameter in model.named_parameters() if name.startswith("sentences")]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients)


def test_captions_need_vectors():
    model = build_model(MODELS[0], Dimensions(("en",), 9, (8,), token_width=5), seed=0)
    with pytest.raises(ValueError, match="the captions have no vectors of their tokens"):
        model.encode_captions(CaptionBatch(np.array([1, 2]), np.array([0, 2]), np.array([0])), "en")


def test_words_are_a_table_where_none_are_given():
    assert isinstance(words_of(Dimensions(("en",), 9, (8,)), 5), WordTable)
    assert isinstance(words_of(Dimensions(("en",), 9, (8,), token_width=5), 5), GivenTokens)
