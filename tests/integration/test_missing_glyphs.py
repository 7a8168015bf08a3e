"""Text in scripts that the fonts of pictures lack: another font of the machine draws it, or one line names the font to install."""

import warnings
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from pipelines.datasets.view import LabelledBox, draw_boxes
from schemas.drawing import charts, fonts
from schemas.drawing.fonts import FontWarning
from schemas.storage.folder import Folder

SHIPPED = Path(mpl.get_data_path(), "fonts", "ttf")
STIX = str(SHIPPED / "STIXNonUni.ttf")
OF_STIX = "\ue153"  # Private characters of STIX, which DejaVu has not.


@pytest.fixture(autouse=True)
def _no_earlier_warnings():
    fonts._warn_of_font.cache_clear()


def draw(folder: Path, text: str, name: str = "a.png") -> bytes:
    """Draw a text, also as the label of a tick."""
    figure = Figure(figsize=(3, 2))
    figure.subplots().set_xticks([0, 1], [text, "b"])
    figure.text(0.1, 0.5, text)
    charts.save(figure, Folder(str(folder)), name)
    return (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.pdf"])
def test_figures_warn_once_per_script(name, monkeypatch, tmp_path):
    monkeypatch.setattr(fonts, "font_files", list)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        draw(tmp_path, "a 猫 狗 हिन्दी عربي", name)
    assert {warning.category for warning in caught} == {FontWarning}
    assert ["Chinese" in str(w.message) for w in caught] == [True, False]
    assert ["Noto Sans Devanagari" in str(w.message) for w in caught] == [False, True]


def test_figures_use_another_font_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(fonts, "font_files", list)
    with pytest.warns(FontWarning, match="which no font of this machine has"):
        boxes = draw(tmp_path, OF_STIX)
    monkeypatch.setattr(fonts, "font_files", lambda: [__file__, STIX])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw(tmp_path, OF_STIX) != boxes
        draw(tmp_path, "a é я")


def test_labels_use_another_font_of_the_machine(monkeypatch):
    def drawn(label: str, files: list[str]) -> np.ndarray:
        monkeypatch.setattr(fonts, "font_files", lambda: files)
        return np.asarray(draw_boxes(Image.new("RGB", (800, 100)), [LabelledBox((10, 10, 500, 90), label)]))

    with pytest.warns(FontWarning, match="which no font of this machine has"):
        boxes = drawn(OF_STIX, [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (drawn(OF_STIX, [__file__, STIX]) != boxes).any()
        assert (drawn("plain 0.93", [STIX]) == drawn("plain 0.93", [])).all()
