"""The datasets that belong together in one experiment, by their folders."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Corpus"]


@dataclass(frozen=True)
class Corpus:
    """Folders of the datasets that a model is trained on; nothing is opened here.

    Attributes:
        captions: folder of the encoded captions.
        features: folder of the image features.
        vocabulary: folder of the vocabulary that the captions were encoded with; empty where none is needed.
        word_vectors: folder of the pretrained word vectors that a model begins with; empty where it draws them.
        token_features: folder of the vectors of tokens that a model reads in place of words; empty where it does not.
    """

    captions: str
    features: str
    vocabulary: str = ""
    word_vectors: str = ""
    token_features: str = ""
