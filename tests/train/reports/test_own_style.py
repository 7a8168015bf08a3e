"""Pictures on machines with settings of their own for matplotlib, or where it cannot draw."""

import matplotlib as mpl
import numpy as np
import pytest
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
