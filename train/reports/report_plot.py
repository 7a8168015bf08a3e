"""Picture of ``imagepivot reproduce``: measured beside published recalls."""

from itertools import product
from pathlib import Path

from schemas.drawing.charts import SMALL, TINY, TWO_COLUMNS, save, style_of
from schemas.drawing.style import Figure, own_style
from schemas.storage.folder import Folder
from train.reports.reproduce_report import PaperReport

_COLOURS = {"image_to_text": style_of(0).color, "text_to_image": style_of(1).color}
_MEASURE = "recall_at_10"


@own_style()
def plot_report(report: PaperReport, path: Path) -> None:
    """Draw a panel for each table: dots are measured, rings are published."""
    heights = [len(section.lines) + 2 for section in report.sections]
    figure = Figure(figsize=(TWO_COLUMNS, 0.2 * sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(report.sections), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for section, panel in zip(report.sections, panels, strict=True):
        panel.set_title(section.title, loc="left", fontsize=SMALL)
        panel.set_yticks(range(len(section.lines)), [f"{line.row.name}, {line.row.language}" for line in section.lines])
        panel.tick_params(labelsize=TINY)
        panel.set_ylim(len(section.lines) - 0.4, -0.6)
        panel.grid(axis="x", alpha=0.3)
        for (height, line), (direction, colour) in product(enumerate(section.lines), _COLOURS.items()):
            cell = line.cells[direction, _MEASURE]
            if cell.published is not None:
                panel.plot(cell.published, height, marker="o", markersize=5, mfc="none", color=colour)
            if cell.chance is not None:
                panel.plot(cell.chance, height, marker="x", markersize=4, color=colour)
            if cell.mean is not None and (direction, _MEASURE) in section.columns:
                panel.errorbar(cell.mean, height, xerr=cell.deviation or 0.0, marker="o", markersize=3, color=colour, capsize=2)
    legend = "R@10, percent: ● measured, ○ published, × chance\nblue: image to text, orange: text to image"
    panels[-1].set_xlabel(legend, fontsize=SMALL)
    figure.suptitle(f"{report.paper}: measured beside published", fontsize=SMALL, fontweight="bold")
    save(figure, Folder(str(path.parent)), path.name)
