import json
import shutil
import socket

import numpy as np
import pytest
import torch

from extractors.tokens.request import TextRequest
from extractors.tokens.text_model import FORWARD_CAPTIONS
from schemas.errors import InputError
from tests.threads import threads_of_torch
from tests.tiny_bert import make_tiny_bert

pytestmark = pytest.mark.slow  # Importing transformers alone takes seconds.

CAPTIONS = [
    ["A", "man", "snowboards", "."],
    ["ein", "grüner", "Hund"],
    ["dog"],
    [],
    ["man's", "zebra", "running", "dogs"],
    ["a"] * 30,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("something connects")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def vectors(extractor, captions, batch_size=64):
    return extractor.extract(extractor.read(captions)[0], batch_size)


def by_hand(folder, caption, first=False):
    """What transformers makes of words by itself, one caption at a time: `word_ids` says whose a sub-word is."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    encoding = tokenizer(caption, is_split_into_words=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**encoding).last_hidden_state[0].numpy()
    owners = encoding.word_ids(0)
    rows = [[row for row, owner in enumerate(owners) if owner == number] for number in range(len(caption))]
    tokens = [states[of_token[0]] if first else states[of_token].mean(axis=0) for of_token in rows]
    return np.stack([states[0], *tokens, states[-1]])


@pytest.mark.parametrize("first", [False, True])
def test_extract_equals_transformers(folder, no_network, first):
    extractor = TextRequest(str(folder), "first" if first else "mean").load()
    found = vectors(extractor, CAPTIONS)
    assert [len(one) for one in found] == [len(caption) + 2 for caption in CAPTIONS]
    for caption, one in zip(CAPTIONS[:5], found[:5], strict=True):
        if caption:
            np.testing.assert_allclose(one, by_hand(folder, caption, first), atol=2e-6)
    # Of thirty tokens a part takes 22, as many as there are positions but for both ends.
    np.testing.assert_allclose(found[5][:23], by_hand(folder, ["a"] * 22, first)[:23], atol=2e-6)
    np.testing.assert_allclose(found[5][23:], by_hand(folder, ["a"] * 8, first)[1:], atol=2e-6)


def test_read_counts_sub_words(folder):
    extractor = TextRequest(str(folder)).load()
    parts, counts = extractor.read(CAPTIONS)
    assert parts[0][0].ids == (2, 5, 12, 13, 14, 10, 17, 3)  # [CLS] a man snow ##board ##s . [SEP]
    # The others: ein, grun ##er, hund; dog; man ' s, [UNK], run ##ning, dog ##s; and a thirty times, in two parts.
    assert counts == {"sub_words": 6 + 4 + 1 + 8 + 30, "unknown_sub_words": 1, "captions_in_parts": 1}
    parts, counts = extractor.read([["dog", "\u200b", "dog"]])  # A token without sub-words is unknown.
    assert (parts[0][0].ids, counts["unknown_sub_words"]) == ((2, 7, 1, 7, 3), 1)


def test_extract_does_not_depend_on_batch_and_threads(folder):
    extractor = TextRequest(str(folder)).load()
    rng = np.random.default_rng(3)
    words = ["a", "dog", "runs", "man's", "snowboards", "grüner", "."]
    captions = [[words[n] for n in rng.integers(0, 7, rng.integers(1, 9))] for _ in range(5 * FORWARD_CAPTIONS + 3)]
    expected = [vectors(extractor, [caption])[0].tobytes() for caption in captions]
    order = rng.permutation(len(captions))
    for threads, batch_size in ((1, 64), (2, 3), (2, 1)):
        with threads_of_torch(threads):
            found = vectors(extractor, [captions[n] for n in order], batch_size)
        assert [one.tobytes() for one in found] == [expected[n] for n in order]


def test_fingerprint_depends_on_model_and_not_on_folder(folder, tmp_path):
    def fingerprint(where, **options):
        return TextRequest(str(where), **options).load().description.fingerprint

    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "transformers_version": "4.0.0", "_name_or_path": "x"}))
    same = [fingerprint(folder), fingerprint(copy)]
    assert len(set(same)) == 1
    others = [
        fingerprint(make_tiny_bert(tmp_path / "seed", seed=1)),
        fingerprint(folder, pooling="first"),
        fingerprint(folder, dtype="float16"),
        fingerprint(folder, precision="bf16"),
    ]
    cased = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps({**cased, "do_lower_case": False}))
    others.append(fingerprint(copy))
    assert len({same[0], *others}) == 6


def test_load_ignores_task_head_silently(folder, tmp_path, capfd):
    with_head = make_tiny_bert(tmp_path / "head", head=True)
    capfd.readouterr()
    extractor = TextRequest(str(with_head)).load()
    assert capfd.readouterr() == ("", "")
    np.testing.assert_allclose(vectors(extractor, CAPTIONS[:1])[0], by_hand(with_head, CAPTIONS[0]), atol=2e-6)


def test_load_disables_truncation_and_padding(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "cuts")
    stored = json.loads((copy / "tokenizer.json").read_text())
    stored["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    stored["padding"] = {"strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None}
    stored["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    (copy / "tokenizer.json").write_text(json.dumps(stored))
    plain, cuts = TextRequest(str(folder)).load(), TextRequest(str(copy)).load()
    assert cuts.description.fingerprint == plain.description.fingerprint
    np.testing.assert_array_equal(vectors(cuts, CAPTIONS)[4], vectors(plain, CAPTIONS)[4])


def test_extract_float16_is_rounded_float32(folder):
    plain, half = (TextRequest(str(folder), dtype=dtype).load() for dtype in ("float32", "float16"))
    assert half.description.spec.dtype == "float16"
    np.testing.assert_array_equal(vectors(half, CAPTIONS)[0], vectors(plain, CAPTIONS)[0].astype(np.float16))


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_token_request_unknown_name_raises(no_network):
    with pytest.raises(
        InputError, match=r"there is no model 'nobody/no-bert': .* \(command hf of huggingface_hub\), and give its folder"
    ):
        TextRequest("nobody/no-bert").load()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, r"has no config\.json, expected a model as saved by transformers"),
        ("config.json", "{ no", r"transformers cannot read the model in .*broken.* download it again"),
        ("model.safetensors", "{ no", r"transformers cannot read the model in .*broken.* download it again"),
        ("config.json", {"num_hidden_layers": 3}, r"do not match its config\.json: 16 tensors are missing"),
        (
            "tokenizer_config.json",
            {"cls_token": None, "tokenizer_class": "PreTrainedTokenizerFast"},
            r"\(bert\) is not a BERT-like model: expected a fast tokenizer .* with \[CLS\], \[SEP\] and \[UNK\]",
        ),
    ],
)
def test_token_request_damaged_model_raises(folder, tmp_path, name, content, message):
    file = shutil.copytree(folder, tmp_path / "broken") / name
    if isinstance(content, dict):
        content = json.dumps(json.loads(file.read_text()) | content)
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=message):
        TextRequest(str(file.parent)).load()
