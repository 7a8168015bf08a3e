"""Attention figures: boxes of regions over the picture, and heat maps.

Weights show in the width of a box and the darkness of a cell, also in grey print. Each panel has its own scale, named in its title.
It ends at the maximum weight or three times the uniform weight, whichever is greater: uniform attention is pale.

Letters: ``K`` heads, ``R`` regions, ``T`` tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch

from schemas.dataset import Dataset
from schemas.drawing.charts import SMALL, TINY, TWO_COLUMNS, place_labels, plain, save, settle
from schemas.drawing.style import Axes, Figure, Rectangle, Text, own_style, patheffects
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import Folder
from train.data.features import feature_spec
from train.data.splits import SplitData
from train.evaluation.evaluation import eval_mode
from train.models.retrieval_model import ImageBatch
from train.reports.figure_examples import Example, ShownCaption, SizedPixels
from train.reports.rankings import draw_picture
from train.runs.run import Run


@dataclass(frozen=True)
class AttendedCaption:
    """Attention to a caption, or between a caption and its image.

    Attributes:
        words: weights of tokens by head, ``[K, T]``; None for models without heads over words.
        pairs: weights between tokens and regions, ``[T, R]``; None for models with heads.
        words_attend: whether words attend to regions in ``pairs``, rather than regions to words.
    """

    caption: ShownCaption
    words: np.ndarray | None
    pairs: np.ndarray | None
    words_attend: bool = True


@dataclass(frozen=True)
class AttendedImage:
    """Attention to an image and its captions.

    Attributes:
        boxes: corners of the regions in pixels, x1, y1, x2, y2, ``[R, 4]``; None for features without boxes.
        size_wh: width and height in pixels; None if unknown.
        regions: weights of regions by head, ``[K, R]``; None for models without heads over regions.
        grid_hw: rows and columns of grid features; None for others.
    """

    number: int
    image_id: str
    boxes: np.ndarray | None
    size_wh: tuple[int, int] | None
    regions: np.ndarray | None
    captions: tuple[AttendedCaption, ...]
    grid_hw: tuple[int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "example": self.number,
            "image_id": self.image_id,
            "boxes": _rounded(self.boxes),
            "grid": None if self.grid_hw is None else list(self.grid_hw),
            "regions": _rounded(self.regions),
            "captions": [
                {**shown.caption.to_dict(), "tokens": list(shown.caption.tokens)}
                | {"words": _rounded(shown.words), "pairs": _rounded(shown.pairs), "words_attend": shown.words_attend}
                for shown in self.captions
            ],
        }


def attend(run: Run, data: SplitData, features: Dataset, example: Example) -> AttendedImage:
    """Compute the attention of a run's model to an example.

    Raises:
        UsageError: the model has no attention.
    """
    regions, captions = None, []
    with eval_mode(run.model) as device:
        images = ImageBatch.of(data.features, np.array([example.image]), device)
        for caption in example.captions:
            batch = data.captions.batch(np.array([caption.row]))
            weights = run.model.attention_weights(images, batch, caption.key.language)
            if weights is None or all(part is None for part in (weights.regions, weights.words, weights.pairs)):
                raise UsageError(
                    f"{run.folder.location!r} holds a model of the kind {run.config.model.kind!r}, which "
                    "attends to neither regions nor words: there is no attention to draw"
                )
            regions = _to_numpy(weights.regions)
            captions.append(AttendedCaption(caption, _to_numpy(weights.words), _to_numpy(weights.pairs), weights.words_attend))
    boxes = size_wh = None
    if features.kind == "regions":
        row: dict[str, Any] = features.get(example.image_id)
        boxes = row["boxes"][: row["num_regions"]]
        size_wh = (row["width"], row["height"]) if row["width"] and row["height"] else None
    return AttendedImage(example.number, example.image_id, boxes, size_wh, regions, tuple(captions), grid_of(features))


def grid_of(features: Dataset) -> tuple[int, int] | None:
    """Return rows and columns of grid features; None for others."""
    grid = (FeaturesParameters.from_json(features.manifest.parameters).extractor or {}).get("grid")
    shape = feature_spec(features).shape
    if not isinstance(grid, list) or len(shape) != 2 or len(grid) != 2:
        return None
    rows, columns = grid
    return (rows, columns) if rows * columns == shape[0] else None


def _to_numpy(weights: torch.Tensor | None) -> np.ndarray | None:
    return None if weights is None else weights.float().cpu().numpy()


def _rounded(values: np.ndarray | None) -> list[Any] | None:
    return None if values is None else np.asarray(values, float).round(6).tolist()


def strongest(weights: Sequence[float] | np.ndarray, count: int) -> list[int]:
    """Return the indices of the greatest weights, by a stable descending sort."""
    return np.argsort(-np.asarray(weights), kind="stable")[:count].tolist()


BOXES = 8
"""Number of regions with the greatest weights that are drawn over a picture."""

_ACROSS = 3  # Pictures in a row.
_LABELLED_BOXES = 3  # Per head.
_COLOUR = "#D55E00"
_MAX_COLUMNS_WITH_VALUES = 26
_Labels: TypeAlias = tuple[Axes, Sequence[tuple[Text, np.ndarray]]]  # Of a panel, each with the corners of its box.
_MAX_TICKS = 20  # Below a heat map; of more cells the first, the fifth and so on have ticks.


@own_style()
def plot_attention(shown: AttendedImage, picture: SizedPixels | None, folder: Folder, name: str) -> None:
    """Draw the attention to an image and its captions, as wide as two columns.

    Raises:
        DatasetError: the figure cannot be written.
    """
    figure, labelled = (_draw_heads if shown.captions[0].pairs is None else _draw_pairs)(shown, picture)
    figure.suptitle(plain(f"{shown.number}  {shown.image_id}"), fontsize=SMALL, x=0.01, ha="left", fontweight="bold")
    settle(figure)
    for panel, labels in labelled:
        panel.set_xlabel(", ".join(place_labels(panel, labels, (), pad=3, reach=4)) or " ")
    save(figure, folder, name)


def _draw_heads(shown: AttendedImage, picture: SizedPixels | None) -> tuple[Figure, list[_Labels]]:
    """Draw a panel for each head over regions, and a heat map for each caption."""
    num_heads = 0 if shown.regions is None else len(shown.regions)
    has_boxes = shown.boxes is not None and (picture is not None or shown.size_wh is not None)
    grid_hw = shown.grid_hw if num_heads and not has_boxes else None
    # A grid may cover a part of the picture, or be stretched: the picture precedes the maps instead of underlying them.
    first = int(grid_hw is not None and picture is not None)
    across = _ACROSS + first
    aspect = _aspect(shown, picture) if grid_hw is None else min(2.0, grid_hw[0] / grid_hw[1])
    pictures = [TWO_COLUMNS / across * aspect + 0.25] * -(-(first + num_heads) // across)
    image_heights = pictures if has_boxes or grid_hw is not None or not num_heads else [0.5 + 0.16 * num_heads]
    captions = [(caption, caption.words) for caption in shown.captions if caption.words is not None]
    heights = [*image_heights, *(0.85 + 0.2 * len(words) for _, words in captions)]
    figure = Figure(figsize=(TWO_COLUMNS, sum(heights) + 0.25), layout="constrained")
    grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
    labelled = []
    if first:
        draw_picture(figure.add_subplot(grid[0, 0]), picture, shown.image_id)
    if shown.regions is not None and (has_boxes or grid_hw is not None):
        for head, weights in enumerate(shown.regions):
            panel = figure.add_subplot(grid[divmod(first + head, across)])
            if grid_hw is not None:
                _draw_cells(panel, weights.reshape(grid_hw), 1 / len(weights), aspect="equal")
                panel.set(xticks=[], yticks=[])
            else:
                regions = strongest(weights, _LABELLED_BOXES)
                labels = {region: f"{region + 1}: {_percent(weights[region])}" for region in regions}
                labelled.append(_draw_attended_boxes(panel, shown, picture, weights, labels, 1 / len(weights)))
            panel.set_title(f"head {head + 1}: {_scale(weights[None])}", fontsize=TINY)
    elif shown.regions is not None:
        panel = figure.add_subplot(grid[0, :])
        num_regions = shown.regions.shape[1]
        _draw_heat_map(panel, shown.regions, _ticks(num_heads, "head "), _ticks(num_regions), 1 / num_regions)
        panel.set_title(f"image: {_scale(shown.regions)}", fontsize=TINY, loc="left")
        panel.set_xlabel("region", fontsize=TINY)
    for row, (caption, words) in enumerate(captions, start=len(image_heights)):
        panel = figure.add_subplot(grid[row, :])
        heads = _ticks(len(words), "head ")
        _draw_heat_map(panel, words, heads, caption.caption.words, 1 / words.shape[1], slanted=True)
        panel.set_title(f"{plain(caption.caption.key.language)}: {_scale(words)}", fontsize=TINY, loc="left")
    return figure, labelled


def _draw_pairs(shown: AttendedImage, picture: SizedPixels | None) -> tuple[Figure, list[_Labels]]:
    """Draw a heat map for each caption, beside a picture with the strongest regions."""
    has_boxes = shown.boxes is not None and (picture is not None or shown.size_wh is not None)
    min_height = 2.6 * _aspect(shown, picture) if has_boxes else 0.0
    heights = [max(0.6 + 0.15 * len(caption.caption.words), min_height) for caption in shown.captions]
    figure = Figure(figsize=(TWO_COLUMNS, sum(heights) + 0.25), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(2.6, 4.6), height_ratios=heights)
    labelled = []
    for row, caption in enumerate(shown.captions):
        assert caption.pairs is not None
        panel = figure.add_subplot(grid[row, 1] if has_boxes else grid[row, :])
        uniform = 1 / caption.pairs.shape[1 if caption.words_attend else 0]
        _draw_heat_map(panel, caption.pairs, caption.caption.words, _ticks(caption.pairs.shape[1]), uniform)
        direction = "words attend to regions" if caption.words_attend else "regions attend to words"
        scale = _scale(caption.pairs if caption.words_attend else caption.pairs.T)
        panel.set_title(f"{plain(caption.caption.key.language)}: {direction}, {scale}", fontsize=TINY, loc="left")
        panel.set_xlabel("region", fontsize=TINY)
        if has_boxes:
            weights, labels = _strongest_words(caption.pairs, caption.caption.words)
            panel = figure.add_subplot(grid[row, 0])
            labelled.append(_draw_attended_boxes(panel, shown, picture, weights, labels, uniform))
    return figure, labelled


def _strongest_words(pairs: np.ndarray, words: Sequence[str]) -> tuple[np.ndarray, dict[int, str]]:
    """Return each region's maximum weight, and labels of the strongest regions."""
    if len(pairs) > 2:
        pairs, words = pairs[1:-1], words[1:-1]  # Without <start> and <end>.
    weights, best = pairs.max(axis=0), pairs.argmax(axis=0)
    return weights, {region: f"{region + 1}: {words[best[region]]}" for region in strongest(weights, BOXES)}


def _draw_attended_boxes(
    panel: Axes, shown: AttendedImage, picture: SizedPixels | None, weights: np.ndarray, labels: dict[int, str], uniform: float
) -> _Labels:
    """Draw the regions with the greatest weights, the greatest on top."""
    assert shown.boxes is not None
    draw_picture(panel, picture, "" if picture is None else shown.image_id, shown.size_wh)
    max_weight = _end_of_scale(weights, uniform)
    for region in reversed(strongest(weights, BOXES)):
        share = float(weights[region]) / max_weight
        left, top, right, bottom = shown.boxes[region]
        box = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=_COLOUR, linewidth=0.4 + 2.4 * share)
        box.set_alpha(0.25 + 0.75 * share)
        box.set_path_effects([patheffects.Stroke(linewidth=1.2 + 2.4 * share, foreground="white"), patheffects.Normal()])
        panel.add_patch(box)
    panel.set_xlabel(" ", fontsize=TINY - 1.5, labelpad=1)
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    style: dict[str, Any] = {"fontsize": TINY - 1.5, "ha": "center", "va": "center", "bbox": ground, "in_layout": False}
    corners = shown.boxes.reshape(-1, 2, 2)
    return panel, [(panel.text(0, 0, plain(label), **style), corners[region]) for region, label in labels.items()]


def _draw_heat_map(
    panel: Axes, weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], uniform: float, *, slanted: bool = False
) -> None:
    """Draw weights as grey cells, with values in percent if labels are slanted."""
    _draw_cells(panel, weights, uniform, aspect="auto")
    panel.set_yticks(range(len(rows)), list(map(plain, rows)), fontsize=TINY)
    every = next(step for step in (1, 5, 10, 20, 50, len(columns)) if len(columns) <= _MAX_TICKS * step)
    ticks = range(len(columns)) if slanted or every == 1 else [0, *range(every - 1, len(columns), every)]
    panel.set_xticks(ticks, [plain(columns[tick]) for tick in ticks], fontsize=TINY if slanted else TINY - 1.5)
    if slanted:
        for label in panel.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
        if len(columns) <= _MAX_COLUMNS_WITH_VALUES:
            for (row, column), weight in np.ndenumerate(weights):
                colour = "white" if weight > 0.65 * _end_of_scale(weights, uniform) else "black"
                panel.text(column, row, f"{100 * weight:.0f}", fontsize=TINY - 1, ha="center", va="center", color=colour)
    panel.tick_params(length=1.5, pad=1.5)
    panel.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    panel.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=0.6)
    panel.tick_params(which="minor", length=0)


def _draw_cells(panel: Axes, weights: np.ndarray, uniform: float, *, aspect: Literal["auto", "equal"]) -> None:
    end = _end_of_scale(weights, uniform)
    panel.imshow(weights, cmap="Greys", vmin=0, vmax=end, aspect=aspect, interpolation="nearest")
    panel.spines[:].set(color="0.7", linewidth=0.5)


def _end_of_scale(weights: np.ndarray, uniform: float) -> float:
    return max(float(weights.max()), min(1.0, 3 * uniform))


def _scale(weights: np.ndarray) -> str:
    """Describe the maximum and the uniform weight; each row sums to 1."""
    return f"up to {_percent(weights.max())}, even {_percent(1 / weights.shape[1])}"


def _percent(weight: float) -> str:
    """Return a weight in percent, with a decimal below 10 %."""
    return f"{weight:.0%}" if weight >= 0.0995 else f"{weight:.1%}"


def _ticks(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{number}" for number in range(1, count + 1)]


def _aspect(shown: AttendedImage, picture: SizedPixels | None) -> float:
    """Return height over width of the picture."""
    width, height = picture[1] if picture is not None else shown.size_wh or (1, 1)
    return min(2.0, height / width)
