"""The presets: TOML files beside this module, one for each row of the papers' tables.

A name is the path within ``presets`` without extension, e.g. ``kadar2018/bilingual-c2c``. Files that begin with an underscore are
not presets, but what presets extend.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from schemas.errors import UsageError

__all__ = ["preset_names", "read_preset"]

_FOLDER = Path(__file__).parent.parent / "presets"


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    names = (path.relative_to(_FOLDER).with_suffix("").as_posix() for path in _FOLDER.rglob("[!_]*.toml"))
    return tuple(sorted(names))


def read_preset(name: str) -> str:
    """Text of a preset, or of a file that presets extend.

    Raises:
        UsageError: there is none of this name.
    """
    path = _FOLDER / f"{name}.toml"
    if ".." in Path(name).parts or not path.is_file():
        near = get_close_matches(name, preset_names(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "imagepivot train --list-presets lists them"
        raise UsageError(f"there is no preset {name!r}: {hint} A file of your own ends in .toml")
    return path.read_text(encoding="utf-8")
