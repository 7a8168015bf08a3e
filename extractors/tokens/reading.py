"""What a model reads of a caption: the sub-words of its tokens, in one part or in several.

Letters in shapes: ``T`` tokens of a caption, ``S`` sub-words of a part, ``D`` width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Pooling = Literal["mean", "first"]
POOLINGS: tuple[Pooling, ...] = ("mean", "first")
"""What a token gets: the mean of the vectors of its sub-words, or the vector of the first."""


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


def vectors_of(parts: Sequence[Part], states: Sequence[np.ndarray], pooling: Pooling) -> np.ndarray:
    """Return a vector for the beginning of a caption, for each of its tokens and for its end, float32 ``[T + 2, D]``.

    Args:
        parts: the parts of the caption.
        states: what the model makes of each part, float32 ``[S, D]``.
        pooling: what a token gets of its sub-words.
    """
    tokens = [_pooled(part.starts, state[1:-1], pooling) for part, state in zip(parts, states, strict=True)]
    return np.concatenate([states[0][:1], *tokens, states[-1][-1:]])


def _pooled(starts: np.ndarray, state: np.ndarray, pooling: Pooling) -> np.ndarray:
    if pooling == "first" or not len(starts):
        return state[starts]
    counts = np.diff(np.append(starts, len(state)))
    return np.add.reduceat(state, starts, axis=0) / counts[:, np.newaxis].astype(np.float32)
