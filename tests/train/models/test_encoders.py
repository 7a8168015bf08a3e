from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from train.config.models import MhaDConfig, ScanConfig, VseConfig
from train.data.batches import CaptionBatch
from train.models import encoders as encoders_module
from train.models.catalogue import build_model
from train.models.dimensions import Dimensions
from train.models.encoders import (
    READERS,
    BidirectionalGRU,
    BidirectionalLSTM,
    FinalStateGRU,
    ImageEncoder,
    SentenceEncoder,
    SentenceEncoders,
    WordTable,
    orthogonalize,
    pooled,
)
from train.models.multi_head_attention import MultiHeadAttention
from train.models.retrieval_model import Encoded

CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]]


def batch_of(captions: list[list[int]]) -> CaptionBatch:
    token_ids = np.concatenate([np.zeros(0, int), *captions])
    return CaptionBatch(token_ids, np.cumsum([0, *map(len, captions)]), np.arange(len(captions)))


def sentence_encoder(vocabulary_size: int, words: int, width: int, *, ids: list[int] | None = None) -> SentenceEncoder:
    return SentenceEncoder(
        WordTable(vocabulary_size, words, ids=ids), FinalStateGRU(words, width), partial(pooled, pooling="mean")
    )


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
    words = WordTable(500, 30).weight
    assert words.shape == (500, 30)
    assert 0.099 < words.abs().max() <= 0.1
    assert words.mean().abs() < 0.002


def test_a_sentence_is_the_state_after_its_last_token_in_any_batch():
    torch.manual_seed(0)
    encoder = sentence_encoder(9, 5, 6)
    captions = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]]
    together = encoder(batch_of(captions))
    for row, caption in enumerate(captions):
        torch.testing.assert_close(together[row], encoder(batch_of([caption]))[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(together[0], together[3])


def test_an_unshared_encoder_has_only_the_words_of_its_language():
    torch.manual_seed(0)
    encoder = sentence_encoder(9, 5, 6, ids=[0, 1, 2, 3, 5, 7])
    assert encoder.words.weight.shape == (6, 5)
    whole = sentence_encoder(9, 5, 6)
    with torch.no_grad():
        whole.words.weight[[0, 1, 2, 3, 5, 7]] = encoder.words.weight
    whole.reader.load_state_dict(encoder.reader.state_dict())
    captions = [[1, 5, 2], [1, 7, 8, 2], [1, 4, 2]]
    known = [[1, 5, 2], [1, 7, 3, 2], [1, 3, 2]]
    torch.testing.assert_close(encoder(batch_of(captions)), whole(batch_of(known)))


def test_the_state_holds_only_trained_parameters():
    encoder = sentence_encoder(9, 5, 6, ids=[0, 1, 2, 3, 5])
    assert set(encoder.state_dict()) == {name for name, _ in encoder.named_parameters()}
    assert list(encoder.state_dict()) == ["words.weight", *(f"reader.gru.{name}" for name in torch.nn.GRU(5, 6).state_dict())]


@pytest.mark.parametrize("kind", [FinalStateGRU, BidirectionalLSTM])
def test_a_gpu_reads_and_learns_the_same_from_the_same_parameters(kind, monkeypatch):
    """Torch's own networks on the CPU stand for cuDNN's; the state of either reader loads into the other."""
    captions, results, states = batch_of([*CAPTIONS, [3], [1, 2, 2, 2, 2, 2, 2, 5]]), [], []
    for by_itself in (True, False):
        monkeypatch.setattr(encoders_module, "reads_by_itself", lambda device, by_itself=by_itself: by_itself)
        torch.manual_seed(len(states))
        words, reader = WordTable(9, 5).double(), kind(5, 6).double()
        for module, state in zip((words, reader), states[0] if states else (), strict=False):
            module.load_state_dict(state)
        states.append((words.state_dict(), reader.state_dict()))
        encoded = reader(words, captions)
        (encoded.values * torch.arange(encoded.values.numel()).view_as(encoded.values).cos()).sum().backward()
        results.append([encoded.values, *(parameter.grad for parameter in (*words.parameters(), *reader.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def test_a_reader_starts_with_the_values_of_torchs():
    torch.manual_seed(0)
    reader = FinalStateGRU(5, 60)
    torch.manual_seed(0)
    for ours, theirs in zip(reader.parameters(), torch.nn.GRU(5, 60).parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert 0.1 < ours.abs().max() <= 60**-0.5


@pytest.mark.parametrize("by_itself", [True, False])
def test_no_captions_have_no_states(by_itself, monkeypatch):
    monkeypatch.setattr(encoders_module, "reads_by_itself", lambda device: by_itself)
    empty = replace(batch_of(CAPTIONS), rows=np.zeros(0, int))
    assert FinalStateGRU(5, 6)(WordTable(9, 5), empty).values.shape == (0, 6)


def test_only_words_that_occur_have_a_gradient():
    torch.manual_seed(0)
    encoder = sentence_encoder(9, 5, 6)
    encoder(batch_of([[1, 4, 4, 2], [1, 6, 2]])).sum().backward()
    assert encoder.words.weight.grad.abs().sum(1).nonzero().flatten().tolist() == [1, 2, 4, 6]


def test_ids_without_unknown_are_refused():
    with pytest.raises(ValueError, match="must have <unk>"):
        sentence_encoder(9, 5, 6, ids=[0, 1, 2, 5])


# --- bidirectional readers ---------------------------------------------------------------------------------------------


def alone(reader: BidirectionalLSTM | BidirectionalGRU, words: WordTable, caption: list[int]) -> torch.Tensor:
    """Read one caption in both directions, a cell at a time."""
    states = []
    (network,) = reader.children()
    for suffix, tokens in (("", caption), ("_reverse", caption[::-1])):
        cell = (torch.nn.LSTMCell if isinstance(network, torch.nn.LSTM) else torch.nn.GRUCell)(5, 6)
        cell.load_state_dict({f"{name}": getattr(network, f"{name}_l0{suffix}") for name in cell.state_dict()})
        state, outputs = None, []
        for token in tokens:
            state = cell(words.weight[None, token], state)
            outputs.append(state[0][0] if isinstance(state, tuple) else state[0])
        states.append(torch.stack(outputs if not suffix else outputs[::-1]))
    return (states[0] + states[1]) / 2


@pytest.mark.parametrize("kind", [BidirectionalLSTM, BidirectionalGRU])
def test_a_bidirectional_reader_has_a_state_for_each_token_in_any_batch(kind):
    torch.manual_seed(0)
    words, reader = WordTable(9, 5), kind(5, 6)
    encoded = reader(words, batch_of(CAPTIONS))
    assert encoded.values.shape == (4, 5, 6)
    assert encoded.mask.sum(1).tolist() == [3, 5, 2, 3]
    for row, caption in enumerate(CAPTIONS):
        torch.testing.assert_close(encoded.values[row, : len(caption)], alone(reader, words, caption))
        assert encoded.mask[row, : len(caption)].all()
    assert reader(words, batch_of([])).values.shape[::2] == (0, 6)


def test_pooling_counts_only_the_tokens_that_are_there():
    torch.manual_seed(0)
    words, reader = WordTable(9, 5), BidirectionalLSTM(5, 6)
    for pooling, of in (("mean", lambda states: states.mean(0)), ("max", lambda states: states.max(0).values)):
        encoder = SentenceEncoder(words, reader, partial(pooled, pooling=pooling))
        together = encoder(batch_of(CAPTIONS))
        for row, caption in enumerate(CAPTIONS):
            torch.testing.assert_close(together[row], of(alone(reader, words, caption)))
        assert encoder(batch_of([])).shape == (0, 6)
        whole = Encoded(torch.arange(12.0).reshape(2, 2, 3))
        torch.testing.assert_close(pooled(whole, pooling), torch.stack([of(item) for item in whole.values]))


# --- initial weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "gates", "recurrent"), [("gru", 3, 1), ("bilstm", 4, 2), ("bigru", 3, 2)])
def test_recurrent_weights_of_each_gate_are_orthogonal(name, gates, recurrent):
    torch.manual_seed(0)
    reader = READERS[name](20, 30)
    orthogonalize(reader)
    of_kind = {kind: [] for kind in ("weight_hh", "weight_ih", "bias")}
    for parameter_name, parameter in reader.named_parameters():
        assert parameter.requires_grad
        (kind,) = (kind for kind in of_kind if kind in parameter_name)
        of_kind[kind].append(parameter.detach())
    matrices = [gate for weight in of_kind["weight_hh"] for gate in weight.view(gates, 30, 30)]
    assert len(matrices) == gates * recurrent
    for gate in matrices:
        torch.testing.assert_close(gate @ gate.T, torch.eye(30), atol=1e-5, rtol=0)
    assert len({tuple(gate.flatten().tolist()) for gate in matrices}) == len(matrices)  # Each gate has one of its own.
    for weight in of_kind["weight_ih"]:
        assert 0.099 < weight.abs().max() <= 0.1
        assert weight.mean().abs() < 0.01
    assert all(not bias.any() for bias in of_kind["bias"])


# --- the encoders of a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["vse", "scan", "mha-d"])
def test_encoders_of_every_kind_keep_their_names_and_initial_weights(kind, shared):
    """A model is its map of images, its pooling of them, and then words, reader and pooling of each encoder in turn."""
    ids = (0, 1, 2, 3, 5, 7)
    several = Dimensions(("en", "de"), 9, (3, 7), {"en": ids, "de": ids})
    sizes = {"num_heads": 2, "attention_dim": 5, "context_dim": 8}
    if kind == "vse":
        model = build_model(
            VseConfig(embed_dim=6, word_dim=4, shared_encoder=shared, text_encoder="bigru"),
            replace(several, feature_shape=(7,)),
            3,
        )
    elif kind == "scan":
        model = build_model(ScanConfig(embed_dim=6, word_dim=4, shared_encoder=shared), several, 3)
    elif shared:
        pytest.skip("this kind has an encoder for each language")
    else:
        model = build_model(MhaDConfig(embed_dim=6, word_dim=4, **sizes), several, 3)
    expected = {}

    def drawn(prefix, module):
        expected.update({f"{prefix}.{name}": values for name, values in module.state_dict().items()})

    torch.manual_seed(3)
    drawn("regions" if kind == "mha-d" else "images", ImageEncoder(7, 6))
    if kind == "mha-d":
        drawn("attention", MultiHeadAttention(6, **sizes))
    for number in range(1 if shared else 2):
        drawn(f"sentences.{number}.words", WordTable(9, 4, ids=ids))
        drawn(f"sentences.{number}.reader", BidirectionalLSTM(4, 6) if kind == "mha-d" else BidirectionalGRU(4, 6))
        if kind == "mha-d":
            drawn(f"sentences.{number}.pooling", MultiHeadAttention(6, **sizes))
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert model.modules_by_language() == (
        {"sentences.0": ("en", "de")} if shared else {"sentences.0": ("en",), "sentences.1": ("de",)}
    )


def test_the_encoder_of_a_language():
    dimensions = Dimensions(("en", "de"), 9, (7,), {"de": (0, 1, 2, 3, 5)})
    own, shared = (SentenceEncoders(dimensions, 4, lambda: FinalStateGRU(4, 6), shared=shared) for shared in (False, True))
    assert own.of("de") is own[1]
    assert [len(encoder.words.weight) for encoder in own] == [9, 5]
    assert shared.of("de") is shared.of("en") is shared[0]
    for encoders in (own, shared):
        with pytest.raises(ValueError, match=r"language is 'fr', expected one of \('en', 'de'\)"):
            encoders.of("fr")
