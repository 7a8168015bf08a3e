"""What a model attends to in the examples of a figure: the weights of its own attention, and the boxes of the regions.

Letters: ``K`` heads, ``R`` regions, ``T`` tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from schemas.dataset import Dataset
from schemas.errors import UsageError
from schemas.parameters import FeaturesParameters
from train.data.features import feature_spec
from train.data.splits import TrainingData
from train.evaluation.evaluating import evaluating
from train.models.retrieval_model import ImageBatch
from train.reports.figure_examples import Example, ShownCaption
from train.runs.run import Run


@dataclass(frozen=True)
class AttendedCaption:
    """A caption with the attention to it, or between it and its image.

    Attributes:
        caption: the caption.
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
        number: number of the example.
        image_id: its id.
        boxes: corners of the regions in its pixels, x1, y1, x2, y2, ``[R, 4]``; None where the features have no boxes.
        size_wh: its width and height in pixels; None where they are not known.
        regions: of each head to each region, ``[K, R]``; None where no head attends to regions.
        captions: its captions.
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


def check_attends(run: Run, data: TrainingData, example: Example) -> None:
    """Check that the model of a run attends to anything.

    Raises:
        UsageError: it does not.
    """
    caption = example.captions[0]
    with evaluating(run.model) as device:
        images = ImageBatch.of(data.features, np.array([example.image]), device)
        batch = data.captions.batch(np.array([caption.row]))
        weights = run.model.attention_weights(images, batch, caption.key.language)
        if weights is None or all(part is None for part in (weights.regions, weights.words, weights.pairs)):
            raise UsageError(
                f"{run.folder.location!r} holds a model of the kind {run.config.model.kind!r}, which attends to neither regions "
                "nor words: there is no attention to draw"
            )


def attend(run: Run, data: TrainingData, features: Dataset, example: Example) -> AttendedImage:
    """Return the attention of a run's model to an example.

    Args:
        run: the run; its model attends, see `check_attends`.
        data: the split.
        features: the dataset of its features; regions have boxes.
        example: the example.
    """
    regions, captions = None, []
    with evaluating(run.model) as device:
        images = ImageBatch.of(data.features, np.array([example.image]), device)
        for caption in example.captions:
            batch = data.captions.batch(np.array([caption.row]))
            weights = run.model.attention_weights(images, batch, caption.key.language)
            assert weights is not None
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
