"""What a checkpoint holds, put back into models, optimizers and samplers, after checking that it fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from train.config.models import ModelConfig
from train.models.catalogue import build_model
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import Checkpoint, damaged

_LISTED = 3
_PER_PARAMETER = ("exp_avg", "exp_avg_sq")
_WRONG = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)


class _Restorable(Protocol):
    def restore(self, state: Mapping[str, Any]) -> None: ...


def stored_model(config: ModelConfig, checkpoint: Checkpoint, source: str) -> RetrievalModel:
    """Build the model of a checkpoint, with its weights.

    Args:
        config: the section ``model`` of its configuration.
        checkpoint: the checkpoint.
        source: its file, for messages.

    Raises:
        DatasetError: its weights are not those of such a model, or are not finite.
    """
    size = checkpoint.dimensions.vocabulary_size
    if size != len(checkpoint.tokens):
        raise damaged(source, f"the model has {size:,} tokens, the vocabulary {len(checkpoint.tokens):,}")
    try:
        model = build_model(config, checkpoint.dimensions, checkpoint.seed)
    except (*_WRONG, UsageError, MemoryError) as error:
        raise damaged(source, "no model has its dimensions") from error
    restore_model(model, checkpoint.model, source)
    return model


def restore_model(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Put weights into a model.

    Raises:
        DatasetError: names, shapes or types are not those of the model, or values are not finite.
    """
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    for name, values in state.items():
        if name in expected and (values.shape, values.dtype) != (expected[name].shape, expected[name].dtype):
            problems.append(f"{name} is {_kind(values)}, expected {_kind(expected[name])}")
        elif not torch.isfinite(values).all():
            problems.append(f"{name} holds values that are not finite")
    if problems:
        raise damaged(source, "; ".join(problems[:_LISTED]))
    model.load_state_dict(state)


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], source: str) -> None:
    """Put the state of Adam back into a new optimizer.

    Raises:
        DatasetError: the state is not that of an optimizer of these parameters, or is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for number, values in state["state"].items():
            for name in _PER_PARAMETER:
                if values[name].shape != parameters[number].shape or not torch.isfinite(values[name]).all():
                    raise ValueError(f"{name} of parameter {number} is {_kind(values[name])} or not finite")
            if not float(values["step"]) >= 0:
                raise ValueError(f"step of parameter {number} is {values['step']!r}")
        optimizer.load_state_dict(dict(state))
    except _WRONG as error:
        raise damaged(source, f"the state of its optimizer does not fit the model: {error}") from error


def restore_sampler(sampler: _Restorable, state: Mapping[str, Any], source: str) -> None:
    """Put a sampler back to its position.

    Raises:
        DatasetError: the state is not that of such a sampler.
    """
    try:
        sampler.restore(state)
    except _WRONG as error:
        raise damaged(source, f"the state of its sampler does not fit the data: {type(error).__name__}: {error}") from error


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
