"""Runs and joint models as functions from texts and features to vectors.

Letters: ``A``, ``B`` and ``N`` texts or images, ``E`` embedding width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from schemas.errors import UsageError
from schemas.features import FeatureSpec
from schemas.parameters import FeaturesParameters
from train.data.features import ImageFeatures, norms_of
from train.evaluation.compatibility import check_vectors
from train.evaluation.evaluation import embed_images, eval_mode
from train.evaluation.pairs import JointSpace
from train.evaluation.sentences import TextEncoder, Tokenize, embed_sentences, sentence_language
from train.models.retrieval_model import Encoded, ImageBatch, RetrievalModel
from train.runs.run import Run


def compare_vectors(model: RetrievalModel, images: np.ndarray | Tensor, texts: np.ndarray | Tensor) -> np.ndarray:
    """Return a model's scores ``[A, B]`` of vectors of images and texts."""
    if images.shape[1:] != texts.shape[1:]:
        raise UsageError(f"vectors have the shapes {list(images.shape)} and {list(texts.shape)}, expected those of one model")
    with eval_mode(model) as device:
        a, b = (Encoded(torch.as_tensor(vectors).to(device)) for vectors in (images, texts))
        return model.scores(a, b).cpu().numpy()


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
        _check_list(texts)
        language = sentence_language(self, language)
        return embed_sentences(self, [self.tokenize(text, language, self.text, truecaser) for text in texts], language)

    def encode_images(self, features: np.ndarray, num_regions: np.ndarray | None = None) -> np.ndarray:
        """Return the vectors of images from their features, float32 ``[N, E]``.

        Raises:
            UsageError: the model has no vectors, or the features have another shape.
        """
        check_vectors(self)
        features, shape = _check_shape(features, self.feature_shape), self.feature_shape
        l2, rows = self.config.data.l2_features, np.arange(len(features))
        images = ImageFeatures(features, norms_of(features), rows, FeatureSpec("", shape), l2, num_regions)
        return embed_images(self.model, images).values.cpu().numpy()

    def similarity(self, images: np.ndarray | Tensor, texts: np.ndarray | Tensor) -> np.ndarray:
        """Return the scores ``[A, B]`` of vectors of images and texts, or two of a kind."""
        return compare_vectors(self.model, images, texts)


class JointModel:
    """A pretrained text encoder with images of its space, used like a run.

    Vectors are numpy arrays like those of datasets, with the norm that the similarity of the model expects.

    Args:
        encoder: text encoder, e.g. of `imagepivot.load_text_encoder`.
        images: parameters of the vectors of images; a space that they declare is taken as the encoder's.
        place: name of the images in messages.

    Raises:
        DatasetError: encoder and images do not share a space, or a width.

    Examples:
        >>> model = imagepivot.open_joint_model("open_clip:models/ViT-B-32", "clip-images")  # doctest: +SKIP
        >>> model.encode_text(["ein roter Kreis"]).shape  # doctest: +SKIP
        (1, 512)
    """

    def __init__(
        self, encoder: TextEncoder, images: FeaturesParameters, *, place: str = "", device: str | torch.device = "cpu"
    ) -> None:
        self._encoder = encoder
        # A declared space has no encoders on record: whoever uses it names one.
        texts = replace(encoder.parameters, space=images.space)
        self.model = JointSpace(texts, images, places=(encoder.name, place)).to(device)

    def encode_text(self, texts: Sequence[str], *, language: str = "") -> np.ndarray:
        """Return the vectors of texts, float32 ``[N, E]``.

        Raises:
            UsageError: ``texts`` is a single text.
        """
        _check_list(texts)
        return self.model.encode_texts(self._encoder.encode(texts, language)).values.cpu().numpy()

    def encode_images(self, features: np.ndarray) -> np.ndarray:
        """Return the vectors of images from their features, float32 ``[N, E]``.

        Raises:
            UsageError: the features have another shape.
        """
        features = _check_shape(features, (self.model.width,)).astype(np.float32, copy=False)
        return self.model.encode_images(ImageBatch(torch.from_numpy(features))).values.numpy()

    def similarity(self, images: np.ndarray | Tensor, texts: np.ndarray | Tensor) -> np.ndarray:
        """Return the scores ``[A, B]`` of vectors of images and texts, or two of a kind."""
        return compare_vectors(self.model, images, texts)


def _check_list(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise UsageError(f"texts is {texts!r}, expected a list, e.g. [{texts!r}]")


def _check_shape(features: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    features = np.asarray(features)
    if features.shape[1:] != shape:
        raise UsageError(f"features have shape {list(features.shape)}, expected {['N', *shape]}: extract them as for the model")
    return features
