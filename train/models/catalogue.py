"""Registry of model kinds."""

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
"""Function from the section of a configuration and the dimensions of the data to a new model."""

_BUILDERS: dict[str, Builder] = {
    VseConfig.kind: JointEmbedding,
    MhaDConfig.kind: MhaD,
    ScanConfig.kind: Scan,
    DanConfig.kind: Dan,
    MlmmeConfig.kind: Mlmme,
}


def register_model(section: type[ModelConfig], builder: Builder) -> None:
    """Register a model kind, which configurations name as ``[model] kind = "..."``.

    A program that opens a run of this kind must register it, too. The command imports the module of
    ``--import``, or of an entry point of the group ``imagepivot.models``.

    Args:
        section: a frozen dataclass with the hyper-parameters; its ``kind`` is the name.
        builder: builds the model; usually its class.

    Raises:
        UsageError: the name belongs to another kind.
    """
    register_section(section)
    _BUILDERS[section.kind] = builder


def build_model(config: ModelConfig, dimensions: Dimensions, seed: int) -> RetrievalModel:
    """Build a model with seeded initial weights, equal on all devices.

    Raises:
        UsageError: the kind has no builder, or does not fit the data.
    """
    if config.kind not in _BUILDERS:
        raise UsageError(f"model kind {config.kind!r} has no builder: register it with imagepivot.register_model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _BUILDERS[config.kind](config, dimensions)
