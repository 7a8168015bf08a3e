"""Word embeddings and text encoders, against torch's own networks over padded sentences."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from schemas.errors import UsageError
from tests.train.models.equations import batch_of
from tests.train.trainings import assert_equal
from train.config.models import MhaDConfig, ScanConfig, VseConfig
from train.data.batches import CaptionBatch, TokenVectors
from train.data.word_vectors import WordVectors
from train.models import encoders as encoders_module
from train.models.catalogue import build_model
from train.models.encoders import (
    TEXT_ENCODERS,
    BidirectionalGRU,
    BidirectionalLSTM,
    ImageEncoder,
    PrecomputedTokens,
    SentenceEncoder,
    WordEmbedding,
    embedding_parameters,
    load_pretrained_embeddings,
    orthogonalize,
    pool,
)
from train.models.mha_d import MultiHeadAttention
from train.models.retrieval_model import Dimensions, Encoded

CAPTIONS = [[1, 4, 2], [1, 4, 5, 6, 2], [1, 2], [1, 4, 2]]


def test_encoders_have_the_initial_weights_of_vse():
    torch.manual_seed(0)
    encoder, words = ImageEncoder(200, 100), WordEmbedding(500, 30).weight
    for weights, shape, bound in ((encoder.weight, (100, 200), (6 / 300) ** 0.5), (words, (500, 30), 0.1)):
        assert weights.shape == shape
        assert 0.99 * bound < weights.abs().max() <= bound
        assert weights.mean().abs() < 0.02 * bound
    assert encoder.bias.abs().max() == 0


FEW = [*CAPTIONS, [3], [1, 2, 2, 2, 2, 2, 2, 5]]
MANY = [[1, *np.random.default_rng(n).choice(9, p=[0, 0, 0, 0.5, 0.2, 0.1, 0.1, 0.05, 0.05], size=n % 9), 2] for n in range(40)]


@pytest.mark.parametrize(
    ("captions", "dtype", "sizes", "tolerance"),
    [
        (FEW, torch.float64, (5, 6), 1e-13),
        (FEW[:1], torch.float32, (5, 6), 1e-6),
        (MANY, torch.float64, (7, 12), 1e-13),
        (MANY, torch.float32, (7, 12), 1e-6),
        pytest.param(MANY, torch.float32, (300, 1024), 1e-6, marks=pytest.mark.slow),  # The papers' sizes.
    ],
    ids=["few", "one", "many", "many, rounded", "wide"],
)
@pytest.mark.parametrize("kind", TEXT_ENCODERS.values())
def test_text_encoders_equal_torch_networks(kind, captions, dtype, sizes, tolerance, monkeypatch):
    results = []
    for packed in (True, False):
        monkeypatch.setattr(encoders_module, "uses_packed_rnn", lambda device, packed=packed: packed)
        torch.manual_seed(0)
        words, reader = WordEmbedding(9, sizes[0]).to(dtype), kind(*sizes).to(dtype)
        encoded = reader(words, batch_of(captions))
        encoded.values.backward(torch.randn_like(encoded.values))
        results.append([encoded.values, *(parameter.grad for parameter in (*words.parameters(), *reader.parameters()))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.abs().max() > 0
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", TEXT_ENCODERS.values())
def test_text_encoders_without_captions(kind, packed, monkeypatch):
    monkeypatch.setattr(encoders_module, "uses_packed_rnn", lambda device: packed)
    values = kind(5, 6)(WordEmbedding(9, 5), batch_of([])).values
    assert (len(values), values.shape[-1]) == (0, 6)


@pytest.mark.parametrize(
    ("pooling", "of"), [("mean", lambda states: states.mean(0)), ("max", lambda states: states.max(0).values)]
)
def test_pool_ignores_padding(pooling, of):
    values, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, False], [True, True, True]])
    found = pool(Encoded(values.masked_fill(~mask[..., None], 1e6), mask), pooling)
    torch.testing.assert_close(found, torch.stack([of(values[0, :2]), of(values[1])]))
    torch.testing.assert_close(pool(Encoded(values), pooling), torch.stack([of(item) for item in values]))


@pytest.mark.parametrize(("name", "gates", "recurrent"), [("gru", 3, 1), ("bilstm", 4, 2), ("bigru", 3, 2)])
def test_orthogonalize_each_gate(name, gates, recurrent):
    torch.manual_seed(0)
    reader = TEXT_ENCODERS[name](20, 30)
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


MHA_D = MhaDConfig(embed_dim=6, word_dim=4, num_heads=2, attention_dim=5, context_dim=8)


@pytest.mark.parametrize(
    "config",
    [
        *(VseConfig(embed_dim=6, word_dim=4, shared_encoder=shared, text_encoder="bigru") for shared in (True, False)),
        *(ScanConfig(embed_dim=6, word_dim=4, shared_encoder=shared) for shared in (True, False)),
        MHA_D,
    ],
    ids=["vse, shared", "vse", "scan, shared", "scan", "mha-d"],
)
def test_model_parameters_keep_names_and_initial_weights(config):
    ids, shared, attends = (0, 1, 2, 3, 5, 7), getattr(config, "shared_encoder", False), config is MHA_D
    shape = (7,) if config.kind == "vse" else (3, 7)
    model = build_model(config, Dimensions(("en", "de"), 9, shape, {"en": ids, "de": ids}), 3)
    expected = {}

    def drawn(prefix, module):
        expected.update({f"{prefix}.{name}": values for name, values in module.state_dict().items()})

    torch.manual_seed(3)
    drawn("regions" if attends else "images", ImageEncoder(7, 6))
    if attends:
        drawn("attention", MultiHeadAttention(config))
    for number in range(1 if shared else 2):
        drawn(f"sentences.{number}.words", WordEmbedding(9, 4, ids=ids))
        drawn(f"sentences.{number}.reader", BidirectionalLSTM(4, 6) if attends else BidirectionalGRU(4, 6))
        if attends:
            drawn(f"sentences.{number}.pooling", MultiHeadAttention(config))
    assert_equal(dict(model.state_dict()), expected)


WORDS = WordVectors(
    "w",
    "f",
    2,
    ids={"en": np.array([4, 6]), "de": np.array([4, 5])},
    vectors={"en": np.float32([[1, 0], [7, 7]]), "de": np.float32([[0, 1], [5, 5]])},
)
COUNTS = [{}, {}, {}, {}, {"en": 3, "de": 1}, {"de": 2}, {"en": 1}, {"en": 1, "de": 1}]


def model(*, shared: bool, words: int = 2, ids=None):
    dimensions = Dimensions(("en", "de"), 8, (3,), ids or {})
    return build_model(VseConfig(embed_dim=4, word_dim=words, shared_encoder=shared), dimensions, 0)


def test_load_pretrained_embeddings_shared_encoder():
    built, drawn = model(shared=True), model(shared=True)
    remark = load_pretrained_embeddings(built, WORDS, COUNTS)
    table, before = built.sentences[0].words.weight, drawn.sentences[0].words.weight
    assert table[4:7].tolist() == [[0.75, 0.25], [5, 5], [7, 7]]
    assert torch.equal(table[[0, 1, 2, 3, 7]], before[[0, 1, 2, 3, 7]])  # As drawn: specials, and a word without a vector.
    assert table.requires_grad
    assert remark == "word vectors loaded from 'w': 3 of 8 in en, de; the others are random"
    others = {name: value for name, value in drawn.state_dict().items() if "words" not in name}
    assert all(torch.equal(built.state_dict()[name], value) for name, value in others.items())


def test_load_pretrained_embeddings_by_language():
    ids = {"en": (0, 1, 2, 3, 4, 7), "de": (0, 1, 2, 3, 4, 5, 7)}
    built = model(shared=False, ids=ids)
    remark = load_pretrained_embeddings(built, WORDS, COUNTS)
    english, german = (encoder.words for encoder in built.sentences)
    assert english(torch.tensor([4])).tolist() == [[1, 0]]
    assert german(torch.tensor([4, 5])).tolist() == [[0, 1], [5, 5]]
    assert torch.equal(english(torch.tensor([6])), english(torch.tensor([3])))  # Too rare here: read as <unk>.
    assert "1 of 6 in en; 2 of 7 in de" in remark


def test_load_pretrained_embeddings_without_a_fitting_embedding_is_refused():
    class Wordless(nn.Module):
        languages = ("en",)

    with pytest.raises(UsageError, match=r"sentences\.0\.words\.weight has word vectors of width 3, but 'w' has width 2"):
        load_pretrained_embeddings(model(shared=True, words=3), WORDS, COUNTS)
    with pytest.raises(UsageError, match="the model has no word embedding to load word vectors into"):
        load_pretrained_embeddings(Wordless(), WORDS, COUNTS)  # type: ignore[arg-type]
    other = nn.ModuleDict({"a": nn.Embedding(8, 2), "b": nn.EmbeddingBag(8, 3), "c": nn.Embedding(5, 2)})
    assert {name: len(ids) for name, ids in embedding_parameters(other, 8).items()} == {"a.weight": 8, "b.weight": 8}


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


def batch_with(vectors):
    """The same captions in a dataset of their own."""
    lengths = [len(one) for one in vectors]
    offsets = np.cumsum([0, *lengths])
    stored = torch.cat(vectors).numpy()
    return CaptionBatch(np.zeros(sum(lengths)), offsets, np.arange(len(vectors)), TokenVectors(stored, offsets[:-1]))


@pytest.mark.parametrize("reader", ["gru", "bilstm", "bigru"])
def test_text_encoders_with_precomputed_tokens_equal_torch(reader):
    torch.manual_seed(0)
    encoder = SentenceEncoder(PrecomputedTokens(), TEXT_ENCODERS[reader](5, 4))
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
