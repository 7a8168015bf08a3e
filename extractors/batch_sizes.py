"""Batch sizes on a GPU: as many images as make it faster and leave it memory to spare, found by doubling and remembered.

No feature depends on it, except for last bits where a GPU's libraries choose other kernels for another number of images.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from PIL import Image

from extractors.base import Extractor
from extractors.description_cache import load_json, store_json

_MOST = 256
_HOST_BYTES = 2**26  # Pixels and features of a batch; a few batches are in the host's memory at a time.
_SHARE = 0.5  # Of the memory that is free: images differ, and other processes need some.
_GAIN = 1.05
_NOISE_HW = (480, 640)

logger = logging.getLogger(__name__)


def find_batch_size(extractor: Extractor, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return how many images an extractor should take at once.

    On a CPU, of regions and of compiled models it is the extractor's own number. Other models on a GPU run on batches of noise,
    each twice as large as the one before, up to 256 images: until one is not a twentieth faster, or the next would take more than
    half of the free memory of the GPU, or 64 MiB of the host's for pixels and features. What is found is kept in the cache, by the
    GPU's name and memory, the extractor's name and shape, the precision, and the versions of the libraries.
    """
    size = extractor.description.batch_size
    if not extractor.on_gpu or extractor.description.kind != "features" or extractor.parameters.get("compiled"):
        return size
    name = {
        "gpu": torch.cuda.get_device_name(extractor.device),
        "memory": torch.cuda.get_device_properties(extractor.device).total_memory,
        "extractor": extractor.spec.to_json(),
        "precision": extractor.parameters.get("precision"),
    }
    found = load_json("batch-sizes", name)
    if isinstance(found, int) and 1 <= found <= _MOST:
        return found
    size = _double(extractor, size, clock)
    logger.info("%s takes %d images at once on %s", extractor.spec.name, size, name["gpu"])
    store_json("batch-sizes", name, size)
    return size


def _double(extractor: Extractor, size: int, clock: Callable[[], float]) -> int:
    noise = np.random.default_rng(0).integers(0, 256, (*_NOISE_HW, 3), dtype=np.uint8)
    pixels = extractor.preprocess(Image.fromarray(noise))
    image_bytes = pixels.nbytes + np.dtype(extractor.spec.dtype).itemsize * prod(extractor.spec.shape)
    rate, peak = _measure(extractor, pixels, size, clock)
    while 2 * size <= min(_MOST, _HOST_BYTES // image_bytes) and 2 * peak <= _SHARE * _free(extractor.device):
        faster, peak = _measure(extractor, pixels, 2 * size, clock)
        if faster < _GAIN * rate:
            break
        size, rate = 2 * size, faster
    return size


def _measure(extractor: Extractor, pixels: Any, size: int, clock: Callable[[], float]) -> tuple[float, int]:
    """Return images per second, and the bytes of the GPU's memory that a batch takes."""
    batch = extractor.collate([pixels] * size)
    extractor.extract_columns(batch)  # The first one warms up.
    before = torch.cuda.memory_allocated(extractor.device)
    torch.cuda.reset_peak_memory_stats(extractor.device)
    started = clock()
    extractor.extract_columns(batch)
    seconds = clock() - started
    return size / max(seconds, 1e-9), torch.cuda.max_memory_allocated(extractor.device) - before


def _free(device: torch.device | None) -> int:
    """Return the bytes that a GPU has free, those included that torch keeps for later."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
