"""The validation split during a training: recalls, and the losses that the training minimises.

Both come from the same encodings, so that the losses cost only the scores within their batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from train.config.sections import Config
from train.data.sampling import Batch, fixed_batches
from train.data.splits import TrainingData
from train.devices import upload
from train.evaluation.evaluating import EncodedSplit, encode_split, evaluate_encoded, evaluating
from train.evaluation.metrics import Retrieval
from train.losses import Term, Views, named_losses, per_query
from train.models.retrieval_model import RetrievalModel


@dataclass(frozen=True)
class Validation:
    """A measurement on the validation split.

    Attributes:
        retrieval: recalls and median ranks, by language.
        loss: the objective, per query; None if it was not measured.
        terms: the losses that it is the weighted sum of, by name, per query.
    """

    retrieval: Mapping[str, Retrieval]
    loss: float | None = None
    terms: Mapping[str, float] = field(default_factory=dict)


def validate(model: RetrievalModel, data: TrainingData, config: Config, terms: Sequence[Term]) -> Validation:
    """Measure a model on the validation split, in float32 and without changing it.

    The losses are those of `train.data.sampling`, with the hinges of the configuration also while ``loss.sum_warmup_steps``
    trains on others, so that the values of a run can be compared.

    Args:
        model: the model.
        data: the split.
        config: configuration of the run.
        terms: terms of its objective.
    """
    encoded = encode_split(model, data)
    retrieval = evaluate_encoded(model, data, encoded)
    batches = fixed_batches(data.captions, config.schedule, config.loss)
    if not batches:
        return Validation(retrieval)
    with evaluating(model) as device:
        losses = [(batch, *named_losses(terms, _views(encoded, batch, device), config.loss.hinges)) for batch in batches]
        return Validation(retrieval, *per_query(losses))


def _views(encoded: EncodedSplit, batch: Batch, device: torch.device) -> Views:
    numbers = upload(torch.from_numpy(batch.images).long(), device)
    captions = (encoded.captions[upload(torch.from_numpy(rows).long(), device)] for rows in batch.captions)
    images = None if batch.task == "c2c" else encoded.images[numbers]
    return Views(numbers, images, tuple(zip(batch.languages, captions, strict=True)))
