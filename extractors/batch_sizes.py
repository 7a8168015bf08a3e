"""Search for the GPU batch size by doubling, with a cache of results.

Features do not depend on it, except for last bits if GPU libraries choose other kernels for another batch size.
"""

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

_MAX_SIZE = 256
_HOST_BYTES = 2**26  # Pixels and features of a batch; the host holds a few batches.
_FREE_SHARE = 0.5  # Image sizes differ, and other processes need memory.
_MIN_SPEEDUP = 1.05
_NOISE_HW = (480, 640)

logger = logging.getLogger(__name__)


def find_batch_size(extractor: Extractor, clock: Callable[[], float] = time.perf_counter) -> int:
    """Return the batch size of an extractor.

    On a CPU, for regions and for compiled models it is the default of the description. Other models run on noise, in batches of
    doubled size. The search stops at 256 images, a speedup under 5 %, half of the free GPU memory, or 64 MiB of pixels and
    features. Results are cached by GPU name and memory, extractor name and shape, precision, and library versions.
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
    cached = load_json("batch-sizes", name)
    if isinstance(cached, int) and 1 <= cached <= _MAX_SIZE:
        return cached
    size = _double(extractor, size, clock)
    logger.info("batch size of %s on %s is %d", extractor.spec.name, name["gpu"], size)
    store_json("batch-sizes", name, size)
    return size


def _double(extractor: Extractor, size: int, clock: Callable[[], float]) -> int:
    noise = np.random.default_rng(0).integers(0, 256, (*_NOISE_HW, 3), dtype=np.uint8)
    pixels = extractor.preprocess(Image.fromarray(noise))
    image_bytes = pixels.nbytes + np.dtype(extractor.spec.dtype).itemsize * prod(extractor.spec.shape)
    rate, peak = _measure(extractor, pixels, size, clock)
    while 2 * size <= min(_MAX_SIZE, _HOST_BYTES // image_bytes) and 2 * peak <= _FREE_SHARE * _free_bytes(extractor.device):
        faster, peak = _measure(extractor, pixels, 2 * size, clock)
        if faster < _MIN_SPEEDUP * rate:
            break
        size, rate = 2 * size, faster
    return size


def _measure(extractor: Extractor, pixels: Any, size: int, clock: Callable[[], float]) -> tuple[float, int]:
    """Return images per second and the peak GPU memory of a batch in bytes."""
    batch = extractor.collate([pixels] * size)
    extractor.extract_columns(batch)  # Warm-up.
    before = torch.cuda.memory_allocated(extractor.device)
    torch.cuda.reset_peak_memory_stats(extractor.device)
    started = clock()
    extractor.extract_columns(batch)
    seconds = clock() - started
    return size / max(seconds, 1e-9), torch.cuda.max_memory_allocated(extractor.device) - before


def _free_bytes(device: torch.device | None) -> int:
    free, _ = torch.cuda.mem_get_info(device)  # Excludes the cache of torch's allocator.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
