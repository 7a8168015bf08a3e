"""The weights that `describe` has checked, kept for the `load` that follows in the same process.

A run first describes its extractor, which hashes and parses the weights, and then often loads it in the same process. So that
this work, or the drawing of random weights, is done once, the weights of the last description wait here, and loading takes them
out.

They wait for a minute at most. Mapped files (see `extractors.weights.checkpoints.is_mappable`) cost the process no memory, but
files that must be converted, widened from 16 bits or parsed whole (old ``torch.save`` files, pickles, ``.caffemodel``) and
random weights cost as much as the model, 575 MB for VGG19, and a launcher whose workers are other processes never loads. One
rule serves all kinds: reading a file a second time costs a run of more than a minute little.
"""

from __future__ import annotations

from collections.abc import Hashable
from threading import Lock, Timer

from extractors.weights.finding import Weights
from extractors.weights.stamps import FileStamp

KEPT_SECONDS = 60.0
"""Seconds after which weights that nobody loads are dropped."""

_lock = Lock()
_kept: dict[Hashable, tuple[Weights, Timer]] = {}


def keep(key: Hashable, weights: Weights) -> None:
    """Keep weights for `take`, in the place of any that are kept already.

    Args:
        key: what decides which weights are found.
        weights: the weights found.
    """
    # The timer knows the key and not the weights, which its thread would hold for a moment longer than anyone else.
    timer = Timer(KEPT_SECONDS, lambda: _drop(key, timer))
    timer.daemon = True
    with _lock:
        _clear()
        _kept[key] = weights, timer
        timer.start()


def take(key: Hashable) -> Weights | None:
    """Return the weights kept under a key and keep them no longer; None if there are none or their file has changed since."""
    with _lock:
        if key not in _kept:
            return None
        weights, _ = _kept[key]
        _clear()
    is_current = weights.path is None or FileStamp.of(weights.path) == weights.stamp
    return weights if is_current else None


def _drop(key: Hashable, timer: Timer) -> None:
    with _lock:
        if key in _kept and _kept[key][1] is timer:
            _clear()


def _clear() -> None:
    for _, timer in _kept.values():
        timer.cancel()
    _kept.clear()
