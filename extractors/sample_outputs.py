"""Sample outputs of extractors, see `schemas.sample_outputs`, with a cache."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from extractors.description_cache import load_json, source_stamps, store_json
from schemas.sample_outputs import NUM_OUTPUTS, SampleOutputs

if TYPE_CHECKING:
    import numpy as np
    import torch


_LIBRARIES = ("torch", "torchvision", "timm", "pillow", "numpy", "detectron2", "transformers", "tokenizers")


def summarize(values: np.ndarray) -> SampleOutputs:
    """Return up to `NUM_OUTPUTS` means, each over every 32nd value.

    They depend on all values, so that sparse features tell, too, and have six significant digits.
    """
    flat = values.ravel().astype("float64")
    means = (float(flat[start::NUM_OUTPUTS].mean()) for start in range(min(NUM_OUTPUTS, flat.size)))
    # No infinity or NaN, which JSON cannot hold.
    return tuple(float(f"{mean:.6g}") if math.isfinite(mean) else 0.0 for mean in means)


def sample_outputs(extractor: Any) -> SampleOutputs:
    """Return the sample outputs of a loaded `Extractor` or `TokenExtractor`.

    They are cached for extractors of this package. Those of others are computed, since nothing tells whether their code changed.
    """
    fingerprint = extractor.description.fingerprint
    is_own = type(extractor).__module__.partition(".")[0] == __name__.partition(".")[0]
    outputs = stored_sample_outputs(fingerprint, extractor.device) if is_own else ()
    if not outputs:
        outputs = summarize(extractor.sample())
        if is_own:
            store_json("sample-outputs", _cache_key(fingerprint, extractor.device), outputs)
    return outputs


def stored_sample_outputs(fingerprint: str, device: torch.device | None) -> SampleOutputs:
    """Return the cached sample outputs of a model of this package; empty without any."""
    cached = load_json("sample-outputs", _cache_key(fingerprint, device))
    return tuple(map(float, cached)) if isinstance(cached, list) else ()


def _cache_key(fingerprint: str, device: torch.device | None) -> dict[str, Any]:
    """Return the key: weights are in the fingerprint, versions in the stamps."""
    name = "cpu"
    if device is not None and device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return {"fingerprint": fingerprint, "device": name, "made by": source_stamps(_LIBRARIES)}
