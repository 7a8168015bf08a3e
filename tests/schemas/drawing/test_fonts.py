import pytest

from schemas.drawing import fonts
from schemas.drawing.fonts import FontWarning, warn_of_missing_glyphs


@pytest.fixture(autouse=True)
def _no_earlier_warnings():
    fonts._warn_of_font.cache_clear()


@pytest.mark.parametrize(
    ("character", "script", "font", "package"),
    [
        ("猫", "Chinese, Japanese or Korean", "Noto Sans CJK", "fonts-noto-cjk"),
        ("ह", "Devanagari", "Noto Sans Devanagari", "fonts-noto-core"),
        ("\ue000", "symbols or emoji", "Symbola", "fonts-symbola"),
    ],
)
def test_warn_of_missing_glyphs_names_script_font_and_package(character, script, font, package):
    words = rf"has {script} characters, .*: install {font} \(Debian and Ubuntu: apt install {package}\) and draw again"
    with pytest.warns(FontWarning, match=words):
        warn_of_missing_glyphs(character)
