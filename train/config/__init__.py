"""Configurations: strict TOML sections and the presets."""

from train.config.presets import preset_names
from train.config.sections import (
    ArchitectureConfig,
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
    "ArchitectureConfig",
    "Config",
    "DataConfig",
    "LossConfig",
    "OptimizerConfig",
    "ScheduleConfig",
    "from_toml",
    "preset_names",
    "resolve",
    "to_toml",
]
