"""Token vectors from the last layer of a pretrained text model (transformers).

Nothing is downloaded: a model is a local folder, or a name in Hugging Face's cache. Batches contain
captions of equal sub-word counts, so on a CPU the bytes of a caption do not depend on other captions and on the thread count.

Shapes: ``B`` parts of captions, ``S`` sub-words, ``T`` tokens, ``D`` width of a vector.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from extractors.base import Description
from extractors.computing.cpu_parallel import run_in_chunks
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts, check_request, precision_context
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from extractors.weights.resolve import state_sha256
from schemas.errors import InputError, first_line
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_bytes, sha256_of_json
from schemas.process.devices import upload

FORWARD_CAPTIONS = 8
"""Captions per forward on a CPU."""

_SAMPLE = ("two", "dogs", "run", "through", "the", "deep", "snow", ",", "überall", "1984", ".")  # A caption.
_UNUSED_WEIGHTS = ("pooler.",)
# Config keys without effect on the computation.
_IGNORED_CONFIG = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_FAULTS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError),
    UnpicklingError,
    SafetensorError,
)


@dataclass(frozen=True)
class CaptionPart:
    """Input of the model: whole tokens of a caption with special tokens around them.

    Attributes:
        ids: sub-word ids, including the special tokens.
        starts: int64, position of each token's first sub-word, without the first special token; ascending from 0.
    """

    ids: tuple[int, ...]
    starts: np.ndarray


class TokenExtractor:
    """Loaded text model."""

    def __init__(self, folder: Path, name: str, pooling: str, dtype: str, precision: str, device: str) -> None:
        self._device = check_request(device, precision)
        config, self._tokenizer, model = _load_model(folder, name)
        self._pooling, self._precision, self._limits = pooling, precision, BatchLimits()
        self._begin, self._end = _special_tokens(config, self._tokenizer, name)
        self._positions = min(config.max_position_embeddings, self._tokenizer.model_max_length)
        # A tokenizer.json may enable both.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        state = {name: values for name, values in model.state_dict().items() if not name.startswith(_UNUSED_WEIGHTS)}
        spec = FeatureSpec(
            name=config.model_type,
            shape=(config.hidden_size,),
            dtype=dtype,
            source=f"last of {config.num_hidden_layers} layers, "
            + {"mean": "mean of a token's sub-words", "first": "first sub-word of a token"}[pooling],
        )
        stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tokenizer = json.loads(self._tokenizer.backend_tokenizer.to_str())
        parameters = {
            "feature": spec.to_json(),
            "config": sha256_of_json({name: value for name, value in stored.items() if name not in _IGNORED_CONFIG}),
            "weights": {"sha256": state_sha256(state)},
            "tokenizer": {"sha256": sha256_of_bytes(json.dumps(tokenizer, sort_keys=True).encode())},
            "positions": self._positions,
            "sub_words": pooling,
            "precision": precision,
        }
        self.description = Description(spec=spec, parameters=parameters, kind="token-features", batch_size=64)
        self._model = model.eval().requires_grad_(False).to(self._device)
        cache_casts(self._model, AUTOCAST_DTYPES.get(precision))

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._device

    def sample(self) -> np.ndarray:
        """Compute the vectors of a fixed caption, which tell versions of the code apart."""
        parts, _ = self.read([_SAMPLE])
        return self.extract(parts)[0]

    def read(self, captions: Sequence[Sequence[str]]) -> tuple[list[list[CaptionPart]], Counter[str]]:
        """Convert tokens of captions to sub-words and parts.

        Each token is tokenized separately. A token without sub-words, such as a control character, becomes the unknown sub-word.

        Returns:
            The parts of each caption, and the counts of ``sub_words``, ``unknown_sub_words``, and ``captions_in_parts`` (captions
            with several parts).
        """
        unknown = self._tokenizer.unk_token_id
        parts: list[list[CaptionPart]] = []
        counts: Counter[str] = Counter(sub_words=0, unknown_sub_words=0, captions_in_parts=0)
        # Without empty captions, which `encode_batch` refuses.
        filled = [list(tokens) for tokens in captions if tokens]
        encodings = iter(self._tokenizer.backend_tokenizer.encode_batch(filled, is_pretokenized=True, add_special_tokens=False))
        for tokens in captions:
            sub_words: list[list[int]] = [[] for _ in tokens]
            if tokens:
                encoding = next(encodings)
                for sub_word_id, token_index in zip(encoding.ids, encoding.word_ids, strict=True):
                    sub_words[token_index].append(sub_word_id)
            sub_words = [token_ids or [unknown] for token_ids in sub_words]
            parts.append(parts_of(sub_words, begin=self._begin, end=self._end, positions=self._positions))
            ids = list(chain.from_iterable(sub_words))
            counts.update(sub_words=len(ids), unknown_sub_words=ids.count(unknown), captions_in_parts=len(parts[-1]) > 1)
        return parts, counts

    def extract(self, captions: Sequence[Sequence[CaptionPart]], batch_size: int = 64) -> list[np.ndarray]:
        """Extract the vectors of captions, given as their parts from `read`.

        Returns:
            For each caption ``[T + 2, D]`` in the spec's dtype: begin token, tokens, end token.
        """
        parts = list(chain.from_iterable(captions))
        by_length: dict[int, list[int]] = {}
        for i, part in enumerate(parts):
            by_length.setdefault(len(part.ids), []).append(i)
        states: list[np.ndarray] = [np.empty(0)] * len(parts)
        for _, indices in sorted(by_length.items()):
            for start in range(0, len(indices), batch_size):
                batch = indices[start : start + batch_size]
                for i, state in zip(batch, self._states(torch.tensor([parts[i].ids for i in batch])), strict=True):
                    states[i] = state
        queue = iter(states)
        return [
            self.description.spec.rounded(pool_parts(caption, [next(queue) for _ in caption], self._pooling))
            for caption in captions
        ]

    def _states(self, ids: Tensor) -> np.ndarray:
        """Compute the last layer for sub-words ``[B, S]``: float32 ``[B, S, D]``."""
        if self._device.type == "cpu":
            return run_in_chunks(self._forward, ids, FORWARD_CAPTIONS).numpy()
        with precision_context(self._precision, self._device), torch.inference_mode():
            return run_with_oom_retry(self._forward, ids, self._limits).numpy()

    def _forward(self, ids: Tensor) -> Tensor:
        dtype = AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            return self._model(input_ids=upload(ids, self._device)).last_hidden_state.float().cpu()


def _load_model(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """Load config, tokenizer and model, with weights in float32."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name!r} has no config.json, expected a model as saved by transformers: config.json, tokenizer.json or vocab.txt, "
            "and model.safetensors or pytorch_model.bin"
        )
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(folder, **local)
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            model, report = AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **local
            )
    except _FAULTS as error:
        raise InputError(
            f"transformers cannot read the model in {name!r} ({first_line(error)[:200]}): it is corrupt, incomplete or of another "
            "kind; download it again"
        ) from error
    missing = sorted(key for key in report["missing_keys"] if not key.startswith(_UNUSED_WEIGHTS))
    misshapen = sorted(str(key) for key in report["mismatched_keys"])
    if missing or misshapen:
        raise InputError(
            f"the weights in {name!r} do not match its config.json: {len(missing)} tensors are missing, {len(misshapen)} have "
            f"another shape, e.g. {(missing or misshapen)[0]}; download the model again"
        )
    return config, tokenizer, model


def _special_tokens(config: Any, tokenizer: Any, name: str) -> tuple[int, int]:
    """Return the ids of the sub-words that begin and end a sentence."""
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    sizes = (getattr(config, key, None) for key in ("max_position_embeddings", "hidden_size"))
    if not tokenizer.is_fast or None in (begin, end, tokenizer.unk_token_id, *sizes):
        raise InputError(
            f"{name!r} ({config.model_type}) is not a BERT-like model: expected a fast tokenizer (package tokenizers) with [CLS], "
            "[SEP] and [UNK], and a config with max_position_embeddings and hidden_size"
        )
    return begin, end


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the progress and advice of transformers inside the block."""
    from transformers.utils import logging

    level, shows = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows:
            logging.enable_progress_bar()


def parts_of(tokens: Sequence[Sequence[int]], *, begin: int, end: int, positions: int) -> list[CaptionPart]:
    """Split a caption into as few parts of whole tokens as possible.

    Args:
        tokens: sub-word ids of each token, at least one; tokens longer than a part are truncated.
        begin: id of the sub-word that begins a sentence, such as ``[CLS]``.
        end: id of the sub-word that ends it, such as ``[SEP]``.
        positions: maximum number of sub-words of a part, including these two.
    """
    max_length = positions - 2
    groups: list[list[Sequence[int]]] = [[]]
    length = 0
    for sub_words in tokens:
        sub_words = sub_words[:max_length]
        if length + len(sub_words) > max_length:
            groups.append([])
            length = 0
        groups[-1].append(sub_words)
        length += len(sub_words)
    return [
        CaptionPart(
            ids=(begin, *chain.from_iterable(group), end),
            starts=np.cumsum([0, *map(len, group)], dtype=np.int64)[:-1],
        )
        for group in groups
    ]


def pool_parts(parts: Sequence[CaptionPart], states: Sequence[np.ndarray], pooling: str) -> np.ndarray:
    """Pool the states of a caption's parts, float32 ``[S, D]``, to ``[T + 2, D]``."""
    tokens = [_reduce(part.starts, state[1:-1], pooling) for part, state in zip(parts, states, strict=True)]
    return np.concatenate([states[0][:1], *tokens, states[-1][-1:]])


def _reduce(starts: np.ndarray, state: np.ndarray, pooling: str) -> np.ndarray:
    if pooling == "first" or not len(starts):
        return state[starts]
    counts = np.diff(np.append(starts, len(state)))
    return np.add.reduceat(state, starts, axis=0) / counts[:, np.newaxis].astype(np.float32)
