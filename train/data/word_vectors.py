"""Pretrained vectors of words, for a model that begins with them.

Letters in shapes: ``N`` words, ``W`` width of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from train.config.models import ModelConfig


@dataclass(frozen=True)
class WordVectors:
    """Vectors of a vocabulary's words, by language, of a dataset.

    Attributes:
        ids: token ids int64 ``[N]`` of each language, ascending.
        vectors: their vectors, float32 ``[N, W]``.
    """

    location: str
    fingerprint: str
    width: int
    ids: Mapping[str, np.ndarray]
    vectors: Mapping[str, np.ndarray]

    def known(self, languages: Sequence[str], ids: Sequence[int]) -> int:
        """Count the tokens that have a vector in one of some languages at least."""
        return len(np.intersect1d(np.concatenate([self.ids[language] for language in languages]), ids))

    def of_languages(self, languages: Sequence[str], counts: Sequence[Mapping[str, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids int64 ``[N]``, ascending, and a vector for each, float32 ``[N, W]``.

        A token with vectors in several of the languages gets their mean, weighted by how often it occurs in each.
        """
        ids = np.unique(np.concatenate([self.ids[language] for language in languages]))
        sums, weights = np.zeros((len(ids), self.width)), np.zeros((len(ids), 1))
        for language in languages:
            rows = np.searchsorted(ids, self.ids[language])
            times = np.array([[max(1, counts[number].get(language, 0))] for number in self.ids[language].tolist()], np.float64)
            sums[rows] += times * self.vectors[language]
            weights[rows] += times
        return ids, (sums / weights).astype(np.float32)


def check_word_vectors(model: ModelConfig, location: str) -> None:
    """Check that there are pretrained vectors exactly if a model begins with them.

    Raises:
        UsageError: there are none, or the model does not begin with them.
    """
    if model.pretrained_width and not location:
        raise UsageError(
            f"model.word_vectors is {'frozen' if model.frozen_words else 'finetuned'!r}, but no word vectors are given: give "
            "--word-vectors FOLDER (see the command of that name), or --set model.word_vectors=random"
        )
    if location and not model.pretrained_width:
        raise UsageError(
            f"--word-vectors {location!r} is given, but model.word_vectors is 'random', so that no word would begin with them: "
            "give --set model.word_vectors=finetuned, or frozen, or leave --word-vectors out"
        )


def open_word_vectors(location: str, *, vocabulary: str, languages: Sequence[str], width: int) -> WordVectors:
    """Read the vectors of a model's languages.

    ``vocabulary`` is the fingerprint of that of the captions.

    Raises:
        DatasetError: the dataset is missing, or was made for another vocabulary.
        UsageError: it lacks a language, or its vectors have another width.
    """
    dataset = open_dataset(location, kind="word-vectors")
    made_for = dataset.manifest.input_fingerprint("vocabulary") or "none"
    if made_for != vocabulary:
        raise DatasetError(
            f"{location!r} holds the words of another vocabulary (fingerprint {made_for[:12]}...) than that of the captions "
            f"({vocabulary[:12]}...), whose ids stand for other tokens: make it again for this one"
        )
    values = dataset.numpy("vector")
    if values.shape[1] != width:
        raise UsageError(
            f"model.word_dim is {width}, but the vectors in {location!r} have {values.shape[1]} numbers: give --set "
            f"model.word_dim={values.shape[1]}, or vectors of the other width"
        )
    keys = dataset.table(["language", "id"])
    rows = np.array(keys["language"].to_pylist(), object)
    numbers = keys["id"].to_numpy().astype(np.int64)
    for language in languages:
        if language not in rows:
            raise UsageError(
                f"{location!r} has no vectors of {language!r}: it has those of {', '.join(sorted(set(rows.tolist())))}. Make it "
                "with a file for each language of the model, or leave the language out of data.portions"
            )
    return WordVectors(
        location=location,
        fingerprint=dataset.fingerprint,
        width=width,
        ids={language: numbers[rows == language] for language in languages},
        vectors={language: values[rows == language] for language in languages},
    )
