"""How fast images are read, decoded and computed here, each by itself, and which of these a run would wait for."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.doctor.findings import Finding
from schemas.errors import DatasetError, InputError
from schemas.limits import CORES_TO_A_DECODER, usable_cores
from schemas.progress import pace

if TYPE_CHECKING:
    from extractors import Extractor
    from pipelines.inputs.images import ImageSource

__all__ = ["check_rates", "draw_photo", "read_sample", "verdict"]

_GROUP = "rates"
_SAMPLE = 64
_SECONDS = 2.0
_LARGEST_CPU_BATCH = 8
_PHOTO_WH = (500, 375)  # That of most images of Flickr30k.
_QUALITY = 90
Clock = Callable[[], float]


def draw_photo(seed: int = 0) -> bytes:
    """Return a JPEG that takes as long to decode as one of Flickr30k: as many pixels, and about as many bytes."""
    import numpy as np
    from PIL import Image

    width, height = _PHOTO_WH
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize(_PHOTO_WH, Image.Resampling.BICUBIC)
    grain = random.integers(-32, 33, (height, width, 3))
    pixels = np.clip(np.asarray(coarse, dtype=np.int64) + grain, 0, 255).astype(np.uint8)
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, "JPEG", quality=_QUALITY)
    return target.getvalue()


def read_sample(images: ImageSource, clock: Clock = time.perf_counter) -> tuple[list[bytes], Finding]:
    """Read a few images, as a run does, and say how fast that was.

    Raises:
        InputError: there are no images, or none of them can be read.
    """
    refs = list(islice(images.refs(), _SAMPLE))
    failed: list[str] = []

    def read(ref: Any) -> bytes:
        try:
            return images.read(ref)
        except (OSError, DatasetError) as error:
            failed.append(f"{ref.uri!r}: {error}")
            return b""

    started = clock()
    with ThreadPoolExecutor(max(1, images.parallel_reads), thread_name_prefix="read") as pool:
        sample = [data for data in pool.map(read, refs) if data]
    seconds = max(clock() - started, 1e-9)
    if not sample:
        why = failed[0] if failed else "all are empty"
        raise InputError(f"none of the first {len(refs)} images of {images.location!r} can be read: {why}")
    size = sum(map(len, sample))
    values = {
        "images": len(sample),
        "failed": len(failed),
        "images_per_second": round(len(sample) / seconds, 3),
        "bytes_per_second": round(size / seconds),
        "bytes_per_image": size // len(sample),
        "threads": images.parallel_reads,
    }
    found = f"{pace(len(sample) / seconds)}, {size / seconds / 1e6:,.1f} MB/s, {len(sample)} images of {images.location!r}"
    if failed:
        advice = f"a run lists them as failures; here e.g.: {failed[0]}"
        return sample, Finding(_GROUP, "reading", "note", f"{found}; {len(failed)} cannot be read", advice, values)
    return sample, Finding(_GROUP, "reading", "ok", found, values=values)


def check_rates(
    extractor: Extractor,
    sample: Sequence[bytes],
    *,
    on_gpu: bool,
    reading: float | None = None,
    batch_size: int | None = None,
    clock: Clock = time.perf_counter,
) -> Iterator[Finding]:
    """Measure decoding and the model, and say which of them a run would wait for.

    Args:
        extractor: the loaded extractor.
        sample: bytes of images.
        on_gpu: whether it is on a GPU: then all cores decode, otherwise a few threads and the model share them.
        reading: images per second that can be read; None if that is unknown.
        batch_size: images that the model takes at once; by default the extractor's own number, on a CPU fewer.
        clock: tells the time, in seconds.

    Raises:
        InputError: none of the images can be decoded.
    """
    from extractors.batch_sizes import find_batch_size

    pixels, one, several, finding = _decoding(extractor, sample, clock)
    yield finding
    size = batch_size or (find_batch_size(extractor) if on_gpu else min(_LARGEST_CPU_BATCH, extractor.description.batch_size))
    batch = extractor.collate([pixels[number % len(pixels)] for number in range(size)])
    extractor.extract_columns(batch)  # The first one warms up.

    def forward() -> int:
        extractor.extract_columns(batch)
        return size

    model = _rate(forward, clock)
    found = f"{pace(model)} on {'the GPU' if on_gpu else 'the CPU'}, {size} at once, {extractor.spec.name}"
    values: dict[str, Any] = {"per_second": round(model, 3), "batch_size": size, "extractor": extractor.spec.name}
    yield Finding(_GROUP, "model", "ok", found, values=values)
    decoding = several if on_gpu else max(one, several / CORES_TO_A_DECODER)
    yield verdict(model=model, decoding=decoding, reading=reading, on_gpu=on_gpu)


class _Decoded(NamedTuple):
    """Pixels of images, images per second in one thread and in one for each core, and the finding that says so."""

    pixels: list[Any]
    one: float
    several: float
    finding: Finding


def _decoding(extractor: Extractor, sample: Sequence[bytes], clock: Clock) -> _Decoded:
    from extractors import DecodeError, decode

    def pixels_of(data: bytes) -> Any:
        return extractor.preprocess(decode(data))

    good: dict[int, Any] = {}
    failed: list[str] = []
    for number, data in enumerate(sample):
        try:
            good[number] = pixels_of(data)
        except DecodeError as error:
            failed.append(str(error))
    if not good:
        raise InputError(f"none of {len(sample)} images can be decoded: {failed[0]}")
    files, cores = [sample[number] for number in good], usable_cores()
    one = several = _rate(lambda: len([pixels_of(data) for data in files]), clock)
    if cores > 1:
        with ThreadPoolExecutor(cores, thread_name_prefix="decode") as pool:
            several = _rate(lambda: len(list(pool.map(pixels_of, files))), clock)
    found = f"{pace(one)} in one thread" + (f", {pace(several)} in {cores}" if cores > 1 else "")
    values = {
        "per_second_of_one": round(one, 3),
        "per_second_of_all": round(several, 3),
        "threads": cores,
        "failed": len(failed),
    }
    if not failed:
        return _Decoded(list(good.values()), one, several, Finding(_GROUP, "decoding", "ok", found, values=values))
    found += f"; {len(failed)} of {len(sample)} cannot be decoded"
    advice = f"a run lists them as failures; here e.g.: {failed[0]}"
    return _Decoded(list(good.values()), one, several, Finding(_GROUP, "decoding", "note", found, advice, values))


def verdict(*, model: float, decoding: float, reading: float | None, on_gpu: bool) -> Finding:
    """Say what a run would wait for.

    Args:
        model: images per second of the model.
        decoding: images per second of the threads that decode in a run.
        reading: images per second that can be read; None if that is unknown.
        on_gpu: whether the model runs on a GPU.
    """
    rates = {"model": model, "decoding": decoding}
    if reading is not None:
        rates["reading"] = reading
    slowest = min(rates, key=lambda name: rates[name])
    values: dict[str, Any] = {"bottleneck": slowest, "per_second": round(rates[slowest], 3)}
    others = " and ".join(f"{name} could do {pace(rate)}" for name, rate in rates.items() if name != slowest)
    found = f"{slowest}, at {pace(rates[slowest])}; {others}"
    if slowest == "model":
        advice = (
            "a GPU is many times faster; or share the images among machines, each with imagepivot features --task I/N"
            if not on_gpu
            else ""
        )
        return Finding(_GROUP, "bottleneck", "ok", found, advice, values)
    advice = (
        "put the images on a disk of this machine or in a bucket of its region; archives are read faster than single files"
        if slowest == "reading"
        else "give each GPU more cores, or store the images smaller"
        if on_gpu
        else "store the images smaller"
    )
    return Finding(_GROUP, "bottleneck", "note", found, advice, values)


def _rate(work: Callable[[], int], clock: Clock) -> float:
    """Return units per second of work that is repeated for some seconds."""
    done, started = 0, clock()
    while True:
        done += work()
        seconds = clock() - started
        if seconds >= _SECONDS:
            return done / seconds
