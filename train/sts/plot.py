"""Picture of ``imagepivot sts``: cosines beside human scores."""

from __future__ import annotations

from typing import Any

from schemas.drawing.charts import GREY, SMALL, TINY, new_figure, plain, save, style_of
from schemas.drawing.style import own_style
from schemas.storage.folder import Folder
from train.sts.similarity import StsResult

_TITLE, _LABEL = 17, 32  # Maximum characters above a panel and along its height.


@own_style()
def plot_sts(result: StsResult, output: str) -> str:
    """Draw ``sts.png`` into a folder, by system (rows) and data set (columns).

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
            panel, pearson = panels[row * across + column], system.correlations[column].pearson
            dots: dict[str, Any] = {"s": 7, "color": style.color, "marker": style.marker, "alpha": 0.35, "linewidths": 0}
            panel.scatter(pairs.scores, system.similarities[column], **dots)
            text = "r undefined" if pearson is None else f"r = {pearson / 100:.3f}"
            panel.set_title(f"n = {len(pairs):,}, {text}", loc="right", fontsize=TINY, color=GREY)
            if row == 0:
                panel.set_title(plain(_cut(pairs.name, _TITLE)), loc="left", fontsize=SMALL)
        panels[row * across].set_ylabel(f"{plain(_cut(system.name, _LABEL))}\ncosine")
    for panel in panels[-across:]:
        panel.set_xlabel("gold score")
    folder = Folder(output)
    save(figure, folder, "sts.png")
    return folder.path_of("sts.png")


def _cut(text: str, length: int) -> str:
    """Shorten a text at its beginning, since paths differ at their ends."""
    return text if len(text) <= length else f"…{text[1 - length :]}"
