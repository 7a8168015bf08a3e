"""Runs as functions from texts and features to vectors.

Letters: ``A``, ``B`` and ``N`` texts or images, ``E`` embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from schemas.errors import UsageError
from schemas.features import FeatureSpec
from train.data.features import ImageFeatures, norms_of
from train.evaluation.compatibility import check_vectors
from train.evaluation.evaluation import embed_images, eval_mode
from train.evaluation.sentences import Tokenize, embed_sentences, sentence_language
from train.models.retrieval_model import Encoded, RetrievalModel
from train.runs.run import Run


def embed_arrays(
    model: RetrievalModel, features: np.ndarray, spec: FeatureSpec, l2: bool, num_regions: np.ndarray | None = None
) -> np.ndarray:
    """Embed images from arrays of their features: float32 ``[N, E]``."""
    images = ImageFeatures(features, norms_of(features), np.arange(len(features)), spec, l2, num_regions)
    return embed_images(model, images).values.cpu().numpy()


@dataclass(frozen=True, repr=False, kw_only=True)
class EncodingRun(Run):
    """A run that encodes texts and images, on the device of its model.

    Vectors are numpy arrays like those of datasets, without gradient.

    Attributes:
        tokenize: tokenizer for the text recipe of the run's captions.

    Examples:
        >>> run = imagepivot.open_run("runs/demo")
        >>> images = run.encode_images(imagepivot.open_dataset("features").numpy())
        >>> run.similarity(images, run.encode_text(["a red circle"], language="en")).shape
        (6, 1)
    """

    tokenize: Tokenize

    def encode_text(self, texts: Sequence[str], *, language: str = "", truecaser: str = "") -> np.ndarray:
        """Tokenize texts like the captions, and return vectors, float32 ``[N, E]``.

        Raises:
            UsageError: the model has no vectors, reads no text or does not know the language, or the recipe needs ``truecaser``.
        """
        if isinstance(texts, str):
            raise UsageError(f"texts is {texts!r}, expected a list, e.g. [{texts!r}]")
        language = sentence_language(self, language)
        return embed_sentences(self, [self.tokenize(text, language, self.text, truecaser) for text in texts], language)

    def encode_images(self, features: np.ndarray, num_regions: np.ndarray | None = None) -> np.ndarray:
        """Return the vectors of images from their features, float32 ``[N, E]``.

        Raises:
            UsageError: the model has no vectors, or the features have another shape.
        """
        check_vectors(self)
        features, shape = np.asarray(features), self.feature_shape
        if features.shape[1:] != shape:
            raise UsageError(
                f"features have shape {list(features.shape)}, expected {['N', *shape]}: extract them as for the run"
            )
        return embed_arrays(self.model, features, FeatureSpec("", shape), self.config.data.l2_features, num_regions)

    def similarity(self, images: np.ndarray, texts: np.ndarray) -> np.ndarray:
        """Return the scores ``[A, B]`` of vectors of images and texts, or two of a kind."""
        with eval_mode(self.model) as device:
            a, b = (Encoded(torch.as_tensor(vectors).to(device)) for vectors in (images, texts))
            return self.model.scores(a, b).cpu().numpy()
