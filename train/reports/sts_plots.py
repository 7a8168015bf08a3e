"""Semantic textual similarity as a picture: the cosine of each pair over the score that people gave it."""

from __future__ import annotations

from schemas.storage import Folder
from train.evaluation.sts import StsResult
from train.runs.plotting import GREY, SMALL, TINY, new_figure, plain, save, style_of

__all__ = ["plot_sts"]

_NAME = "sts.png"
_LONGEST = 34  # Characters that fit along the height of a panel.


def plot_sts(result: StsResult, output: str) -> str:
    """Draw ``sts.png`` into a folder: a row of panels for each system, with a panel for each data set.

    Returns:
        Location of the picture.

    Raises:
        DatasetError: the picture cannot be written.
    """
    across = len(result.data)
    figure, panels = new_figure(
        len(result.systems), across, width=max(3.6, 2.4 * across), height=2.3, sharex="col", sharey="row"
    )
    for row, system in enumerate(result.systems):
        style = style_of(row)
        for column, pairs in enumerate(result.data):
            panel, found = panels[row * across + column], system.correlations[column]
            panel.scatter(
                *(pairs.scores, system.similarities[column]),
                s=7,
                color=style.color,
                marker=style.marker,
                alpha=0.35,
                linewidths=0,
            )
            text = "r undefined" if found.pearson is None else f"r = {found.pearson / 100:.3f}"
            panel.text(0.97, 0.04, text, ha="right", transform=panel.transAxes, fontsize=SMALL)
            if row == 0:
                panel.set_title(plain(f"{pairs.name}, {len(pairs):,} pairs"), fontsize=SMALL)
            if row == len(result.systems) - 1:
                panel.set_xlabel("score of the people")
        name = system.name if len(system.name) <= _LONGEST else f"…{system.name[1 - _LONGEST :]}"
        panels[row * across].set_ylabel("cosine")
        panels[row * across].annotate(
            plain(name),
            (0, 0.5),
            (-34, 0),
            "axes fraction",
            "offset points",
            rotation=90,
            va="center",
            ha="right",
            fontsize=TINY,
            color=GREY,
        )
    folder = Folder(output)
    save(figure, folder, _NAME)
    return folder.path_of(_NAME)
