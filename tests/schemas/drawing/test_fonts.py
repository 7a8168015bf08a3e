import warnings

import pytest
from matplotlib import font_manager

from schemas.drawing import fonts
from schemas.drawing.fonts import FontWarning, font_files, warn_of_missing_glyphs


@pytest.fixture(autouse=True)
def _no_earlier_warnings():
    fonts._warn_of_font.cache_clear()


@pytest.mark.parametrize(
    ("character", "script", "font", "package"),
    [
        ("猫", "Chinese, Japanese or Korean", "Noto Sans CJK", "fonts-noto-cjk"),
        ("한", "Chinese, Japanese or Korean", "Noto Sans CJK", "fonts-noto-cjk"),
        ("ع", "Arabic", "Noto Sans Arabic", "fonts-noto-core"),
        ("ह", "Devanagari", "Noto Sans Devanagari", "fonts-noto-core"),
        ("ก", "Thai", "Noto Sans Thai", "fonts-noto-core"),
        ("\U0001f9a9", "symbols or emoji", "Symbola", "fonts-symbola"),
        ("\ue000", "symbols or emoji", "Symbola", "fonts-symbola"),
    ],
)
def test_warn_of_missing_glyphs_names_script_font_and_package(character, script, font, package):
    words = rf"has {script} characters, .*: install {font} \(Debian and Ubuntu: apt install {package}\) and draw again"
    with pytest.warns(FontWarning, match=words):
        warn_of_missing_glyphs(character)


def test_warn_of_missing_glyphs_warns_once_of_each_script():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for text in ("猫狗한", "हिन्दी", "狗"):
            warn_of_missing_glyphs(text)
    assert [str(warning.message).split()[4] for warning in caught] == ["Chinese,", "Devanagari"]


def test_font_files_lists_plain_fonts_first(monkeypatch, tmp_path):
    for name in ("a/A-Bold.ttf", "a/B.OTF", "C-Regular.ttc", "D.txt", "ASerif.ttf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(font_manager, "X11FontDirectories", [str(tmp_path), str(tmp_path / "nowhere")])
    monkeypatch.setattr(font_manager, "_get_fontconfig_fonts", list)
    assert font_files() == [f"{tmp_path}/{name}" for name in ("C-Regular.ttc", "a/B.OTF", "ASerif.ttf", "a/A-Bold.ttf")]
