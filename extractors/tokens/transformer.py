"""Token vectors from the last layer of a pretrained text model (transformers).

See `extractors.tokens.text_model` for loading and batches.

Shapes: ``B`` parts of captions, ``S`` sub-words, ``T`` tokens, ``D`` width of a vector.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from extractors.base import Description
from extractors.computing.devices import AUTOCAST_DTYPES, cache_casts
from extractors.tokens.text_model import TextModel, load_model, text_config_sha256, tokenizer_sha256, used_weights
from extractors.weights.resolve import state_sha256
from schemas.errors import InputError
from schemas.features import FeatureSpec

_SAMPLE = ("two", "dogs", "run", "through", "the", "deep", "snow", ",", "überall", "1984", ".")  # A caption.


@dataclass(frozen=True)
class CaptionPart:
    """Input of the model: whole tokens of a caption with special tokens around them.

    Attributes:
        ids: sub-word ids, including the special tokens.
        starts: int64, position of each token's first sub-word, without the first special token; ascending from 0.
    """

    ids: tuple[int, ...]
    starts: np.ndarray


class TokenExtractor(TextModel):
    """Loaded text model for the tokens of captions."""

    def __init__(self, folder: Path, name: str, pooling: str, dtype: str, precision: str, device: str) -> None:
        super().__init__(precision, device)
        config, self._tokenizer, model = load_model(folder, name)
        self._pooling = pooling
        self._begin, self._end = _special_tokens(config, self._tokenizer, name)
        self._positions = min(config.max_position_embeddings, self._tokenizer.model_max_length)
        spec = FeatureSpec(
            name=config.model_type,
            shape=(config.hidden_size,),
            dtype=dtype,
            source=f"last of {config.num_hidden_layers} layers, "
            + {"mean": "mean of a token's sub-words", "first": "first sub-word of a token"}[pooling],
        )
        parameters = {
            "feature": spec.to_json(),
            "config": text_config_sha256(folder),
            "weights": {"sha256": state_sha256(used_weights(model))},
            "tokenizer": {"sha256": tokenizer_sha256(self._tokenizer)},
            "positions": self._positions,
            "sub_words": pooling,
            "precision": precision,
        }
        self.description = Description(spec=spec, parameters=parameters, kind="token-features", batch_size=64)
        self._model = model.eval().requires_grad_(False).to(self.device)
        cache_casts(self._model, AUTOCAST_DTYPES.get(precision))

    def sample(self) -> np.ndarray:
        """Compute the vectors of a fixed caption, which tell versions of the code apart."""
        parts, _ = self.read([_SAMPLE])
        return self.extract(parts)[0]

    def read(self, captions: Sequence[Sequence[str]]) -> tuple[list[list[CaptionPart]], Counter[str]]:
        """Convert tokens of captions to sub-words and parts.

        Each token is tokenized separately. A token without sub-words, such as a control character, becomes the unknown sub-word.

        Returns:
            The parts of each caption, and the counts of ``sub_words``, ``unknown_sub_words``, and
            ``captions_in_parts`` (captions with several parts).
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
        queue = iter(self.compute_by_length([part.ids for part in parts], batch_size))
        return [
            self.description.spec.rounded(pool_parts(caption, [next(queue) for _ in caption], self._pooling))
            for caption in captions
        ]

    def compute(self, ids: Tensor) -> Tensor:
        """Compute the last layer for sub-words ``[B, S]``: ``[B, S, D]``."""
        return self._model(input_ids=ids).last_hidden_state


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
