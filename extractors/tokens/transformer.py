"""The last layer of a pretrained model of text, such as multilingual BERT, by the package transformers.

Nothing is downloaded: a model is a folder, or a name that Hugging Face's cache on this machine has.

On a CPU a caption has the same bytes whatever it is extracted with, and with any number of threads: captions of as many sub-words
go through the model together, without padding, in passes of one shape.

Letters in shapes: ``B`` parts of captions, ``S`` sub-words, ``T`` tokens, ``D`` width of a vector.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from extractors.base import Description
from extractors.computing.cpu_parallel import run_in_chunks
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts, check_request, precision_context, upload
from extractors.computing.oom import BatchLimits, run_with_oom_retry
from extractors.weights.resolve import state_sha256
from schemas.errors import InputError
from schemas.features import FeatureSpec
from schemas.fingerprints import sha256_of_bytes, sha256_of_json

FORWARD_CAPTIONS = 8
"""Captions of one forward pass on a CPU: of 16 sub-words, on two cores, 8 were 1.4 times as fast as 4, and as 16."""

_UNREAD = ("pooler.",)  # Made of the last layer, and no part of it.
# What a config says besides what the model computes.
_INCIDENTAL = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_FAULTS = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError),
    UnpicklingError,
    SafetensorError,
)


@dataclass(frozen=True)
class Part:
    """Whole tokens of a caption that a model reads at once, between the sub-words that begin and end a sentence.

    Attributes:
        ids: ids of the sub-words, the first and the last one included.
        starts: int64, position of the first sub-word of each token among those between them, ascending from 0; none for a caption
            without tokens.
    """

    ids: tuple[int, ...]
    starts: np.ndarray


class TokenExtractor:
    """A loaded model of text."""

    def __init__(self, folder: Path, name: str, pooling: str, dtype: str, precision: str, device: str) -> None:
        self._device = check_request(device, precision)
        config, self._tokenizer, model = _load(folder, name)
        self._pooling, self._precision, self._limits = pooling, precision, BatchLimits()
        self._begin, self._end = _ends(config, self._tokenizer, name)
        self._positions = min(config.max_position_embeddings, self._tokenizer.model_max_length)
        # A tokenizer.json may say both, which would cut captions and fill them up.
        self._tokenizer.backend_tokenizer.no_truncation()
        self._tokenizer.backend_tokenizer.no_padding()
        state = {name: values for name, values in model.state_dict().items() if not name.startswith(_UNREAD)}
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
            "config": sha256_of_json({name: value for name, value in stored.items() if name not in _INCIDENTAL}),
            "weights": {"sha256": state_sha256(state)},
            "tokenizer": {"sha256": sha256_of_bytes(json.dumps(tokenizer, sort_keys=True).encode())},
            "positions": self._positions,
            "sub_words": pooling,
            "precision": precision,
        }
        self.description = Description(spec=spec, parameters=parameters, kind="token-features", batch_size=64)
        self._model = model.eval().requires_grad_(False).to(self._device)
        cache_casts(self._model, AUTOCAST_DTYPES.get(precision))

    def read(self, captions: Sequence[Sequence[str]]) -> tuple[list[list[Part]], Counter[str]]:
        """Return what the model reads of captions, and how many sub-words that are.

        A token is read by itself, as if it stood between spaces; one that the tokenizer makes nothing of, such as a control
        character, is read as the unknown sub-word.

        Args:
            captions: tokens of each caption.

        Returns:
            The parts of each caption, and the number of ``sub_words``, of ``unknown_sub_words`` among them, and of
            ``captions_in_parts``, which are longer than the model reads at once.
        """
        unknown = self._tokenizer.unk_token_id
        parts: list[list[Part]] = []
        counts: Counter[str] = Counter(sub_words=0, unknown_sub_words=0, captions_in_parts=0)
        # An empty list would be taken for a batch.
        filled = [list(tokens) for tokens in captions if tokens]
        encodings = iter(self._tokenizer.backend_tokenizer.encode_batch(filled, is_pretokenized=True, add_special_tokens=False))
        for tokens in captions:
            sub_words: list[list[int]] = [[] for _ in tokens]
            if tokens:
                encoding = next(encodings)
                for number, owner in zip(encoding.ids, encoding.word_ids, strict=True):
                    sub_words[owner].append(number)
            sub_words = [of_token or [unknown] for of_token in sub_words]
            parts.append(parts_of(sub_words, begin=self._begin, end=self._end, positions=self._positions))
            ids = [number for of_token in sub_words for number in of_token]
            counts.update(sub_words=len(ids), unknown_sub_words=ids.count(unknown), captions_in_parts=len(parts[-1]) > 1)
        return parts, counts

    def extract(self, captions: Sequence[Sequence[Part]], batch_size: int = 64) -> list[np.ndarray]:
        """Return the vectors of captions: of the beginning of each, of its tokens, and of its end.

        Args:
            captions: the parts of each caption, from `read`.
            batch_size: captions that a GPU takes at once; changes speed and memory, not the results.

        Returns:
            For each caption ``[T + 2, D]`` in the type of the spec.
        """
        every = [part for parts in captions for part in parts]
        by_length: dict[int, list[int]] = {}
        for number, part in enumerate(every):
            by_length.setdefault(len(part.ids), []).append(number)
        states: list[np.ndarray] = [np.empty(0)] * len(every)
        for _, numbers in sorted(by_length.items()):
            for start in range(0, len(numbers), batch_size):
                chosen = numbers[start : start + batch_size]
                found = self._states(torch.tensor([every[number].ids for number in chosen]))
                for number, state in zip(chosen, found, strict=True):
                    states[number] = state
        ends = iter(states)
        return [
            self.description.spec.rounded(vectors_of(parts, [next(ends) for _ in parts], self._pooling)) for parts in captions
        ]

    def _states(self, ids: Tensor) -> np.ndarray:
        """Return the last layer over sub-words ``[B, S]`` that are all there, float32 ``[B, S, D]``."""
        if self._device.type == "cpu":
            return run_in_chunks(self._forward, ids, FORWARD_CAPTIONS).numpy()
        with precision_context(self._precision, self._device), torch.inference_mode():
            return run_with_oom_retry(self._forward, ids, self._limits).numpy()

    def _forward(self, ids: Tensor) -> Tensor:
        dtype = AUTOCAST_DTYPES.get(self._precision)
        with torch.autocast(self._device.type, dtype, enabled=dtype is not None):
            return self._model(input_ids=upload(ids, self._device)).last_hidden_state.float().cpu()


def _load(folder: Path, name: str) -> tuple[Any, Any, Any]:
    """Return config, tokenizer and model, the weights in float32."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise InputError(
            f"{name!r} holds no config.json, expected a model as transformers saves it: config.json, tokenizer.json or vocab.txt, "
            "and model.safetensors or pytorch_model.bin"
        )
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, **local)
            tokenizer = AutoTokenizer.from_pretrained(folder, **local)
            model, report = AutoModel.from_pretrained(
                folder, config=config, dtype=torch.float32, output_loading_info=True, **local
            )
    except _FAULTS as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"transformers cannot read the model in {name!r} ({reason}): it is damaged, incomplete or of another "
            "kind; fetch it again"
        ) from error
    lacking = sorted(key for key in report["missing_keys"] if not key.startswith(_UNREAD))
    wrong = sorted(str(key) for key in report["mismatched_keys"])
    if lacking or wrong:
        raise InputError(
            f"the weights in {name!r} are not those of its config.json: {len(lacking)} tensors are missing, {len(wrong)} of "
            f"another shape, such as {(lacking or wrong)[0]}; fetch the model again"
        )
    return config, tokenizer, model


def _ends(config: Any, tokenizer: Any, name: str) -> tuple[int, int]:
    """Return the ids of the sub-words that begin and end a sentence."""
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    needed = (
        begin,
        end,
        tokenizer.unk_token_id,
        *(getattr(config, key, None) for key in ("max_position_embeddings", "hidden_size")),
    )
    if not tokenizer.is_fast or None in needed:
        raise InputError(
            f"{name!r} ({config.model_type}) is no model like BERT: expected a tokenizer of the package tokenizers that begins and "
            "ends a sentence with a sub-word of its own ([CLS] and [SEP]) and has one for what it does not know, and a config with "
            "max_position_embeddings and hidden_size"
        )
    return begin, end


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from showing progress and advice, and put back what it did."""
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


def parts_of(tokens: Sequence[Sequence[int]], *, begin: int, end: int, positions: int) -> list[Part]:
    """Divide a caption into parts, as few as possible: each takes as many whole tokens as a model has positions.

    Nearly every caption is one part.

    Args:
        tokens: ids of the sub-words of each token, one or more. Of a token with more of them than there are positions, those that
            come first are read.
        begin: id of the sub-word that begins a sentence, such as ``[CLS]``.
        end: id of the sub-word that ends it, such as ``[SEP]``.
        positions: greatest number of sub-words that the model reads at once, both of these included.
    """
    room = positions - 2
    groups: list[list[Sequence[int]]] = [[]]
    taken = 0
    for sub_words in tokens:
        kept = sub_words[:room]
        if taken + len(kept) > room:
            groups.append([])
            taken = 0
        groups[-1].append(kept)
        taken += len(kept)
    return [
        Part(
            ids=(begin, *(number for sub_words in group for number in sub_words), end),
            starts=np.cumsum([0, *map(len, group)], dtype=np.int64)[:-1],
        )
        for group in groups
    ]


def vectors_of(parts: Sequence[Part], states: Sequence[np.ndarray], pooling: str) -> np.ndarray:
    """Return a vector for the beginning of a caption, for each of its tokens and for its end, float32 ``[T + 2, D]``.

    The ``states`` are the model's of each part, float32 ``[S, D]``.
    """
    tokens = [_pooled(part.starts, state[1:-1], pooling) for part, state in zip(parts, states, strict=True)]
    return np.concatenate([states[0][:1], *tokens, states[-1][-1:]])


def _pooled(starts: np.ndarray, state: np.ndarray, pooling: str) -> np.ndarray:
    if pooling == "first" or not len(starts):
        return state[starts]
    counts = np.diff(np.append(starts, len(state)))
    return np.add.reduceat(state, starts, axis=0) / counts[:, np.newaxis].astype(np.float32)
