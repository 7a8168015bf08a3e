import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from extractors.tokens.request import TextRequest
from schemas.errors import InputError, UsageError
from tests.tiny_bert import make_tiny_bert

pytestmark = pytest.mark.slow  # Importing transformers alone takes seconds.

TEXTS = ["a man snowboards .", "dog", "  ein grüner Hund  ", "A man's dogs running"]
OLD, NEW = "sentence_transformers.models", "sentence_transformers.sentence_transformer.modules"
DENSE = {"in_features": 16, "out_features": 6, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Path:
    return make_tiny_bert(tmp_path_factory.mktemp("models") / "bert")


def write_model(folder: Path, bert: Path, *, pooling: dict, kinds: tuple[str, ...] = (), library: str = OLD, **files) -> Path:
    """Write a folder of sentence-transformers: transformer, pooling, and ``kinds``; ``files`` are further JSON files."""
    shutil.copytree(bert, folder)
    modules = [{"path": "", "type": f"{library}.Transformer"}, {"path": "1_Pooling", "type": f"{library}.Pooling"}]
    modules += [{"path": f"{n}_{kind}", "type": f"{library}.{kind}"} for n, kind in enumerate(kinds, start=2)]
    for module in modules:
        (folder / module["path"]).mkdir(exist_ok=True)
    contents = {"modules": modules, "1_Pooling/config": pooling, **files}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    if "Dense" in kinds:
        number = kinds.index("Dense") + 2
        (folder / f"{number}_Dense" / "config.json").write_text(json.dumps(DENSE))
        weights = {"linear.weight": torch.linspace(-1, 1, 96).view(6, 16), "linear.bias": torch.linspace(-1, 1, 6)}
        save_file(weights, folder / f"{number}_Dense" / "model.safetensors")
    return folder


def states(bert: Path, text: str) -> np.ndarray:
    """What transformers itself makes of a sentence: ``[S, D]``."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(bert), AutoModel.from_pretrained(bert).eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()


@pytest.mark.parametrize(
    ("mode", "pool"), [("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0]), ("max", lambda x: x.max(0))]
)
def test_encode_both_layouts_equal_transformers(bert, tmp_path, mode, pool):
    flag = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens"}
    flags = {name: name == flag[mode] for name in (*flag.values(), "pooling_mode_mean_sqrt_len_tokens")}
    old = write_model(tmp_path / "old", bert, pooling={"word_embedding_dimension": 16, **flags})
    new = write_model(tmp_path / "new", bert, pooling={"pooling_mode": mode, "include_prompt": True}, library=NEW)
    first, second = (TextRequest(f"sentence:{folder}").load().encode(TEXTS) for folder in (old, new))
    np.testing.assert_allclose(first, np.stack([pool(states(bert, text)) for text in TEXTS]), atol=2e-6)
    assert first.tobytes() == second.tobytes()


def test_encode_dense_and_normalize_follow_in_order(bert, tmp_path):
    folder = write_model(tmp_path / "model", bert, pooling={"pooling_mode": "mean"}, kinds=("Dense", "Normalize"))
    encoder = TextRequest(f"sentence:{folder}").load()
    means = np.stack([states(bert, text).mean(0) for text in TEXTS])
    dense = np.tanh(means @ np.linspace(-1, 1, 96).reshape(6, 16).T + np.linspace(-1, 1, 6))
    expected = dense / np.linalg.norm(dense, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=2e-6)
    assert (encoder.description.spec.name, encoder.description.spec.shape) == ("sentence:model", (6,))
    plain = write_model(tmp_path / "plain", bert, pooling={"pooling_mode": "mean"})
    assert TextRequest(f"sentence:{plain}").load().parameters.checkpoint != encoder.parameters.checkpoint


def test_read_prefix_case_and_cut(bert, tmp_path):
    prompts = {"prompts": {"query": "dog "}, "default_prompt_name": "query"}
    folder = write_model(
        tmp_path / "model",
        bert,
        pooling={"pooling_mode": "mean"},
        sentence_bert_config={"max_seq_length": 5},
        config_sentence_transformers=prompts,
    )
    encoder = TextRequest(f"sentence:{folder}").load()
    ids, lengths = encoder.read(["a", "a a a a a a"])
    assert (ids, lengths, encoder.max_length) == ([[2, 7, 5, 3], [2, 7, 5, 5, 3]], [4, 9], 5)  # [CLS] dog a [SEP]
    own = TextRequest(f"sentence:{folder}", prefix="man ").load()
    assert own.read(["a"])[0] == [[2, 12, 5, 3]]
    assert own.description.parameters["prefix"] == "man "
    assert own.parameters.checkpoint == encoder.parameters.checkpoint
    assert own.description.fingerprint != encoder.description.fingerprint


def test_bytes_do_not_depend_on_batches(bert, tmp_path):
    encoder = TextRequest(f"sentence:{write_model(tmp_path / 'm', bert, pooling={'pooling_mode': 'mean'})}").load()
    ids, _ = encoder.read([f"{'a ' * (n % 5)}dog" for n in range(70)])
    expected = encoder.encode_ids(ids)
    assert [encoder.encode_ids(ids, size).tobytes() == expected.tobytes() for size in (1, 7)] == [True, True]
    assert encoder.encode([]).shape == (0, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kinds": ("WordWeights",)},
            r"module 2 of .* is 'sentence_transformers.models.WordWeights', expected Dense or Normalize",
        ),
        ({"library": "my_code"}, r"module 0 of .* is 'my_code.Transformer', expected Transformer"),
        ({"pooling": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}}, r"pools 'mean,cls', expected one of"),
        ({"pooling": {"pooling_mode": "lasttoken"}}, r"pools 'lasttoken', expected one of mean, cls, max"),
    ],
)
def test_load_unsupported_module_raises_by_name(bert, tmp_path, change, message):
    folder = write_model(tmp_path / "model", bert, **{"pooling": {"pooling_mode": "mean"}, **change})
    with pytest.raises(InputError, match=message):
        TextRequest(f"sentence:{folder}").load()


def test_load_dense_layer_with_code_raises(bert, tmp_path):
    folder = write_model(tmp_path / "model", bert, pooling={"pooling_mode": "mean"}, kinds=("Dense",))
    (folder / "2_Dense" / "config.json").write_text(json.dumps(DENSE | {"activation_function": "my_code.Sine"}))
    with pytest.raises(InputError, match=r"my_code\.Sine"):
        TextRequest(f"sentence:{folder}").load()


def test_describe_is_cached_until_a_subfolder_changes(bert, tmp_path, monkeypatch):
    folder = write_model(tmp_path / "model", bert, pooling={"pooling_mode": "mean"})
    request = TextRequest(f"sentence:{folder}")
    first = request.describe()
    with monkeypatch.context() as patch:
        patch.setattr(TextRequest, "load", lambda *arguments: pytest.fail("loads again"))
        assert request.describe() == first
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert request.describe().fingerprint != first.fingerprint


# --- names of open_clip ----------------------------------------------------------------------------------------------


def test_open_clip_names_have_tag_width_and_activation(tmp_path, monkeypatch):
    pytest.importorskip("open_clip", reason="needs pip install 'imagepivot[clip]'")
    from extractors.request import ExtractorRequest

    spec = ExtractorRequest("open_clip:MobileCLIP2-S0").spec()
    assert (spec.name, spec.shape) == ("open_clip:MobileCLIP2-S0.dfndr2b", (512,))
    for load in (ExtractorRequest("open_clip:ViT-B-32.openai").spec, TextRequest("open_clip:ViT-B-32.openai").load):
        with pytest.raises(UsageError, match=r"models with QuickGELU have names that end in -quickgelu"):
            load()
    monkeypatch.setattr("extractors.weights.open_clip_models.download_pretrained", lambda config: 1 / 0 if not config else "")
    with pytest.raises(InputError, match=r"cannot find or download the weights of 'MobileCLIP2-S0.dfndr2b'.*--weights PATH"):
        ExtractorRequest("open_clip:MobileCLIP2-S0").describe()
