"""Remark about features of random weights, for all results that depend on them."""

from __future__ import annotations

from collections.abc import Iterable


def untrained_remark(names: Iterable[str]) -> str:
    """Return a sentence about features of random weights, or an empty string.

    Names are those of `schemas.dataset.Dataset.untrained`.

    >>> untrained_remark(["resnet50-pool (random:0)"])
    'untrained: the weights of resnet50-pool (random:0) are random, the features mean nothing'
    """
    features = ", ".join(dict.fromkeys(names))
    return f"untrained: the weights of {features} are random, the features mean nothing" if features else ""
