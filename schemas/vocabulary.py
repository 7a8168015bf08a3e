"""Vocabulary: tokens with ids and counts, specials first."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from schemas.kinds import VOCABULARY

PAD, START, END, UNK = 0, 1, 2, 3
SPECIALS = ("<pad>", "<start>", "<end>", "<unk>")
TEXT_NAME = "_vocabulary.txt"
"""Name of the text file of a vocabulary."""

_OCCURRENCES = pa.schema({"language": pa.string(), "token": pa.string(), "count": pa.int64()})


@dataclass(frozen=True)
class Vocabulary:
    """Tokens in the order of their ids.

    Attributes:
        tokens: the specials, then tokens by count descending, then by code point.
        table: rows of kind ``vocabulary``, with the counts; None for tokens without counts.

    Examples:
        >>> vocabulary = imagepivot.open_dataset("vocabulary").vocabulary()
        >>> [vocabulary.tokens[token_id] for token_id in vocabulary.encode(["red", "circle", "unicorn"])]
        ['<start>', 'red', 'circle', '<unk>', '<end>']
    """

    tokens: tuple[str, ...]
    table: pa.Table | None = None

    def __post_init__(self) -> None:
        if self.tokens[: len(SPECIALS)] != SPECIALS:
            raise ValueError(f"a vocabulary begins with {SPECIALS!r}, found {self.tokens[: len(SPECIALS)]!r}")
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

    @cached_property
    def counts(self) -> tuple[Mapping[str, int], ...]:
        """Occurrences of each token by language; empty for specials."""
        if self.table is None:
            return ({},) * len(self)
        return tuple(dict(pairs) for pairs in self.table["counts"].to_pylist())

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
        parts = [_OCCURRENCES.empty_table()]
        for language, of_token in sorted(counts.items()):
            parts.append(pa.table([[language] * len(of_token), [*of_token], [*of_token.values()]], schema=_OCCURRENCES))
        by_token = pa.concat_tables(parts).group_by("token", use_threads=False)  # Threads would mix the languages of a token.
        rows = by_token.aggregate([("count", "sum"), ("count", "max"), ("language", "list"), ("count", "list")])
        is_frequent = pc.greater_equal(rows["count_max" if scope == "language" else "count_sum"], min_count)
        rows = rows.filter(pc.and_not(is_frequent, pc.is_in(rows["token"], pa.array(SPECIALS))))
        # Arrow compares UTF-8, which is by code point.
        rows = rows.sort_by([("count_sum", "descending"), ("token", "ascending")])
        zeros = [0] * len(SPECIALS)
        no_items: list[list[str]] = [[]] * len(SPECIALS)
        of_specials = pa.table([SPECIALS, zeros, zeros, no_items, no_items], schema=rows.schema)
        rows = pa.concat_tables([of_specials, rows]).combine_chunks()
        languages, times = rows["language_list"].combine_chunks(), rows["count_list"].combine_chunks()
        by_language = pa.MapArray.from_arrays(languages.offsets, languages.flatten(), times.flatten())
        ids = pa.array(range(rows.num_rows), pa.int32())
        return cls.from_table(pa.table([ids, rows["token"], rows["count_sum"], by_language], schema=VOCABULARY))

    def encode(self, tokens: Sequence[str], *, max_length: int | None = None) -> list[int]:
        """Return the ids of ``<start>``, at most ``max_length`` tokens, and ``<end>``."""
        ids = self.word_ids
        return [START, *(ids.get(token, UNK) for token in tokens[:max_length]), END]

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the tokens of ids, specials included."""
        return [self.tokens[token_id] for token_id in ids]

    @classmethod
    def from_table(cls, table: pa.Table) -> Self:
        """Read rows of kind ``vocabulary`` in the order of ids."""
        return cls(tuple(table["token"].to_pylist()), table)

    def to_text(self) -> str:
        """Return one token per line, in the order of ids."""
        return "".join(f"{token}\n" for token in self.tokens)
