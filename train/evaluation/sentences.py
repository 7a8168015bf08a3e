"""Sentences as a run reads them: tokens, language and vectors.

Letters: ``S`` sentences, ``E`` embedding width.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters, TextRecipe
from train.data.batches import CaptionBatch
from train.evaluation.compatibility import check_reads_text, check_vectors
from train.evaluation.evaluation import Count, embed_captions, no_progress
from train.runs.run import Run

Tokenize = Callable[[str, str, TextRecipe | None, str], Sequence[str]]
"""Tokenizer: takes text, language, text recipe of the run's captions (None if unknown) and folder of truecasers."""

ENCODERS = ("open_clip:", "sentence:")


class TextEncoder(Protocol):
    """Pretrained text encoder, which callers load: this package imports none."""

    @property
    def name(self) -> str:
        """Name of the model in messages."""

    @property
    def parameters(self) -> FeaturesParameters:
        """Parameters of vectors of captions that it writes."""

    def encode(self, texts: Sequence[str], language: str) -> np.ndarray:
        """Encode sentences: float32 ``[S, E]``."""


LoadEncoder = Callable[[str, str], TextEncoder]
"""Loader of a text encoder by name, one with a prefix of `ENCODERS`, and device."""


def load_encoder(load: LoadEncoder | None, model: str, device: str) -> TextEncoder:
    """Load a text encoder; raise `UsageError` if the caller passes no loader."""
    if load is None:
        raise UsageError(f"{model!r} is a pretrained model: pass load=imagepivot.load_text_encoder")
    return load(model, device)


def embed_sentences(
    run: Run, sentences: Sequence[Sequence[str]], language: str, on_progress: Count = no_progress
) -> np.ndarray:
    """Return the vectors of tokenized sentences, float32 ``[S, E]``."""
    ids = [run.vocabulary.encode(tokens) for tokens in sentences]
    token_ids = np.fromiter((token for sentence_ids in ids for token in sentence_ids), np.int32)
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    batch = CaptionBatch(token_ids, offsets, np.arange(len(ids)))
    return embed_captions(run.model, batch, language, on_progress=on_progress).values.cpu().numpy()


def sentence_language(run: Run, language: str) -> str:
    """Return the language in which a run reads sentences, if it can embed them."""
    check_vectors(run)
    check_reads_text(run)
    known = run.model.languages
    chosen = language or ("en" if "en" in known else known[0] if len(known) == 1 else "")
    if chosen not in known:
        problem = f"--language is {language!r}" if language else "the language of the sentences is not given"
        raise UsageError(f"{problem}, but {run.folder.location!r} knows only {', '.join(known)}: give --language, one of these")
    return chosen
