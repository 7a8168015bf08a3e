"""Picture of ``imagepivot sts``: cosines beside human scores."""

from typing import Any

from schemas.drawing.charts import ONE_COLUMN, TINY, TWO_COLUMNS, new_figure, plain, save, style_of
from schemas.drawing.style import own_style
from schemas.escapes import short_names
from schemas.storage.folder import Folder
from train.sts.similarity import StsResult

_ACROSS = 4  # Panels side by side.
_TITLE = 24  # Characters above a panel and along its height.


@own_style()
def plot_sts(result: StsResult, folder: Folder, name: str) -> None:
    """Draw a panel for each system and data set, systems below each other.

    One data set is as wide as a column of a paper, several are as wide as two.

    Raises:
        DatasetError: the picture cannot be written.
    """
    across = min(_ACROSS, len(result.data))
    down = -(-len(result.data) // across)  # Lines of a system.
    width = TWO_COLUMNS if across > 1 else ONE_COLUMN
    figure, panels = new_figure(len(result.systems) * down, across, width=width, height=1.9, sharey=True)
    for panel in panels:
        panel.set_visible(False)
    names = short_names([system.name for system in result.systems])
    for row, system in enumerate(result.systems):
        style = style_of(row)
        for column, pairs in enumerate(result.data):
            panel, pearson = panels[row * across * down + column], system.correlations[column].pearson
            dots: dict[str, Any] = {"s": 5, "color": style.color, "marker": style.marker, "alpha": 0.35, "linewidths": 0}
            panel.scatter(pairs.scores, system.similarities[column], **dots)
            text = "r undefined" if pearson is None else f"r = {pearson / 100:.3f}"
            panel.set_title(f"{plain(_cut(pairs.name))}\nn = {len(pairs):,}, {text}", fontsize=TINY)
            panel.set(visible=True, xlabel="gold score")
            if column % across == 0:
                panel.set_ylabel(f"{plain(_cut(names[row]))}\ncosine")
    save(figure, folder, name)


def _cut(text: str) -> str:
    """Shorten a text at its beginning, since names differ at their ends."""
    return text if len(text) <= _TITLE else f"…{text[1 - _TITLE :]}"
