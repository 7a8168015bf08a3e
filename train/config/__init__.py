"""Configurations: strict TOML sections and the presets."""

from train.config.models import DanConfig, MhaDConfig, MlmmeConfig, ModelConfig, VseConfig
from train.config.presets import preset_names
from train.config.sections import (
    Config,
    DataConfig,
    LossConfig,
    OptimizerConfig,
    ScheduleConfig,
    from_toml,
    resolve,
    to_toml,
)

__all__ = [
    "Config",
    "DanConfig",
    "DataConfig",
    "LossConfig",
    "MhaDConfig",
    "MlmmeConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "VseConfig",
    "from_toml",
    "preset_names",
    "resolve",
    "to_toml",
]
