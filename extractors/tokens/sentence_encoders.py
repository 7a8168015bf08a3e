"""Vectors of sentences: text encoders of open_clip, and sentence-transformers.

Shapes: ``B`` sentences, ``S`` sub-words, ``D`` width of the transformer, ``E`` width of a vector.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from extractors.base import Description, joint_parameters
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts
from extractors.tokens.text_model import (
    TextModel,
    load_model,
    quiet_transformers,
    text_config_sha256,
    tokenizer_sha256,
    used_weights,
)
from extractors.weights.checkpoints import check_state, read_state_dict
from extractors.weights.resolve import state_sha256
from schemas.errors import InputError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_json
from schemas.parameters import FeaturesParameters
from schemas.storage.locations import local_path

_SAMPLE = "Two dogs run through the deep snow, überall 1984."
_ACTIVATIONS = {activation.__name__: activation for activation in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU)}
_POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda states: states.mean(1),
    "cls": lambda states: states[:, 0],
    "max": lambda states: states.amax(1),
}


class SentenceModel(TextModel):
    """Loaded text model with a vector per sentence.

    Attributes:
        max_length: maximum number of sub-words; longer sentences are cut.
        prefix: text before each sentence.
    """

    max_length: int
    prefix: str

    @property
    def name(self) -> str:
        """Name of the model in datasets."""
        return self.description.spec.name

    @property
    def parameters(self) -> FeaturesParameters:
        """Parameters of vectors of captions that the model writes."""
        return joint_parameters(self.description)

    @abstractmethod
    def read(self, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Convert sentences to sub-words, and return their numbers before the cut."""

    def encode_ids(self, ids: Sequence[Sequence[int]], batch_size: int = 64) -> np.ndarray:
        """Encode sub-words from `read`: float32 ``[N, E]``."""
        vectors = self.compute_by_length(ids, batch_size)
        return np.stack([np.zeros(self.description.spec.shape, np.float32), *vectors])[1:]

    def encode(self, texts: Sequence[str], language: str = "") -> np.ndarray:
        """Encode sentences, in any language that the model knows: float32 ``[N, E]``."""
        return self.encode_ids(self.read(texts)[0])

    def sample(self) -> np.ndarray:
        """Compute the vector of a fixed sentence, which tells versions of the code apart."""
        return self.encode([_SAMPLE])[0]

    def _describe(self, spec: FeatureSpec, tokenizer: str, **more: Any) -> None:
        prefix = {"prefix": self.prefix} if self.prefix else {}
        parameters = {"feature": spec.to_json(), "positions": self.max_length, "precision": self._precision, **prefix, **more}
        self.description = Description(
            spec, parameters | {"tokenizer": {"sha256": tokenizer}}, kind="embeddings", batch_size=64
        )


class OpenClipText(SentenceModel):
    """Text encoder of a joint model of open_clip, with the model's own tokenizer.

    Sentences are padded to the model's context, as open_clip does.
    """

    def __init__(self, model: str, weights_request: str, prefix: str, dtype: str, precision: str, device: str) -> None:
        from extractors.weights import open_clip_models as models

        super().__init__(precision, device)
        model = models.full_name(model)
        self._tokenizer, weights = models.load_tokenizer(model), models.find_weights(model, weights_request)
        self.max_length, self.prefix = self._tokenizer.context_length, prefix
        self._has_own_tokenizer = hasattr(self._tokenizer, "encoder")
        digest = (
            sha256_of_json(list(self._tokenizer.encoder))
            if self._has_own_tokenizer
            else tokenizer_sha256(self._tokenizer.tokenizer)
        )
        self._model = models.load_network(model, weights)
        name, width = models.short_name(model), self._model.config["embed_dim"]
        spec = FeatureSpec(
            name, (width,), dtype, f"open_clip, github.com/mlfoundations/open_clip: {name.removeprefix(models.PREFIX)}"
        )
        self._describe(spec, digest, config=models.config_sha256(model), **weights.parameters())
        del self._model.visual
        self._model.to(self.device)
        cache_casts(self._model, AUTOCAST_DTYPES.get(precision))

    def read(self, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Run open_clip's tokenizer, see `SentenceModel.read`."""
        texts, tokenizer = [self.prefix + text for text in texts], self._tokenizer
        if not texts:
            return [], []
        if self._has_own_tokenizer:
            lengths = [len(tokenizer.encode(text)) + 2 for text in texts]  # First and last sub-word.
        else:
            lengths = list(map(len, tokenizer.tokenizer(list(map(tokenizer.clean_fn, texts)), verbose=False).input_ids))
        return tokenizer(texts).tolist(), lengths

    def compute(self, ids: Tensor) -> Tensor:
        """Encode sub-words ``[B, S]``: ``[B, E]``."""
        return self._model.encode_text(ids)


class SentenceTransformer(SentenceModel):
    """Model of sentence-transformers in a folder of either layout.

    That package is not needed. The model is a transformer, a pooling, then any number of dense layers and normalisations; other
    modules are refused by name. As there, the default prompt is the default prefix, and sentences lose blanks at their ends.
    """

    def __init__(self, folder: Path, name: str, prefix: str, dtype: str, precision: str, device: str) -> None:
        super().__init__(precision, device)
        (path, _), *modules = _modules(folder, name)
        config, self._tokenizer, model = load_model(path, name)
        if config.is_encoder_decoder or not self._tokenizer.is_fast:
            raise InputError(
                f"{name!r} ({config.model_type}) is unsupported, expected an encoder with a tokenizer of tokenizers"
            )
        settings = _read_settings(path / "sentence_bert_config.json")
        prompts = _read_settings(folder / "config_sentence_transformers.json")
        positions = getattr(config, "max_position_embeddings", None)
        sizes = (settings.get("max_seq_length"), positions, self._tokenizer.model_max_length)
        self.max_length, self._lowers = min(filter(None, sizes)), bool(settings.get("do_lower_case"))
        self.prefix = prefix or (prompts.get("prompts") or {}).get(prompts.get("default_prompt_name")) or ""
        head = nn.Sequential(*(layer for module, kind in modules for layer in _layers(module, kind, self.prefix, name)))
        state = used_weights(model) | {f"head.{key}": value for key, value in head.state_dict().items()}
        width = [config.hidden_size, *(layer.out_features for layer in head if isinstance(layer, nn.Linear))][-1]
        steps = list(map(str, head))
        short_name = local_path(name).absolute().name if local_path(name).is_dir() else name
        spec = FeatureSpec(
            f"sentence:{short_name}", (width,), dtype, f"sentence-transformers: {config.model_type}, {', '.join(steps)}"
        )
        self._describe(
            spec,
            tokenizer_sha256(self._tokenizer),
            config=text_config_sha256(path),
            weights={"sha256": state_sha256(state)},
            head=steps,
            lower_case=self._lowers,
        )
        self._model, self._head = (part.eval().requires_grad_(False).to(self.device) for part in (model, head))
        cache_casts(self._model, AUTOCAST_DTYPES.get(precision))

    def read(self, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
        """Run the model's tokenizer, see `SentenceModel.read`."""
        texts = [(self.prefix + text).strip() for text in texts]
        texts = [text.lower() for text in texts] if self._lowers else texts
        if not texts:
            return [], []
        with quiet_transformers():
            lengths = list(map(len, self._tokenizer(texts, verbose=False).input_ids))
            return self._tokenizer(texts, truncation=True, max_length=self.max_length).input_ids, lengths

    def compute(self, ids: Tensor) -> Tensor:
        """Encode sub-words ``[B, S]``: ``[B, E]``."""
        return self._head(self._model(input_ids=ids).last_hidden_state)


class SubWordPooling(nn.Module):
    """Pooling of all sub-words ``[B, S, D]`` to ``[B, D]``, without padding."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.extra_repr = lambda: mode  # type: ignore[method-assign]
        self.forward = _POOLINGS[mode]


class Normalization(nn.Module):
    """Normalisation of vectors to length 1."""

    def forward(self, values: Tensor) -> Tensor:
        """Divide by the Euclidean norm."""
        return F.normalize(values, dim=-1)


def _modules(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """Yield folder and class name of each module: transformer, pooling, others."""
    modules = _read_settings(folder / "modules.json")
    if not isinstance(modules, list) or not modules:
        raise InputError(f"{name!r} has no modules.json, expected a model as saved by sentence-transformers")
    for index, module in enumerate(modules):
        expected = (("Transformer",), ("Pooling",), ("Dense", "Normalize"))[min(index, 2)]
        library, _, kind = module["type"].rpartition(".")
        if not library.startswith("sentence_transformers.") or kind not in expected:
            raise InputError(
                f"module {index} of {name!r} is {module['type']!r}, expected {' or '.join(expected)} of "
                "sentence-transformers: import vectors that its own library computes"
            )
        yield folder / module["path"], kind


def _layers(folder: Path, kind: str, prefix: str, name: str) -> list[nn.Module]:
    """Return the layers of a module behind the transformer."""
    if kind == "Normalize":
        return [Normalization()]
    config = _read_settings(folder / "config.json")
    if kind == "Pooling":
        modes = [
            key.removeprefix("pooling_mode_").partition("_t")[0]
            for key, value in config.items()
            if value is True and "_mode_" in key
        ]
        mode = config.get("pooling_mode") or ",".join(modes)
        if mode not in _POOLINGS or (prefix and not config.get("include_prompt", True)):
            raise InputError(
                f"{name!r} pools {mode!r}{'' if mode not in _POOLINGS else ' without the prefix'}, expected "
                f"one of {', '.join(_POOLINGS)} over all sub-words: choose another model"
            )
        return [SubWordPooling(mode)]
    library, _, activation = config.get("activation_function", "torch.nn.Tanh").rpartition(".")
    if (
        not library.startswith("torch.nn")
        or activation not in _ACTIVATIONS
        or config.get("module_input_name", "sentence_embedding") != "sentence_embedding"
    ):
        raise InputError(f"a dense layer of {name!r} is {config}, expected {', '.join(_ACTIVATIONS)} of sentence_embedding")
    file = next((folder / file for file in ("model.safetensors", "pytorch_model.bin") if (folder / file).is_file()), None)
    if file is None:
        raise InputError(
            f"the dense layer of {name!r} has no weights, expected {folder.name}/model.safetensors: download it again"
        )
    linear = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    expected = {f"linear.{key}": value for key, value in linear.state_dict().items()}
    state = check_state(read_state_dict(file), expected, source=repr(str(file)))
    linear.load_state_dict({key.removeprefix("linear."): value for key, value in state.items()})
    return [linear, _ACTIVATIONS[activation]()]


def _read_settings(file: Path) -> Any:
    """Read a JSON file of a model; an empty object if it is missing."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"{str(file)!r} is corrupt ({error}): download the model again") from error
