"""Models whose captions are read by `SentenceEncoders`.

Letters in shapes: ``N`` captions, ``T`` tokens, ``H`` width of a state, ``E`` width of an embedding.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from train.data.batches import CaptionBatch
from train.models.encoders import SentenceEncoders
from train.models.retrieval_model import Encoded, RetrievalModel


class ReadingModel(RetrievalModel):
    """A model that reads captions, and then makes of the states of the reader what it compares.

    Attributes:
        sentences: words and reader of each language.
    """

    sentences: SentenceEncoders

    def read_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Return the states of the reader, ``[N, T, H]``, or ``[N, H]`` where there is only the last one.

        Raises:
            ValueError: the model does not read the language.
        """
        return self.sentences.of(language).states(captions)

    @abstractmethod
    def encode_read(self, read: Encoded, language: str) -> Encoded:
        """Encode captions in one language from their states, in their order."""

    def encode_captions(self, captions: CaptionBatch, language: str) -> Encoded:
        """Encode captions in one language, in their order.

        Raises:
            ValueError: the model does not read the language.
        """
        return self.encode_read(self.read_captions(captions, language), language)

    def modules_by_language(self) -> Mapping[str, Sequence[str]]:
        """Return the languages of each sentence encoder."""
        return self.sentences.by_language("sentences")
