"""Pictures on machines with settings of their own for matplotlib, or where it cannot draw."""

import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import font_manager
from PIL import Image

from pipelines.datasets.view import LabelledBox, draw_boxes
from schemas.drawing.charts import save
from schemas.errors import DatasetError, InputError
from schemas.storage.folder import Folder
from tests.train.runs.test_history import HISTORY
from train.jobs import FiguresJob
from train.reports import comparison, comparison_plot, figures
from train.runs import curves, log

HOSTILE = {"text.usetex": True, "font.size": 20.0, "savefig.dpi": 300, "savefig.bbox": "tight", "figure.facecolor": "black"}


@pytest.mark.slow
def test_pictures_do_not_follow_the_settings_of_the_user(toy, write_run, tmp_path):
    run = write_run()
    job = FiguresJob(run, str(tmp_path), toy.captions, toy.features, split="test", device="cpu")

    def draw(name: str) -> dict[str, bytes]:
        output = tmp_path / name
        figures.draw_figures(FiguresJob(**{**vars(job), "output": str(output)}))
        save(curves.plot_curves(HISTORY), Folder(str(output)), "curves.svg")
        comparison_plot.plot_comparison(comparison.compare_runs([run]), str(output))
        boxes = draw_boxes(Image.new("RGB", (300, 200)), [LabelledBox((10, 10, 90, 90), "a label")])
        files = {path.name: path.read_bytes() for path in output.iterdir() if path.suffix in (".png", ".svg", ".json")}
        return {**files, "boxes": np.asarray(boxes).tobytes()}

    expected = draw("plain")
    figure_files = {"retrieval.png", "map.png", "figures.json", "_made_from.json"}
    assert {*expected} == {*figure_files, "curves.svg", "comparison.png", "boxes"}
    with mpl.rc_context(HOSTILE):
        assert draw("hostile") == expected
        assert mpl.rcParams["font.size"] == 20.0  # Theirs again.


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["nonsense", "svg"])
def test_backend_of_the_host_is_left_to_it(backend):
    program = (
        "import os, train.runs.curves, matplotlib\nprint(os.environ['MPLBACKEND'], matplotlib.rcParams._get_backend_or_none())"
    )
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{backend} {'svg' if backend == 'svg' else None}\n", "")


def test_unreadable_settings_are_an_error_of_one_line(tmp_path):
    (tmp_path / "matplotlibrc").write_bytes(b"\xff")
    program = (
        "import schemas.errors\ntry: import schemas.drawing.style\nexcept schemas.errors.InputError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("matplotlib cannot read its configuration ('utf-8' codec can't decode byte 0xff")
    assert done.stdout.endswith("correct or move the file matplotlibrc\n")


def test_picture_with_a_damaged_font_is_an_error_of_one_line(monkeypatch, tmp_path):
    path = tmp_path / "font.ttf"
    path.write_bytes(Path(font_manager.findfont("DejaVu Sans")).read_bytes()[:1000])
    monkeypatch.setattr(font_manager.fontManager, "_find_fonts_by_props", lambda *arguments, **options: [str(path)])
    monkeypatch.setattr(font_manager.fontManager, "findfont", lambda *arguments, **options: str(path))
    monkeypatch.setattr(font_manager, "findfont", font_manager.fontManager.findfont)
    with pytest.raises(InputError, match=r"^matplotlib cannot draw the picture \(\w+: .*\): delete matplotlib's cache"):
        save(curves.plot_curves(HISTORY), Folder(str(tmp_path)), "curves.png")
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("error", [InputError("no font"), ImportError("no numpy"), DatasetError("the disk is full")])
def test_picture_that_cannot_be_drawn_does_not_end_a_training(error, monkeypatch, tmp_path):
    def draw(*_arguments: object) -> None:
        raise error

    remarks: list[str] = []
    monkeypatch.setattr(curves, "plot_curves", draw)
    monkeypatch.setattr(log, "remark", remarks.append)
    monkeypatch.setattr(log, "_FIRST_SECONDS", 0.0)
    with (
        pytest.raises(DatasetError, match="the disk is full")
        if isinstance(error, DatasetError)
        else pytest.MonkeyPatch.context(),
        log.RunLog(tmp_path, step=0, tensorboard=False, curves=True) as training,
    ):
        training.refresh()
        training.refresh()
    expected = f"training continues without curves.png, --resume draws it: {type(error).__name__}: {error}"
    assert remarks == ([] if isinstance(error, DatasetError) else [expected])
