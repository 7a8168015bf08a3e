"""The extractor that is asked for, step by step: its weights, the devices that it runs on, its rates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pipelines.doctor.devices import Cuda, Forward, check_devices, forward_of
from pipelines.doctor.findings import Finding
from pipelines.doctor.machine import gigabytes
from pipelines.doctor.rates import check_rates, draw_photo, read_sample
from schemas.errors import InputError

if TYPE_CHECKING:
    from extractors import Extractor, ExtractorRequest
    from pipelines.inputs.images import ImageSource

__all__ = ["ModelCheck"]

_UNTRAINED = "random:0"
_DEFAULT_EXTRACTOR = "resnet50-pool"
_DRAWN = 8


class ModelCheck:
    """The checks of an extractor; what one of them finds out serves the next.

    Args:
        request: the extractor; None for none.
        device: the device that is asked for; None if there need not be one.
        cuda: ``torch.cuda``, unless a test brings its own.
    """

    def __init__(self, request: ExtractorRequest | None, device: str | None, cuda: Cuda | None = None) -> None:
        self._request = request
        self._is_right = request is not None
        self._device = device
        self._cuda = cuda

    def weights(self) -> Iterator[Finding]:
        """Look at the folder of weights that were fetched; find, fetch and check those of the extractor, as a run would.

        Raises:
            UsageError: there is no such extractor, or it lacks a package or an option.
        """
        yield from _check_cache()
        request = self._request
        if request is None:
            return
        self._is_right = False
        try:
            description = request.describe()
        except InputError as error:
            yield Finding("weights", "weights", "problem", str(error), values={"extractor": request.name})
            self._request, self._is_right = replace(request, weights=_UNTRAINED), True  # Rates do not depend on them.
            return
        self._is_right = True
        digest = description.parameters["weights"]["sha256"]
        values = {
            "extractor": description.spec.name,
            "weights": request.weights,
            "sha256": digest,
            "fingerprint": description.fingerprint,
        }
        found = f"{request.weights} fit {description.spec.name} (SHA-256 of the tensors {digest[:12]}…)"
        if description.parameters.get("untrained"):
            advice = "give --weights for features that mean something"
            yield Finding("weights", "weights", "note", f"{found}: untrained", advice, values)
        else:
            yield Finding("weights", "weights", "ok", found, values=values)

    def devices(self) -> Iterator[Finding]:
        """Find out which devices there are, and let the extractor, or a small network, run on each GPU.

        Raises:
            UsageError: the device that is asked for is not there.
        """
        wanted = self._device
        if wanted is None and self._request is not None:
            wanted = "auto"
        yield from check_devices(wanted, cuda=self._cuda, forward=self._forward if self._is_right else None)

    def rates(self, images: ImageSource | None, *, whole: bool) -> Iterator[Finding]:
        """Measure how fast images are read, decoded and computed.

        Args:
            images: images to read; None to draw some.
            whole: decode and compute, too, which takes some seconds.

        Raises:
            ImagepivotError: they cannot be read, or the device is not there.
        """
        reading: float | None = None
        sample: list[bytes] = []
        if images is not None:
            sample, finding = read_sample(images)
            reading = finding.values["images_per_second"]
            yield finding
        if not whole or (self._request is not None and not self._is_right):
            return  # Why it cannot be loaded has been said.
        from extractors.computing.devices import resolve_device

        device = self._device or "auto"
        extractor = self._load(device)
        on_gpu = resolve_device(device).type == "cuda"
        sample = sample or [draw_photo(number) for number in range(_DRAWN)]
        yield from check_rates(extractor, sample, on_gpu=on_gpu, reading=reading)

    def _load(self, device: str) -> Extractor:
        if self._request is None:
            from extractors import ExtractorRequest

            self._request, self._is_right = ExtractorRequest(_DEFAULT_EXTRACTOR, weights=_UNTRAINED), True
        if device == "cpu":  # Some precisions are those of GPUs alone.
            return replace(self._request, precision="fp32", compile=False).load(device)
        return self._request.load(device)

    def _forward(self) -> Forward:
        assert self._request is not None
        return forward_of(self._load, draw_photo(), self._request.name, self._request.precision)


def _check_cache() -> Iterator[Finding]:
    """Find out which weights have been fetched, where torch is installed."""
    if find_spec("torch") is None:
        return
    from extractors.weights.fetching import cache_folder

    folder = cache_folder()
    sizes = (
        {path.name: path.stat().st_size for path in sorted(folder.glob("[!.]*")) if path.is_file()} if folder.is_dir() else {}
    )
    found = f"{len(sizes)} files, {gigabytes(sum(sizes.values()))}, in {str(folder)!r}" if sizes else f"none in {str(folder)!r}"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    values = {"folder": str(folder), "files": sizes}
    if os.access(existing, os.W_OK | os.X_OK):
        yield Finding("weights", "fetched", "ok", found, values=values)
        return
    advice = "no others can be fetched: set TORCH_HOME to a folder that can be written, or give --weights a file"
    yield Finding("weights", "fetched", "note", f"{found}, which cannot be written", advice, values)
