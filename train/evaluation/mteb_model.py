"""Runs and joint models as encoders of MTEB, the embedding benchmark.

Letters: ``A``, ``B`` and ``N`` texts or images, ``E`` embedding width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType

from schemas.errors import DatasetError, UsageError
from schemas.parameters import FeaturesParameters
from train.data.features import VECTORS
from train.evaluation.encoding import EncodingRun, JointModel
from train.evaluation.sentences import TextEncoder, sentence_language
from train.runs.checkpoints import weights_digest

_PAIRS_AT_ONCE = 256


class MtebModel:
    """Encoder of texts and images for MTEB, with the similarity of a run.

    A joint model has a `TextEncoder` in place of a run, and an extractor of its space.

    Texts are tokenized as the captions of the run. Their language is the name of the task's subset, if the run has that language,
    or else ``language``. Images need ``extractor``, an `extractors.Extractor` with the settings and weights of the run's features.

    Raises:
        UsageError: the run's model has no vectors, does not read text or does not know the language.
        DatasetError: the run was trained on features of another extractor, or the tower has another space.

    Examples:
        >>> model = imagepivot.mteb_model(imagepivot.open_run("runs/demo"))  # doctest: +SKIP
        >>> mteb.evaluate(model, mteb.get_tasks(tasks=["STSBenchmark"]))  # doctest: +SKIP
    """

    def __init__(
        self, run: EncodingRun | TextEncoder, extractor: Any = None, *, language: str = "", truecaser: str = ""
    ) -> None:
        self._extractor, self._language = extractor, language
        self._modalities: dict[PromptType | None, str] = {}
        self._encoder: EncodingRun | JointModel
        if not isinstance(run, EncodingRun):
            images = run.parameters if extractor is None else FeaturesParameters(extractor.spec, extractor.parameters)
            self._encoder = model = JointModel(run, images, place=images.feature.name)
            self._encode_text: Callable[..., np.ndarray] = model.encode_text
            name, digest = run.name, run.parameters.checkpoint or ""
        else:
            self._encoder, self._language = run, sentence_language(run, language)
            self._encode_text = partial(run.encode_text, truecaser=truecaser)
            name, digest = run.folder.location.rstrip("/").rpartition("/")[2], weights_digest(run.model.state_dict())
            if extractor is not None and extractor.fingerprint != run.fingerprints["extractor"]:
                raise DatasetError(
                    f"{run.folder.location!r} was trained on features of another extractor, or other settings or weights, than "
                    f"{extractor.spec.name!r}: load the extractor that imagepivot inspect shows for its features"
                )
        self._model = self._encoder.model
        self.mteb_model_meta = ModelMeta.create_empty(
            {
                "name": f"imagepivot/{name}",
                "revision": f"{digest[:16]}-{self._language}",  # mteb caches results by both.
                "embed_dim": self._model.width,
                "similarity_fn_name": ScoringFunction.CUSTOM,
                "framework": ["PyTorch"],
                "modalities": ["text"] if extractor is None else ["text", "image"],
            }
        )

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, hf_subset: str = "", prompt_type: PromptType | None = None, **_: Any
    ) -> np.ndarray:
        """Embed batches with a key ``text`` or ``image``; return float32 ``[N, E]``.

        Raises:
            UsageError: a batch has both keys, or images without an extractor.
        """
        language = hf_subset if hf_subset in self._model.languages else self._language
        if prompt_type is None:
            self._modalities.clear()
        parts = [np.zeros((0, self._model.width), np.float32)]
        for batch in inputs:
            if ("text" in batch) == ("image" in batch):
                raise UsageError("a run embeds a text or an image, not both at a time: choose tasks of one modality per input")
            self._modalities[prompt_type] = "text" if "text" in batch else "image"
            is_text = self._modalities[prompt_type] == "text"
            parts.append(self._encode_text(batch["text"], language=language) if is_text else self._embed_images(batch["image"]))
        return np.concatenate(parts)

    def similarity(self, a: Any, b: Any) -> torch.Tensor:
        """Return the run's scores ``[A, B]`` of embeddings of queries and documents."""
        modalities = [self._modalities.get(PromptType(name)) for name in ("query", "document")]
        if modalities == ["text", "image"]:  # The order similarity takes the image first.
            return torch.from_numpy(self._encoder.similarity(b, a).T)
        return torch.from_numpy(self._encoder.similarity(a, b))

    def similarity_pairwise(self, a: Any, b: Any) -> torch.Tensor:
        """Return the run's scores ``[N]`` of pairs of embeddings."""
        starts = range(0, len(a), _PAIRS_AT_ONCE)
        return torch.cat([self.similarity(a[n : n + _PAIRS_AT_ONCE], b[n : n + _PAIRS_AT_ONCE]).diagonal() for n in starts])

    def _embed_images(self, images: Sequence[Any]) -> np.ndarray:
        extractor = self._extractor
        if extractor is None:
            raise UsageError("the task has images: give mteb_model(run, extractor) the extractor of the run's features")
        columns = extractor.extract_columns(extractor.collate([extractor.preprocess(image.convert("RGB")) for image in images]))
        values, counts = columns[VECTORS[extractor.description.kind]], columns.get("num_regions")
        return self._encoder.encode_images(values, *(() if counts is None else (counts,)))
