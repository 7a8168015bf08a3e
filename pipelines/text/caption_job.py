"""What ``imagepivot captions`` is asked to do. Importing this loads no Beam."""

from __future__ import annotations

from dataclasses import dataclass

from pipelines.inputs.captions import CaptionSource, Selection
from pipelines.text.moses import DEFAULT_RECIPE, recipe
from schemas.errors import UsageError
from schemas.keys import AUTO, ShardsRequest, check_shards_request

__all__ = ["CaptionsJob"]


@dataclass(frozen=True)
class CaptionsJob:
    """Job of ``imagepivot captions``.

    Attributes:
        source: the raw captions.
        output: folder of the dataset.
        selection: the captions to keep.
        recipe: name of the text recipe.
        train_splits: splits that the truecasers learn from.
        truecaser: folder of trained truecasers, or a captions dataset that holds them; None trains them.
        shards: number of shards, see `schemas.writing.shard_count`.
        overwrite: start anew, whatever dataset is there.
        verify: compare the digests of what is there, too, and make again what is damaged.
    """

    source: CaptionSource
    output: str
    selection: Selection = Selection()
    recipe: str = DEFAULT_RECIPE
    train_splits: tuple[str, ...] = ("train",)
    truecaser: str | None = None
    shards: ShardsRequest = AUTO
    overwrite: bool = False
    verify: bool = False

    def __post_init__(self) -> None:
        check_shards_request(self.shards)
        if self.truecaser is not None and not recipe(self.recipe).truecase:
            raise UsageError(f"recipe {self.recipe!r} does not truecase: leave --truecaser out, or use --recipe moses-truecase")
