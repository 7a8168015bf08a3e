"""Attention of a model to the examples of a figure: to regions as boxes over the picture, to words as fields of grey.

Weights show in the width of a box and in how dark a cell is, so that grey print keeps them. Each panel has a scale of its own,
from 0 to its greatest weight, but no less than three times the weight that all would have if they were alike: even attention is
pale. Its title names both weights.

Letters: ``K`` heads, ``R`` regions, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from schemas.dataset import Dataset
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import Folder
from train.data.features import feature_spec
from train.data.splits import SplitData
from train.evaluation.evaluation import eval_mode
from train.models.retrieval_model import ImageBatch
from train.reports.figure_examples import Example, Picture, ShownCaption
from train.reports.rankings import draw_picture
from train.runs.curves import SMALL, TINY, plain, save
from train.runs.run import Run


@dataclass(frozen=True)
class AttendedCaption:
    """A caption with the attention to it, or between it and its image.

    Attributes:
        words: of each head to each token, ``[K, T]``; None where no head attends to words.
        pairs: between tokens and regions, ``[T, R]``; None where heads attend.
        words_attend: whether in ``pairs`` words attend to regions, or regions to words.
    """

    caption: ShownCaption
    words: np.ndarray | None
    pairs: np.ndarray | None
    words_attend: bool = True


@dataclass(frozen=True)
class AttendedImage:
    """An image with the attention to it.

    Attributes:
        boxes: corners of the regions in its pixels, x1, y1, x2, y2, ``[R, 4]``; None where the features have no boxes.
        size_wh: its width and height in pixels; None where they are not known.
        regions: of each head to each region, ``[K, R]``; None where no head attends to regions.
        grid_hw: rows and columns, where the features are the cells of a grid; otherwise None.
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
            "boxes": _plain(self.boxes),
            "grid": None if self.grid_hw is None else list(self.grid_hw),
            "regions": _plain(self.regions),
            "captions": [
                {**shown.caption.to_dict(), "tokens": list(shown.caption.tokens)}
                | {"words": _plain(shown.words), "pairs": _plain(shown.pairs), "words_attend": shown.words_attend}
                for shown in self.captions
            ],
        }


def attend(run: Run, data: SplitData, features: Dataset, example: Example) -> AttendedImage:
    """Return the attention of a run's model to an example.

    Raises:
        UsageError: the model of the run attends to nothing.
    """
    regions, captions = None, []
    with eval_mode(run.model) as device:
        images = ImageBatch.of(data.features, np.array([example.image]), device)
        for caption in example.captions:
            batch = data.captions.batch(np.array([caption.row]))
            weights = run.model.attention_weights(images, batch, caption.key.language)
            if weights is None or all(part is None for part in (weights.regions, weights.words, weights.pairs)):
                raise UsageError(
                    f"{run.folder.location!r} holds a model of the kind {run.config.model.kind!r}, which attends to neither "
                    "regions nor words: there is no attention to draw"
                )
            regions = _array(weights.regions)
            captions.append(AttendedCaption(caption, _array(weights.words), _array(weights.pairs), weights.words_attend))
    boxes, size_wh = _boxes(features, example.image_id)
    return AttendedImage(example.number, example.image_id, boxes, size_wh, regions, tuple(captions), grid_of(features))


def grid_of(features: Dataset) -> tuple[int, int] | None:
    """Return rows and columns of the grid whose cells are the features; None if they are something else."""
    stated = (FeaturesParameters.from_json(features.manifest.parameters).extractor or {}).get("grid")
    spec = feature_spec(features)
    if not isinstance(stated, list) or len(spec.shape) != 2 or len(stated) != 2:
        return None
    rows, columns = stated
    return (rows, columns) if rows * columns == spec.shape[0] else None


def _boxes(features: Dataset, image_id: str) -> tuple[np.ndarray | None, tuple[int, int] | None]:
    """Return boxes and size of an image; None where they are not known."""
    if features.kind != "regions":
        return None, None
    row: dict[str, Any] = features.get(image_id)
    boxes = row["boxes"][: row["num_regions"]]
    size_wh = (row["width"], row["height"]) if row["width"] and row["height"] else None
    return boxes, size_wh


def _array(weights: torch.Tensor | None) -> np.ndarray | None:
    return None if weights is None else weights.float().cpu().numpy()


def _plain(values: np.ndarray | None) -> list[Any] | None:
    return None if values is None else np.asarray(values, float).round(6).tolist()


def strongest(weights: Sequence[float] | np.ndarray, most: int) -> list[int]:
    """Return the positions of the greatest weights, the greatest first; equal ones in their order."""
    return np.argsort(-np.asarray(weights), kind="stable")[:most].tolist()


BOXES = 8
"""Number of regions that are drawn over a picture, those with the greatest weights."""

_WIDTH, _ACROSS = 7.2, 3  # Inches, and pictures in a row.
_NAMED = 3  # Boxes of a head that have a number.
_COLOUR = "#D55E00"
_CELLS_WITH_NUMBERS = 26
_NUMBERS = 20  # Below a field, side by side; of more cells the first, the fifth and so on have theirs.
_CHARACTER, _LINE = 0.045, 0.1  # Inches that a label's characters take.


def plot_attention(shown: AttendedImage, picture: Picture | None, folder: Folder, name: str) -> None:
    """Draw what a model attends to in an image and its captions.

    Without a picture, boxes are drawn on an empty field.

    Raises:
        DatasetError: the picture cannot be written.
    """
    figure = (_of_heads if shown.captions[0].pairs is None else _of_pairs)(shown, picture)
    figure.suptitle(plain(f"{shown.number}  {shown.image_id}"), fontsize=SMALL, x=0.01, ha="left", fontweight="bold")
    save(figure, folder, name)


def _of_heads(shown: AttendedImage, picture: Picture | None) -> Figure:
    """Draw a picture for each head, and for each caption heads over words, as far as they attend to either."""
    heads = 0 if shown.regions is None else len(shown.regions)
    drawn = shown.boxes is not None and (picture is not None or shown.size_wh is not None)
    mapped = shown.grid_hw if heads and not drawn else None
    # A map may be of a part of the picture, or stretched: the picture stands before the maps, not below them.
    before = int(mapped is not None and picture is not None)
    across = _ACROSS + before
    aspect = _aspect(shown, picture) if mapped is None else min(2.0, mapped[0] / mapped[1])
    pictures = [_WIDTH / across * aspect + 0.25] * -(-(before + heads) // across)
    attended = pictures if drawn or mapped is not None or not heads else [0.5 + 0.16 * heads]
    captions = [(caption, caption.words) for caption in shown.captions if caption.words is not None]
    heights = [*attended, *(0.85 + 0.2 * len(words) for _, words in captions)]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.25), layout="constrained")
    grid = figure.add_gridspec(len(heights), across, height_ratios=heights)
    if shown.regions is None:
        pass
    elif drawn:
        for head, weights in enumerate(shown.regions):
            panel = figure.add_subplot(grid[divmod(head, across)])
            named = {region: f"{region + 1}: {_percent(weights[region])}" for region in strongest(weights, _NAMED)}
            _draw_boxes(panel, shown, picture, weights, named, 1 / len(weights))
            panel.set_title(f"head {head + 1}: {_scale(weights[None])}", fontsize=TINY)
    elif mapped is not None:
        if before:
            draw_picture(figure.add_subplot(grid[0, 0]), picture, shown.image_id)
        for head, weights in enumerate(shown.regions):
            panel = figure.add_subplot(grid[divmod(before + head, across)])
            _draw_map(panel, weights.reshape(mapped))
            panel.set_title(f"head {head + 1}: {_scale(weights[None])}", fontsize=TINY)
    else:
        panel = figure.add_subplot(grid[0, :])
        _draw_field(panel, shown.regions, _heads(shown.regions), _numbers(shown.regions.shape[1]), 1 / shown.regions.shape[1])
        panel.set_title(f"image: {_scale(shown.regions)}", fontsize=TINY, loc="left")
        panel.set_xlabel("region", fontsize=TINY)
    for row, (caption, words) in enumerate(captions, start=len(attended)):
        panel = figure.add_subplot(grid[row, :])
        _draw_field(panel, words, _heads(words), caption.caption.words, 1 / words.shape[1], slanted=True)
        panel.set_title(f"{plain(caption.caption.key.language)}: {_scale(words)}", fontsize=TINY, loc="left")
    return figure


def _of_pairs(shown: AttendedImage, picture: Picture | None) -> Figure:
    """Draw for each caption its words over the regions, beside the picture with the regions that are in it for most."""
    drawn = shown.boxes is not None and (picture is not None or shown.size_wh is not None)
    least = 2.6 * _aspect(shown, picture) if drawn else 0.0
    heights = [max(0.6 + 0.15 * len(caption.caption.words), least) for caption in shown.captions]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.25), layout="constrained")
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(2.6, 4.6), height_ratios=heights)
    for row, caption in enumerate(shown.captions):
        assert caption.pairs is not None
        panel = figure.add_subplot(grid[row, 1] if drawn else grid[row, :])
        even = 1 / caption.pairs.shape[1 if caption.words_attend else 0]
        _draw_field(panel, caption.pairs, caption.caption.words, _numbers(caption.pairs.shape[1]), even)
        direction = "words attend to regions" if caption.words_attend else "regions attend to words"
        scale = _scale(caption.pairs if caption.words_attend else caption.pairs.T)
        panel.set_title(f"{plain(caption.caption.key.language)}: {direction}, {scale}", fontsize=TINY, loc="left")
        panel.set_xlabel("region", fontsize=TINY)
        if drawn:
            weights, named = _by_region(caption)
            _draw_boxes(figure.add_subplot(grid[row, 0]), shown, picture, weights, named, even)
    return figure


def _by_region(caption: AttendedCaption) -> tuple[np.ndarray, dict[int, str]]:
    """Return the greatest weight of each region with any word, and of the strongest regions that word."""
    assert caption.pairs is not None
    inside = caption.pairs[1:-1] if len(caption.pairs) > 2 else caption.pairs  # Without <start> and <end>.
    tokens = caption.caption.words[1:-1] if len(caption.pairs) > 2 else caption.caption.words
    weights, best = inside.max(axis=0), inside.argmax(axis=0)
    return weights, {region: f"{region + 1}: {tokens[best[region]]}" for region in strongest(weights, BOXES)}


def _draw_boxes(
    panel: Axes,
    shown: AttendedImage,
    picture: Picture | None,
    weights: np.ndarray,
    labels: dict[int, str],
    even: float,
) -> None:
    """Draw the regions with the greatest weights, the greatest on top, and some labels."""
    assert shown.boxes is not None
    draw_picture(panel, picture, "" if picture is None else shown.image_id, shown.size_wh)
    greatest = _end_of_scale(weights, even)
    for region in reversed(strongest(weights, BOXES)):
        share = float(weights[region]) / greatest
        left, top, right, bottom = shown.boxes[region]
        box = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=_COLOUR, linewidth=0.4 + 2.4 * share)
        box.set_alpha(0.25 + 0.75 * share)
        box.set_path_effects([patheffects.Stroke(linewidth=1.2 + 2.4 * share, foreground="white"), patheffects.Normal()])
        panel.add_patch(box)
    for label, x, y in placed_labels(shown.boxes, labels, panel.get_xlim()[1], panel.get_ylim()[0]):
        text = panel.text(x, y, plain(label), fontsize=TINY - 1.5, va="top", clip_on=True, zorder=5)
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85})


def placed_labels(boxes: np.ndarray, labels: Mapping[int, str], width: float, height: float) -> list[tuple[str, float, float]]:
    """Return labels with their upper left corners: each in the first free corner of its box, or left out if none is free.

    Boxes are ``[R, 4]``; labels are by region, the most important first; width and height are those of the picture, in the
    units of the boxes.
    """
    inch = width / (_WIDTH / _ACROSS)
    placed: list[tuple[str, float, float, float, float]] = []
    for region, label in labels.items():
        across, down = (_CHARACTER * len(label) + 0.05) * inch, _LINE * inch
        left, top, right, bottom = map(float, boxes[region])
        for x, y in ((left, top), (left, bottom - down), (right - across, top), (right - across, bottom - down)):
            x, y = min(max(x, 0.0), max(width - across, 0.0)), min(max(y, 0.0), max(height - down, 0.0))
            if all(x + across <= a or c <= x or y + down <= b or d <= y for _, a, b, c, d in placed):
                placed.append((label, x, y, x + across, y + down))
                break
    return [(label, x, y) for label, x, y, _, _ in placed]


def _draw_field(
    panel: Axes, weights: np.ndarray, rows: Sequence[str], columns: Sequence[str], even: float, *, slanted: bool = False
) -> None:
    """Draw weights as grey cells, with their values in percent where there is room."""
    greatest = _end_of_scale(weights, even)
    panel.imshow(weights, cmap="Greys", vmin=0, vmax=greatest, aspect="auto", interpolation="nearest")
    panel.set_yticks(range(len(rows)), list(map(plain, rows)), fontsize=TINY)
    every = next(step for step in (1, 5, 10, 20, 50, len(columns)) if len(columns) <= _NUMBERS * step)
    places = range(len(columns)) if slanted or every == 1 else [0, *range(every - 1, len(columns), every)]
    panel.set_xticks(places, [plain(columns[place]) for place in places], fontsize=TINY if slanted else TINY - 1.5)
    if slanted:
        for label in panel.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
        if len(columns) <= _CELLS_WITH_NUMBERS:
            for (row, column), weight in np.ndenumerate(weights):
                colour = "white" if weight > 0.65 * greatest else "black"
                panel.text(column, row, f"{100 * weight:.0f}", fontsize=TINY - 1, ha="center", va="center", color=colour)
    panel.tick_params(length=1.5, pad=1.5)
    panel.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
    panel.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=0.6)
    panel.tick_params(which="minor", length=0)
    for spine in panel.spines.values():
        spine.set(color="0.7", linewidth=0.5)


def _draw_map(panel: Axes, weights: np.ndarray) -> None:
    """Draw the weights of the cells of a grid where they lie in the image, ``[rows, columns]``."""
    panel.imshow(weights, cmap="Greys", vmin=0, vmax=_end_of_scale(weights, 1 / weights.size), interpolation="nearest")
    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set(color="0.7", linewidth=0.5)


def _end_of_scale(weights: np.ndarray, even: float) -> float:
    return max(float(weights.max()), min(1.0, 3 * even))


def _scale(weights: np.ndarray) -> str:
    """Say what the greatest weight is, and what all would be if they were alike; each row sums to 1."""
    return f"up to {_percent(weights.max())}, even {_percent(1 / weights.shape[1])}"


def _percent(weight: float) -> str:
    """Return a weight in percent; below 10 % with a decimal, without which the even weights of many regions look alike."""
    return f"{weight:.0%}" if weight >= 0.0995 else f"{weight:.1%}"


def _heads(weights: np.ndarray) -> list[str]:
    return [f"head {number}" for number in _numbers(len(weights))]


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(1, count + 1)]


def _aspect(shown: AttendedImage, picture: Picture | None) -> float:
    """Return height over width of the picture."""
    width, height = picture[1] if picture is not None else shown.size_wh or (1, 1)
    return min(2.0, height / width)
