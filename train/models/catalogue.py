"""The kinds of models: what is built from the section ``model`` of a configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from schemas.errors import UsageError
from train.config.models import DanConfig, MhaDConfig, MlmmeConfig, ModelConfig, ScanConfig, VseConfig, register_section
from train.models.dan import Dan
from train.models.mha_d import MhaD
from train.models.mlmme import Mlmme
from train.models.retrieval_model import Dimensions, RetrievalModel
from train.models.scan import Scan
from train.models.vse import JointEmbedding

Builder = Callable[[Any, Dimensions], RetrievalModel]
"""From the section of a configuration and the dimensions of the data to a new model."""

_BUILDERS: dict[str, Builder] = {
    VseConfig.kind: JointEmbedding,
    MhaDConfig.kind: MhaD,
    ScanConfig.kind: Scan,
    DanConfig.kind: Dan,
    MlmmeConfig.kind: Mlmme,
}


def register_model(section: type[ModelConfig], builder: Builder) -> None:
    """Add a kind of model, which configurations then name as ``[model] kind = "..."``.

    A run is opened by the same name, so that a program which uses it has to register the kind, too. A distribution that names the
    module which does so as an entry point of the group ``imagepivot.models`` makes the command know the kind.

    Args:
        section: a frozen dataclass with the choices of the model; its ``kind`` is the name.
        builder: makes the model, mostly its class.

    Raises:
        UsageError: there is another kind of this name.
    """
    register_section(section)
    _BUILDERS[section.kind] = builder


def build_model(config: ModelConfig, dimensions: Dimensions, seed: int) -> RetrievalModel:
    """Build a model with the initial weights of a seed, the same on every device; torch's global generator stays untouched.

    Raises:
        UsageError: the model cannot be built for such data.
    """
    if config.kind not in _BUILDERS:
        raise UsageError(f"nothing builds models of the kind {config.kind!r}: register them with imagepivot.register_model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[config.kind](config, dimensions)
