"""The parts about extractors: waits, speed, the share in which the GPU works, memory, and whether CPU and GPU agree."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

import extractors
from extractors import ExtractorRequest
from tests.benchmarks.gpu.clocks import busy_share, nothing_waits, rate, waits_of
from tests.benchmarks.gpu.reporting import Part, Row, Settings, UnmeasurableError
from tests.benchmarks.gpu.subjects import SUBJECTS, Subject, bare_model, fastest, photographs, precisions_of

_BY_NAME = {subject.name: subject for subject in SUBJECTS}
_PHOTOGRAPHS = 8  # Repeated where a batch is larger.


def _subjects(settings: Settings) -> list[Subject]:
    return [subject for subject in SUBJECTS if subject.is_quick or not settings.is_quick]


def _load(name: str, precision: str, settings: Settings) -> extractors.Extractor:
    return ExtractorRequest(name, weights="random:0", precision=precision).load(str(settings.device))


@lru_cache(maxsize=1)
def _loaded(name: str, precision: str, settings: Settings) -> extractors.Extractor:
    """The extractor of consecutive rows."""
    return _load(name, precision, settings)


@lru_cache(maxsize=2)
def _pixels(name: str) -> list[torch.Tensor]:
    extractor = _load(name, "fp32", Settings(torch.device("cpu")))
    return [extractor.preprocess(image) for image in photographs(_PHOTOGRAPHS)]


def _batch(extractor: extractors.Extractor, name: str, images: int) -> Any:
    pixels = _pixels(name)
    return extractor.collate([pixels[i % len(pixels)] for i in range(images)])


def _middle(subject: Subject, settings: Settings) -> int:
    return 2 if settings.is_quick else subject.batches[len(subject.batches) // 2]


def _by_precision(settings: Settings) -> list[tuple[str, str]]:
    return [(subject.name, precision) for subject in _subjects(settings) for precision in precisions_of(settings.device)]


# --- speed -----------------------------------------------------------------------------------------------------------


def _speed_subjects(settings: Settings) -> Sequence[tuple[Any, ...]]:
    return [
        (name, precision, images)
        for name, precision in _by_precision(settings)
        for images in ((1, 2) if settings.is_quick else _BY_NAME[name].batches)
    ]


def _measure_speed(settings: Settings, name: str, precision: str, images: int) -> Row:
    extractor = _loaded(name, precision, settings)
    batch = _batch(extractor, name, images)
    if settings.is_gpu:
        torch.cuda.reset_peak_memory_stats(settings.device)
    ours = rate(settings, lambda: extractor.extract_columns(batch), images)
    found: Row = {"images_per_second": ours}
    if settings.is_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
    bare = bare_model(name, settings.device, precision)
    if bare is None:
        return {**found, "reason": "no package has a model to compare with"}
    model, make_batch = bare
    values = make_batch(images)
    with fastest(precision):
        found["bare_images_per_second"] = rate(settings, lambda: model(values), images)
    found["ratio"] = ours / found["bare_images_per_second"]
    return found if settings.is_gpu else {**found, "reason": "peak_bytes: the device is the CPU"}


# --- waits and work --------------------------------------------------------------------------------------------------


def _measure_waits(settings: Settings, name: str, precision: str) -> Row:
    subject = _BY_NAME[name]
    extractor = _loaded(name, precision, settings)
    batch = _batch(extractor, name, _middle(subject, settings))
    extractor.extract_columns(batch)  # Libraries that load, and memory that is reserved, wait too.
    with waits_of(settings) as lines:
        extractor.extract_columns(batch)
    found: Row = {"waits": lines.total(), "lines": ", ".join(f"{line} × {count}" for line, count in lines.most_common())}
    try:
        with nothing_waits():
            extractor.extract_columns(batch)
        found["other_waits"] = "none"
    except RuntimeError as error:
        found["other_waits"] = str(error).splitlines()[0]
    return found


def _measure_busy(settings: Settings, name: str, precision: str) -> Row:
    images = _middle(_BY_NAME[name], settings)
    extractor = _loaded(name, precision, settings)
    batch = _batch(extractor, name, images)
    share, events = busy_share(settings, lambda: extractor.extract_columns(batch), 1 if settings.is_quick else 5)
    return {"batch": images, "busy_share": share, "kernels_and_copies": events}


# --- memory ----------------------------------------------------------------------------------------------------------


class _Notes(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _measure_memory(settings: Settings, name: str) -> Row:
    """Take away so much memory that a batch does not fit, and see that its halves give the same."""
    images = _BY_NAME[name].batches[-1]
    torch.cuda.empty_cache()
    extractor = _load(name, "fp32", settings)
    batch = _batch(extractor, name, images)
    held = torch.cuda.memory_allocated(settings.device)
    torch.cuda.reset_peak_memory_stats(settings.device)
    expected = extractor.extract_columns(batch)
    peak = torch.cuda.max_memory_allocated(settings.device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(settings.device).total_memory
    notes, logger = _Notes(), logging.getLogger("extractors")
    logger.addHandler(notes)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (held + (peak - held) * 0.4) / total), settings.device)
    try:
        found = extractor.extract_columns(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, settings.device)
        logger.removeHandler(notes)
    row: Row = {
        "batch": images,
        "weight_bytes": held,
        "peak_bytes": peak,
        "message": "; ".join(notes.messages) or "none: the batch fitted",
    }
    return {**row, **_compare(found, expected)}


# --- agreement -------------------------------------------------------------------------------------------------------


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the greatest difference, relative to the greatest value."""
    return float(np.abs(found.astype(np.float64) - expected).max() / (np.abs(expected).max() or 1.0))


@lru_cache(maxsize=1)
def _on_cpu(name: str, images: int) -> dict[str, np.ndarray]:
    extractor = _load(name, "fp32", Settings(torch.device("cpu")))
    return extractor.extract_columns(_batch(extractor, name, images))


def _measure_agreement(settings: Settings, name: str, precision: str) -> Row:
    images = 2
    expected, extractor = _on_cpu(name, images), _loaded(name, precision, settings)
    batch = _batch(extractor, name, images)
    found, again = extractor.extract_columns(batch), extractor.extract_columns(batch)
    alone = [extractor.extract_columns(extractor.collate([pixels])) for pixels in batch]
    column = "features" if "features" in found else "feature"
    rows: Row = {
        "repeats_bit_for_bit": all(np.array_equal(found[key], again[key], equal_nan=True) for key in found),
        "same_boxes": "no regions",
    }
    if not np.isfinite(found[column]).all():
        return {**rows, "reason": "NaN or infinite values: the feature maps of random weights overflow"}
    rows["difference_of_one_image_alone"] = _difference(np.concatenate([one[column] for one in alone]), found[column])
    rows["cosine"] = _least_cosine(found[column], expected[column])
    return {**rows, **_compare(found, expected)}


def _compare(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Row:
    if "features" not in found:
        return {"difference": _difference(found["feature"], expected["feature"]), "same_boxes": "no regions"}
    return {"same_boxes": _same_boxes(found, expected), "reason": "regions may be others, or in another order: see same_boxes"}


def _least_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    a, b = (values.reshape(len(values), -1).astype(np.float64) for values in (found, expected))
    return float(((a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))).min())


def _same_boxes(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    """Count the boxes that are the same to a pixel, of all that the CPU keeps."""
    same = total = 0
    for i, number in enumerate(expected["num_regions"]):
        ours, theirs = found["boxes"][i, : found["num_regions"][i]], expected["boxes"][i, :number]
        near = (np.abs(theirs[:, None] - ours[None]).max(2) < 1).any(1) if len(ours) else np.zeros(len(theirs), bool)
        same, total = same + int(near.sum()), total + int(number)
    return f"{same} of {total}"


def _need_memory(settings: Settings) -> None:
    settings.need_gpu("its memory cannot be limited")
    if settings.is_quick:
        raise UnmeasurableError("--quick leaves it out")


_EXTRACTOR = ("extractor", "precision")
PARTS = (
    Part(
        "agreement",
        "features of the device and those of the CPU in fp32, with random weights: the greatest difference by the greatest value",
        _EXTRACTOR,
        ("difference", "cosine", "same_boxes", "repeats_bit_for_bit", "difference_of_one_image_alone"),
        _by_precision,
        _measure_agreement,
    ),
    Part(
        "waits",
        "waits of the host for a batch under torch.cuda.set_sync_debug_mode, and whether any is not for the result",
        _EXTRACTOR,
        ("waits", "lines", "other_waits"),
        _by_precision,
        _measure_waits,
        lambda settings: settings.need_gpu("nothing waits for it"),
    ),
    Part(
        "speed",
        "images a second of the extractor, preprocessed in memory, and of the bare model over ready tensors on the device",
        (*_EXTRACTOR, "batch"),
        ("images_per_second", "bare_images_per_second", "ratio", "peak_bytes"),
        _speed_subjects,
        _measure_speed,
    ),
    Part(
        "busy",
        "share of the time of a batch in which the GPU runs a kernel or copies, by torch's profiler",
        _EXTRACTOR,
        ("batch", "busy_share", "kernels_and_copies"),
        _by_precision,
        _measure_busy,
        lambda settings: settings.need_gpu("it runs no kernels"),
    ),
    Part(
        "memory",
        "a batch that does not fit, because memory was taken away",
        ("extractor",),
        ("batch", "weight_bytes", "peak_bytes", "message", "difference", "same_boxes"),
        lambda settings: [(subject.name,) for subject in _subjects(settings)],
        _measure_memory,
        _need_memory,
    ),
)
