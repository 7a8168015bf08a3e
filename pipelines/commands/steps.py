"""The commands as steps of a plan: keys, checked values, and the words of a command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipelines.commands import groups
from pipelines.commands.configuration import BEAM_FLAGS, convert, keys_of

__all__ = ["Commands"]


class Commands:
    """The commands, see `pipelines.plans.catalogue.CommandLine`."""

    def names(self, command: str) -> Mapping[str, str]:
        """Return the names of the parameters of a command by their keys."""
        return {key: name for key, (name, _) in keys_of(groups.commands()[command]).items()}

    def convert(self, command: str, table: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Check a table of options.

        Raises:
            UsageError: a key is unknown, or a value is of another type.
        """
        return convert(table, groups.commands()[command], place, command)

    def words(self, command: str, values: Mapping[str, Any]) -> list[str]:
        """Return the words of a command line: options, then arguments in their order, then the flags for Beam."""
        parameters = groups.commands()[command].params
        options = [word for one in parameters if one.param_type_name == "option" for word in _option(one, values.get(one.name))]
        arguments = [word for one in parameters if one.param_type_name == "argument" for word in _several(values.get(one.name))]
        flags = values.get(BEAM_FLAGS) or []
        return [command, *options, *arguments, *(("--", *flags) if flags else ())]

    def configuration(self, command: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return every value of the configuration of a training, as TOML; nothing for other commands."""
        if command != "train":
            return {}
        from train.commands.options import overrides_of
        from train.config.sections import resolve, to_toml

        overrides = overrides_of(values.get("settings"), values.get("max_steps"))
        section, found = "", {}
        for text in to_toml(resolve(values.get("config", ""), overrides)).splitlines():
            key, equals, value = text.partition(" = ")
            section = section if equals else text.strip("[]")
            if equals and section:  # Above the sections stands the description.
                found[f"{section}.{key}"] = value  # As text, so that the order of languages counts, too.
        return found


def _option(parameter: Any, value: Any) -> Iterator[str]:
    if value is None:
        return
    name = max(parameter.opts, key=len)
    if parameter.is_flag:
        yield from [name] if value else parameter.secondary_opts[:1]
        return
    for item in _several(value):
        yield f"{name}={item}"


def _several(value: Any) -> list[str]:
    if value is None:
        return []
    return [str(item) for item in value] if isinstance(value, (list, tuple)) else [str(value)]
