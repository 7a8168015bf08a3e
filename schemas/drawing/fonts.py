"""Font fallback for matplotlib: system fonts for missing glyphs."""

from __future__ import annotations

import errno
import re
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from schemas.errors import InputError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

_STYLES = ("bold", "black", "light", "thin", "italic", "oblique", "mono", "serif")
_CJK = ("CJK", "IDEOGRAPHIC", "FULLWIDTH", "HALFWIDTH", "BOPOMOFO", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HANGUL")
"""The first words of names of characters that one font has."""

_MISSING = re.compile(r"Glyph (\d+) .*missing from")


class FontWarning(UserWarning):
    """No font of this machine has the characters of a script."""


def font_files() -> list[str]:
    """Return the paths of the scalable fonts of this machine, plain ones first."""
    from matplotlib.font_manager import findSystemFonts

    return sorted(findSystemFonts(), key=lambda path: (any(style in Path(path).name.lower() for style in _STYLES), path))


def draw_with_fonts(figure: Figure, draw: Callable[[], T]) -> T:
    """Draw a matplotlib figure with fallback to system fonts; warn of missing glyphs.

    Raises:
        InputError: matplotlib or a font of this machine is broken.
    """
    drawing, missing = _draw(draw)
    if missing and (families := _families_of(missing)):
        from matplotlib.text import Text

        for text in figure.findobj(Text):
            text.set_fontfamily([*text.get_fontfamily(), *families])
        drawing, missing = _draw(draw)
    warn_of_missing_glyphs(missing)
    return drawing


def _draw(draw: Callable[[], T]) -> tuple[T, set[str]]:
    """Return a drawing, and the characters that matplotlib reports as missing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", _MISSING.pattern)
        try:
            drawing = draw()
        except (OSError, RuntimeError, ValueError) as error:
            if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # The disk of the picture itself is full.
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            advice = "delete matplotlib's cache (~/.cache/matplotlib), or install matplotlib again"
            raise InputError(f"matplotlib cannot draw the picture ({reason}): {advice}") from error
    missing = set()
    for warning in caught:
        if match := _MISSING.match(str(warning.message)):
            missing.add(chr(int(match[1])))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return drawing, missing


def _families_of(characters: Collection[str]) -> list[str]:
    """Return font families with these characters."""
    from matplotlib.font_manager import fontManager
    from matplotlib.ft2font import FT2Font

    remaining, families = set(characters), []
    for path in font_files():
        try:
            font = FT2Font(path)
        except (OSError, RuntimeError):
            continue
        present = {character for character in remaining if font.scalable and font.get_char_index(ord(character))}
        if present:
            fontManager.addfont(path)
            families.append(font.family_name)
            remaining -= present
        if not remaining:
            break
    return families


def warn_of_missing_glyphs(characters: Iterable[str]) -> None:
    """Warn once of each script without a font."""
    for script in sorted({_script_of(character) for character in characters}):
        _warn_of_font(*script)


def _script_of(character: str) -> tuple[str, str, str]:
    """Return a character's script, a font that has it, and its Debian package."""
    word = unicodedata.name(character, "").partition(" ")[0]
    if word in _CJK:
        return "Chinese, Japanese or Korean", "Noto Sans CJK", "fonts-noto-cjk"
    if unicodedata.category(character)[0] in "LMN" and word:
        return word.title(), f"Noto Sans {word.title()}", "fonts-noto-core"
    return "symbols or emoji", "Symbola", "fonts-symbola"


@cache
def _warn_of_font(script: str, font: str, package: str) -> None:
    warnings.warn(
        f"text in pictures has {script} characters, which no font of this machine has, and which show as "
        f"boxes: install {font} (Debian and Ubuntu: apt install {package}) and draw again",
        FontWarning,
        stacklevel=3,
    )
