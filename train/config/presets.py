"""The presets: TOML files in ``train/presets``, one for each row of the papers' tables.

The name of a preset is its path in that folder without extension, e.g. ``kadar2018/bilingual-c2c``. Files that begin with an
underscore are not presets; presets extend them.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from schemas.errors import UsageError

_FOLDER = Path(__file__).parent.parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    names = (path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("[!_]*.toml"))
    return tuple(sorted(names))


def read_preset(name: str) -> str:
    """Return the text of a preset, or of a file that presets extend.

    Raises:
        UsageError: there is none with this name.
    """
    path = _FOLDER / f"{name}.toml"
    if ".." in Path(name).parts or not os.path.isfile(path):  # noqa: PTH113 -- false, too, where no file can be
        matches = get_close_matches(name, preset_names(), n=3)
        hint = f"did you mean {', '.join(matches)}?" if matches else "imagepivot train --list-presets lists them."
        raise UsageError(f"there is no preset {name!r}: {hint} A file of your own ends in .toml")
    return path.read_text(encoding="utf-8")
