"""The tables of word vectors in a model, and the pretrained vectors with which they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from train.data.word_vectors import WordVectors
from train.models.encoders import WordTable
from train.models.retrieval_model import RetrievalModel


def word_tables(model: nn.Module, vocabulary_size: int) -> dict[str, Sequence[int]]:
    """Return, by parameter, the token id of each row of the tables of word vectors.

    These are each `WordTable`, and torch's own embeddings that have as many rows as there are tokens.
    """
    tables: dict[str, Sequence[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, WordTable):
            tables[f"{name}.weight"] = module.ids
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.num_embeddings == vocabulary_size:
            tables[f"{name}.weight"] = range(vocabulary_size)
    return tables


def begin_with(model: RetrievalModel, words: WordVectors, counts: Sequence[Mapping[str, int]]) -> str:
    """Replace the drawn vectors of words by pretrained ones; a word that has none stays as drawn.

    Args:
        model: the model.
        words: the pretrained vectors.
        counts: occurrences of each token by language, as the vocabulary has them.

    Returns:
        What was replaced, in one sentence.

    Raises:
        UsageError: the model has no table of such words.
    """
    parameters = dict(model.named_parameters())
    said = []
    for name, ids in word_tables(model, len(counts)).items():
        weight = parameters[name]
        if weight.shape[1] != words.width:
            raise UsageError(
                f"{name} has {weight.shape[1]} numbers a word, but the vectors in {words.location!r} have {words.width}: choose "
                "other vectors, or another width"
            )
        languages = _languages_of(model, name)
        rows_of = {number: row for row, number in enumerate(ids)}
        numbers, vectors = words.of_languages(languages, counts)
        known = [place for place, number in enumerate(numbers.tolist()) if number in rows_of]
        rows = torch.tensor([rows_of[numbers[place]] for place in known], dtype=torch.int64, device=weight.device)
        with torch.no_grad():
            weight[rows] = torch.from_numpy(vectors[known]).to(weight)
        said.append(f"{len(known):,} of {len(rows_of):,} in {', '.join(languages)}")
    if not said:
        raise UsageError("the model has no table of words, so that it cannot begin with word vectors: leave --word-vectors out")
    return f"began with the vectors of words in {words.location!r}: {'; '.join(said)}; the others as drawn"


def freeze_words(model: nn.Module, vocabulary_size: int) -> None:
    """Keep the tables of words as they are: training changes them no more."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    for name in word_tables(model, vocabulary_size):
        parameters[name].requires_grad_(False)


def _languages_of(model: RetrievalModel, name: str) -> Sequence[str]:
    """Return the languages whose words a parameter holds."""
    for module, languages in model.modules_by_language().items():
        if name.startswith(f"{module}."):
            return tuple(languages)
    return model.languages
