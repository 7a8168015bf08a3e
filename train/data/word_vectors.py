"""Pretrained word vectors, to initialize word embeddings.

Shapes: ``N`` words, ``W`` width of a vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.config.models import ModelConfig


@dataclass(frozen=True)
class WordVectors:
    """Word vectors of a vocabulary, by language.

    Attributes:
        location: folder of their dataset.
        fingerprint: fingerprint of their dataset.
        width: W.
        ids: token ids of each language, int64 ``[N]``, ascending.
        vectors: vectors of these tokens, float32 ``[N, W]``, by language.
    """

    location: str
    fingerprint: str
    width: int
    ids: Mapping[str, np.ndarray]
    vectors: Mapping[str, np.ndarray]

    def count(self, languages: Sequence[str], ids: Sequence[int]) -> int:
        """Count the tokens with a vector in at least one of the languages."""
        return len(np.intersect1d(np.concatenate([self.ids[language] for language in languages]), ids))

    def of_languages(self, languages: Sequence[str], counts: Sequence[Mapping[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, int64 ``[N]``, ascending, and vectors, float32 ``[N, W]``.

        A token of several languages gets the mean of its vectors, weighted by ``counts``: for each token id, by language.
        """
        ids = np.unique(np.concatenate([self.ids[language] for language in languages]))
        sums, weights = np.zeros((len(ids), self.width)), np.zeros((len(ids), 1))
        for language in languages:
            rows = np.searchsorted(ids, self.ids[language])
            weight = np.array([[max(1, counts[n].get(language, 0))] for n in self.ids[language].tolist()], np.float64)
            sums[rows] += weight * self.vectors[language]
            weights[rows] += weight
        return ids, (sums / weights).astype(np.float32)


def check_word_vectors(model: ModelConfig, location: str) -> None:
    """Check that word vectors are given if, and only if, a model needs them.

    Raises:
        UsageError: they are missing, or the model does not use them.
    """
    if model.pretrained_width and not location:
        raise UsageError(
            f"model.word_vectors is {'frozen' if model.frozen_words else 'finetuned'!r}, but no word vectors are given: give "
            "--word-vectors FOLDER (see the command of that name), or --set model.word_vectors=random"
        )
    if location and not model.pretrained_width:
        raise UsageError(
            f"--word-vectors {location!r} is given, but model.word_vectors is 'random', so that the model would not use them: give "
            "--set model.word_vectors=finetuned, or frozen, or leave --word-vectors out"
        )


def open_word_vectors(location: str, *, vocabulary_fingerprint: str, languages: Sequence[str], width: int) -> WordVectors:
    """Read the word vectors of some languages, for the vocabulary of the captions.

    Raises:
        DatasetError: the dataset is missing, or of another vocabulary.
        UsageError: it lacks a language, or its vectors have another width.
    """
    dataset = open_dataset(location, kind="word-vectors")
    fingerprint = dataset.manifest.input_fingerprint("vocabulary") or "none"
    if fingerprint != vocabulary_fingerprint:
        raise DatasetError(
            f"{location!r} belongs to another vocabulary (fingerprint {fingerprint[:12]}...) than the captions "
            f"({vocabulary_fingerprint[:12]}...), with other token ids: write it again for this vocabulary"
        )
    values = dataset.numpy("vector")
    if values.shape[1] != width:
        raise UsageError(
            f"model.word_dim is {width}, but the vectors in {location!r} have width {values.shape[1]}: give "
            f"--set model.word_dim={values.shape[1]}, or vectors of the other width"
        )
    keys = dataset.table(["language", "id"])
    row_languages = np.array(keys["language"].to_pylist(), object)
    token_ids = keys["id"].to_numpy().astype(np.int64)
    for language in languages:
        if language not in row_languages:
            available = ", ".join(sorted(set(row_languages.tolist())))
            raise UsageError(
                f"{location!r} has no vectors of {language!r}, only of {available}: write it with a file "
                "for each language of the model, or leave the language out of data.portions"
            )
    return WordVectors(
        location=location,
        fingerprint=dataset.fingerprint,
        width=width,
        ids={language: token_ids[row_languages == language] for language in languages},
        vectors={language: values[row_languages == language] for language in languages},
    )
