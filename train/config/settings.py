"""The settings of a configuration by dotted key, whatever its kind of model: for tables and displays, not for training."""

from __future__ import annotations

from typing import Any

from schemas.conversion import parse_toml


def settings_of(text: str) -> dict[str, Any]:
    """Return the settings in a configuration, without its description.

    Args:
        text: TOML, as `train.config.to_toml` writes it.

    Returns:
        Plain values by dotted key, such as ``optimizer.learning_rate``, in the order of the text.

    Raises:
        UsageError: the text is not TOML.
    """
    table = parse_toml(text)
    table.pop("description", None)
    found: dict[str, Any] = {}
    for section, values in table.items():
        if isinstance(values, dict):
            found |= {f"{section}.{key}": value for key, value in values.items()}
        else:
            found[section] = values
    return found
