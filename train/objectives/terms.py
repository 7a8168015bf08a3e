"""From a batch to the loss that is minimised.

* caption-image (``c2i``) and caption-caption (``c2c``) ranking, one task a batch: Kádár et al. 2018, figure 2;
* PIVOT: images against the captions of each language, added up: Gella et al. 2017, equation 1;
* PARALLEL: PIVOT, and the captions of every two languages against each other: equation 2, whose sum over ``(c1, c2)`` is taken over
  all pairs of languages, in the model's order.

Letters in shapes: ``B`` rows of the batch, ``D`` feature width, ``E`` joint embedding width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from train.data.packing import PackedCaptions, pack
from train.data.sampling import Batch
from train.data.splits import TrainingData
from train.models.joint_embedding import JointEmbedding
from train.objectives.ranking import ranking_loss

__all__ = ["Inputs", "Objective", "gather"]

Whole = Callable[[Tensor, int], Tensor]
"""From the embeddings of this process's rows, and the number of rows of the batch, to the embeddings of all its rows."""


@dataclass(frozen=True)
class Inputs:
    """A batch as the model takes it.

    Attributes:
        task: ``c2i``, ``c2c`` or ``images``, see `train.data.sampling.Batch`.
        images: int64 ``[B]``, the image of each row of the whole batch.
        features: float32 ``[B, D]`` of this process's rows; None for ``c2c``.
        captions: this process's rows, one entry for each of ``languages``.
        languages: of the captions; None where they are of several, which only a shared encoder takes.
    """

    task: str
    images: Tensor
    features: Tensor | None
    captions: tuple[PackedCaptions, ...]
    languages: tuple[str | None, ...]


def gather(data: TrainingData, batch: Batch, device: torch.device, rows: slice = slice(None)) -> Inputs:
    """Collects what a batch refers to.

    Args:
        data: that the batch was sampled from.
        batch: rows of the data.
        device: where the model is.
        rows: this process's rows of the batch.
    """
    captions = data.captions
    packed = tuple(pack(captions.token_ids, captions.offsets, chosen[rows]).to(device) for chosen in batch.captions)
    features = None
    if batch.task != "c2c":
        features = torch.from_numpy(np.ascontiguousarray(data.features.array[batch.images[rows]], np.float32)).to(device)
    images = torch.from_numpy(np.asarray(batch.images, np.int64)).to(device)
    return Inputs(batch.task, images, features, packed, batch.languages)


class Objective(nn.Module):
    """The loss of a batch.

    Args:
        model: that is trained.
        margin: of the hinges.
        parallel: add the ranking of captions against captions to that of images (equation 2).
        whole: brings the embeddings of all processes together: `train.distributed.Processes.whole`.
    """

    def __init__(self, model: JointEmbedding, *, margin: float, parallel: bool, whole: Whole) -> None:
        super().__init__()
        self.model = model
        self.margin = margin
        self.parallel = parallel
        self.whole = whole

    def forward(self, inputs: Inputs, hinges: str) -> Tensor:
        """The loss, a scalar: the hinges of the batch added up, not averaged, as in the papers.

        Args:
            inputs: from `gather`.
            hinges: ``sum`` or ``max``.
        """
        count = len(inputs.images)
        captions = [
            self.whole(self.model.embed_captions(packed, language or self.model.config.languages[0]), count)  # [B, E]
            for packed, language in zip(inputs.captions, inputs.languages, strict=True)
        ]
        pairs = list(combinations(captions, 2)) if inputs.task == "c2c" or self.parallel else []
        if inputs.features is not None:
            images = self.whole(self.model.embed_images(inputs.features), count)  # [B, E]
            pairs += [(images, found) for found in captions]
        losses = [
            ranking_loss(self.model.similarity(a, b), inputs.images, inputs.images, margin=self.margin, hinges=hinges)
            for a, b in pairs
        ]
        return torch.stack(losses).sum()
