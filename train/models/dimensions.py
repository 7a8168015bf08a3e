"""What the data says about a model that is trained on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dimensions:
    """Languages and sizes; everything else about a model is in the section ``model`` of its configuration.

    Attributes:
        languages: the languages that the model reads, in its order.
        vocabulary_size: number of tokens in the joint vocabulary.
        feature_shape: shape of an image's features: ``[D]``, or ``[R, D]`` where an image has several.
        language_ids: the ids of the joint vocabulary that each language uses, ascending and with ``<unk>`` among them: only these
            get word vectors. A language without an entry gets all of them. Languages that share an encoder have the same ids.
        token_width: width of the given vectors of tokens that the model reads in place of words; 0 if it has words of its own.
    """

    languages: tuple[str, ...]
    vocabulary_size: int
    feature_shape: tuple[int, ...]
    language_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    token_width: int = 0

    def __post_init__(self) -> None:
        if not self.languages:
            raise ValueError("a model needs at least one language")
        for name, values in (("vocabulary_size", (self.vocabulary_size,)), ("feature_shape", self.feature_shape)):
            if min(values, default=0) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 1 or more")
