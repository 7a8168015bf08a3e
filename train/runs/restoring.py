"""Model, optimizer and sampler from the content of a checkpoint, with checks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from schemas.errors import UsageError
from train.config.models import ModelConfig
from train.models.catalogue import build_model
from train.models.retrieval_model import RetrievalModel
from train.runs.checkpoints import Checkpoint, unusable

MAX_PROBLEMS = 3
_PER_PARAMETER = ("exp_avg", "exp_avg_sq")
_MISMATCH_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)


def stored_model(config: ModelConfig, checkpoint: Checkpoint, source: str) -> RetrievalModel:
    """Build the model of a checkpoint, with its weights.

    Raises:
        DatasetError: the weights do not fit the configuration, or are not finite.
    """
    size = checkpoint.dimensions.vocabulary_size
    if size != len(checkpoint.tokens):
        raise unusable(source, f"the model has {size:,} tokens, the vocabulary {len(checkpoint.tokens):,}")
    try:
        model = build_model(config, checkpoint.dimensions, checkpoint.seed)
    except (*_MISMATCH_ERRORS, UsageError, MemoryError) as error:
        raise unusable(source, "no model has its dimensions") from error
    restore_model(model, checkpoint.model, source)
    return model


def restore_model(model: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a model.

    Raises:
        DatasetError: names, shapes or types differ from the model's, or values are not finite.
    """
    if problems := weight_problems(model, state):
        raise unusable(source, "; ".join(problems[:MAX_PROBLEMS]))
    model.load_state_dict(state)


def weight_problems(model: nn.Module, state: Mapping[str, Tensor]) -> list[str]:
    """Return reasons why a model cannot load weights: names, shapes, types or values."""
    expected = model.state_dict()
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} is unknown" for name in state if name not in expected]
    for name, values in state.items():
        if name in expected and (values.shape, values.dtype) != (expected[name].shape, expected[name].dtype):
            problems.append(f"{name} is {_dtype_and_shape(values)}, expected {_dtype_and_shape(expected[name])}")
        elif not torch.isfinite(values).all():
            problems.append(f"{name} holds values that are not finite")
    return problems


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], source: str) -> None:
    """Load the state of Adam into a new optimizer.

    Raises:
        DatasetError: the state does not fit the parameters, or is not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for index, values in state["state"].items():
            for name in _PER_PARAMETER:
                if values[name].shape != parameters[index].shape or not torch.isfinite(values[name]).all():
                    raise ValueError(f"{name} of parameter {index} is {_dtype_and_shape(values[name])} or not finite")
            if not float(values["step"]) >= 0:
                raise ValueError(f"step of parameter {index} is {values['step']!r}")
        optimizer.load_state_dict(dict(state))
    except _MISMATCH_ERRORS as error:
        raise unusable(source, f"the state of its optimizer does not fit the model: {error}") from error


def restore_sampler(restore: Callable[[Mapping[str, Any]], None], position: Mapping[str, Any], source: str) -> None:
    """Restore the position of a sampler with its function ``restore``.

    Raises:
        DatasetError: the position does not fit the sampler.
    """
    try:
        restore(position)
    except _MISMATCH_ERRORS as error:
        raise unusable(source, f"the position of its sampler does not fit the data: {type(error).__name__}: {error}") from error


def _dtype_and_shape(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
