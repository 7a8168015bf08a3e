"""The loss of a batch, which training minimises.

* caption-image (``c2i``) and caption-caption (``c2c``) ranking, one task per batch: Kádár et al. 2018, figure 2;
* PIVOT: images against the captions in each language, added up: Gella et al. 2017, equation 1;
* PARALLEL: PIVOT plus the captions in every two languages against each other: equation 2, whose sum over ``(c1, c2)`` covers all
  pairs of languages, in the model's order.

Letters in shapes: ``B`` rows in the batch, ``D`` feature width, ``E`` joint embedding width.
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
"""From the embeddings of this process's rows and the number of rows in the batch to the embeddings of all rows."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of the model for a batch.

    Attributes:
        task: ``c2i``, ``c2c`` or ``images``, see `train.data.Batch`.
        images: int64 ``[B]``, the image of each row in the whole batch.
        features: float32 ``[B, D]``, features of this process's rows; None for ``c2c``.
        captions: captions of this process's rows, one entry for each of ``languages``.
        languages: the language of each entry; None if it mixes several, which only a shared encoder reads.
    """

    task: str
    images: Tensor
    features: Tensor | None
    captions: tuple[PackedCaptions, ...]
    languages: tuple[str | None, ...]


def gather(data: TrainingData, batch: Batch, device: torch.device, rows: slice = slice(None)) -> Inputs:
    """Collect the captions and features that a batch refers to.

    Args:
        data: the data that the batch was sampled from.
        batch: rows of the data.
        device: device of the model.
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
        model: the model to train.
        margin: margin of the hinges.
        parallel: add the ranking of captions against captions to that of images (equation 2).
        whole: joins the embeddings of all processes: `train.distributed.Processes.whole`.
    """

    def __init__(self, model: JointEmbedding, *, margin: float, parallel: bool, whole: Whole) -> None:
        super().__init__()
        self.model = model
        self.margin = margin
        self.parallel = parallel
        self.whole = whole

    def forward(self, inputs: Inputs, hinges: str) -> Tensor:
        """Return the loss, a scalar: the sum of the hinges over the batch, not their mean, as in the papers.

        Args:
            inputs: inputs from `gather`.
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
            pairs += [(images, embedded) for embedded in captions]
        losses = [
            ranking_loss(self.model.similarity(a, b), inputs.images, inputs.images, margin=self.margin, hinges=hinges)
            for a, b in pairs
        ]
        return torch.stack(losses).sum()
