"""Sample outputs of a model: some 32 numbers that it computes for a fixed input.

A fingerprint covers weights and options, not the code of libraries: another version of timm may compute other values from them.
Records of shards and manifests keep the sample outputs, so that values of two versions are not mixed. Digests would also differ
between processors, which round differently; sample outputs are compared with a tolerance.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

SampleOutputs: TypeAlias = tuple[float, ...]
"""Sample outputs; empty if unknown."""

NUM_OUTPUTS = 32

TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 1e-1}
"""Largest difference by precision, relative to the largest number.

fp32 leaves room for a hundred times the rounding of processors, batch sizes and Winograd convolutions (1e-5), and for features
stored as float16 (5e-4). The units of rounding are 2**-11 for tf32 and fp16 and 2**-8 for bf16, over tens of layers.
"""


def are_equal(a: Sequence[float], b: Sequence[float], parameters: Mapping[str, Any]) -> bool:
    """Return whether sample outputs differ only by rounding; True if one is unknown.

    The parameters of the dataset have the precision; without one it is ``fp32``.
    """
    if not a or not b:
        return True
    model = parameters.get("extractor") or parameters.get("model")
    precision = model.get("precision") if isinstance(model, Mapping) else None
    largest_difference = TOLERANCES.get(str(precision), TOLERANCES["fp32"]) * max(map(abs, (*a, *b)))
    # NaN differs, since it compares as False.
    return len(a) == len(b) and all(abs(x - y) <= largest_difference for x, y in zip(a, b, strict=True))
