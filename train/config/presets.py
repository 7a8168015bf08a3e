"""Presets in ``train/presets``, and the key ``extends`` of configurations.

The name of a preset is its path in the folder without extension, e.g. ``kadar2018/bilingual-c2c``. Files with
a leading underscore are bases of presets. Other files are named by their path.
"""

import os
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from schemas.conversion import parse_toml
from schemas.errors import InputError, UsageError
from schemas.storage.locations import local_path
from schemas.text import read_text
from train.config.models import VseConfig

_FOLDER = Path(__file__).parent.parent / "presets"


def list_presets() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    names = (path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("[!_]*.toml"))
    return tuple(sorted(names))


def read_config_table(source: str, folder: Path = Path(), chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a configuration as a table, merged with those that it ``extends``.

    The source is a preset, or the path of a TOML file, relative to ``folder``. ``chain`` lists configurations that extend it.

    Raises:
        UsageError: the preset or file, or one that it extends, is missing or not TOML; or they extend each other.
    """
    by = f"{chain[-1]} extends {source!r}, but " if chain else ""
    if not source.endswith(".toml"):
        preset = _FOLDER / f"{source}.toml"
        if ".." in Path(source).parts or not os.path.isfile(preset):  # noqa: PTH113 -- also false for invalid paths
            matches = get_close_matches(source, list_presets(), n=3)
            hint = f"did you mean {', '.join(matches)}?" if matches else "imagepivot train --list-presets lists them."
            raise UsageError(f"{by}there is no preset {source!r}: {hint} A file of your own ends in .toml")
        return parse_table(preset.read_text(encoding="utf-8"), (*chain, source))
    path = Path(os.path.normpath(folder / local_path(source)))
    if not os.path.isfile(path):  # noqa: PTH113 -- also false for invalid paths
        advice = "a path starts at the folder of the file that names it" if chain else "check the path"
        raise UsageError(
            f"{by}there is no file {str(path) if chain else source!r}: {advice}, or give the name of a preset (--list-presets)"
        )
    try:
        text = read_text(path)
    except InputError as error:
        raise UsageError(str(error)) from error
    return parse_table(text, (*chain, str(path)), path.parent)


def parse_table(text: str, chain: tuple[str, ...], folder: Path = Path()) -> dict[str, Any]:
    """Parse a configuration, and add the keys of the one that it ``extends``."""
    if chain[-1] in chain[:-1]:
        raise UsageError(f"{chain[0]}: extends goes round in a circle: {' -> '.join(chain)}. Take one of them out")
    try:
        table = parse_toml(text)
        name = table.pop("extends", None)
        if not isinstance(name, (str, type(None))):
            raise UsageError(f"extends is {name!r}, expected the name of a preset, or the path of a file that ends in .toml")
    except UsageError as error:
        raise UsageError(f"{chain[-1]}: {error}") from error
    if name is None:
        return table
    base = read_config_table(name, folder, chain)
    for key, value in table.items():
        section = base.get(key)
        if isinstance(section, dict) and isinstance(value, dict):
            kind = section.get("kind", VseConfig.kind)  # Keys of another kind of model are not inherited.
            base[key] = {**section, **value} if value.get("kind", kind) == kind else value
        else:
            base[key] = value
    return base
