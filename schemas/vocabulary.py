"""Vocabulary: tokens with ids and counts, specials first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa

from schemas.kinds import VOCABULARY

PAD, START, END, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<start>", "<end>", "<unk>")
TEXT_NAME = "_vocabulary.txt"
"""Name of the text file of a vocabulary."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids.

    Attributes:
        tokens: the specials, then tokens by count descending, then by code point.
        counts: occurrences of each token by language; empty for specials.

    Examples:
        >>> vocabulary = imagepivot.open_dataset("vocabulary").vocabulary()
        >>> [vocabulary.tokens[token_id] for token_id in vocabulary.encode(["red", "circle", "unicorn"])]
        ['<start>', 'red', 'circle', '<unk>', '<end>']
    """

    tokens: tuple[str, ...]
    counts: tuple[Mapping[str, int], ...]

    def __post_init__(self) -> None:
        if self.tokens[: len(SPECIALS)] != SPECIALS:
            raise ValueError(f"a vocabulary begins with {SPECIALS!r}, found {self.tokens[: len(SPECIALS)]!r}")
        if len(self.tokens) != len(self.counts):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.counts)} counts")
        if len(self.ids) != len(self.tokens):
            raise ValueError("a token occurs twice in the vocabulary")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Id of each token."""
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    @cached_property
    def word_ids(self) -> Mapping[str, int]:
        """Id of each token except the specials."""
        return {token: token_id for token, token_id in self.ids.items() if token_id >= len(SPECIALS)}

    @classmethod
    def from_counts(cls, counts: Mapping[str, Mapping[str, int]], *, min_count: int, scope: str = "language") -> Self:
        """Build a vocabulary of tokens with at least ``min_count`` occurrences.

        ``counts`` holds occurrences by language, then token. The scope ``language`` compares the maximum over languages (Kádár et
        al. 2018, section 4: the joint vocabulary is the union of the languages' own), ``joint`` the sum over languages.

        Tokens spelled like a special (``<start>`` in the text) are left out; `encode` returns ``<unk>`` for them.

        Raises:
            ValueError: the scope is unknown.
        """
        if scope not in ("language", "joint"):
            raise ValueError(f"scope is {scope!r}, expected 'language' or 'joint'")
        by_token: dict[str, dict[str, int]] = {}
        for language in sorted(counts):
            for token, count in counts[language].items():
                by_token.setdefault(token, {})[language] = count
        reach = max if scope == "language" else sum
        entries = [
            (token, by_language)
            for token, by_language in by_token.items()
            if reach(by_language.values()) >= min_count and token not in SPECIALS
        ]
        entries.sort(key=lambda item: (-sum(item[1].values()), item[0]))
        return cls(
            tokens=(*SPECIALS, *(token for token, _ in entries)),
            counts=(*({} for _ in SPECIALS), *(by_language for _, by_language in entries)),
        )

    def encode(self, tokens: Sequence[str], *, max_length: int | None = None) -> list[int]:
        """Return the ids of ``<start>``, at most ``max_length`` tokens, and ``<end>``."""
        ids = self.word_ids
        return [START, *(ids.get(token, UNK) for token in tokens[:max_length]), END]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens of ids, specials included."""
        return [self.tokens[token_id] for token_id in ids]

    def to_table(self) -> pa.Table:
        """Return the vocabulary as rows of kind ``vocabulary``."""
        return pa.table(
            {
                "id": np.arange(len(self), dtype=np.int32),
                "token": list(self.tokens),
                "count": [sum(counts.values()) for counts in self.counts],
                "counts": [sorted(counts.items()) for counts in self.counts],
            },
            schema=VOCABULARY,
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Read rows of kind ``vocabulary`` in the order of ids."""
        return cls(
            tokens=tuple(table["token"].to_pylist()),
            counts=tuple(dict(pairs) for pairs in table["counts"].to_pylist()),
        )

    def to_text(self) -> str:
        """Return one token per line, in the order of ids."""
        return "".join(f"{token}\n" for token in self.tokens)
