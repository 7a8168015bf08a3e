"""Fonts of this machine for text of data in pictures, and what to install for scripts that none of them has."""

from __future__ import annotations

import os
import unicodedata
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_FOLDERS = (
    *("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts"),
    *("/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts"),
)
_EXTENSIONS = (".ttf", ".otf", ".ttc")
_STYLES = ("bold", "black", "light", "thin", "italic", "oblique", "mono", "serif")
_CJK = ("CJK", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH", "BOPOMOFO", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL")
"""The first words of names of characters that one font has."""


class FontWarning(UserWarning):
    """No font of this machine has the characters of a script."""


def font_files() -> list[str]:
    """Return the paths of the scalable fonts of this machine, plain ones first."""
    paths = [
        os.path.join(folder, name)  # noqa: PTH118
        for root in _FOLDERS
        for folder, _, names in os.walk(os.path.expanduser(root))  # noqa: PTH111 -- a user may have no home
        for name in names
        if name.lower().endswith(_EXTENSIONS)
    ]
    return sorted(paths, key=lambda path: (any(style in Path(path).name.lower() for style in _STYLES), path))


def warn_of_missing_glyphs(characters: Iterable[str]) -> None:
    """Warn once of each script of characters that no font has; the warning names the font to install."""
    for script in sorted({_script_of(character) for character in characters}):
        _warn(*script)


def _script_of(character: str) -> tuple[str, str, str]:
    """Return the name of a character's script, a font that has it, and Debian's package of that font."""
    word = unicodedata.name(character, "").partition(" ")[0]
    if word in _CJK:
        return "Chinese, Japanese or Korean", "Noto Sans CJK", "fonts-noto-cjk"
    if unicodedata.category(character)[0] in "LMN" and word:
        return word.title(), f"Noto Sans {word.title()}", "fonts-noto-core"
    return "symbols or emoji", "Symbola", "fonts-symbola"


@cache
def _warn(script: str, font: str, package: str) -> None:
    warnings.warn(
        f"text in pictures has {script} characters, which no font of this machine has, and which show as boxes: install "
        f"{font} (Debian and Ubuntu: apt install {package}) and draw again",
        FontWarning,
        stacklevel=3,
    )
