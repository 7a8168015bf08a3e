"""Checks of an installation: versions, device, weights and output location."""

from __future__ import annotations

import platform
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from schemas.errors import ImagepivotError, UsageError, first_line
from schemas.escapes import redact
from schemas.storage.folder import TEMPORARY_MARK, Folder
from schemas.storage.locations import STORE, check_location, is_remote

if TYPE_CHECKING:
    import numpy as np
    from packaging.specifiers import SpecifierSet

    from extractors import ExtractorRequest

_PACKAGES = ("torch", "torchvision", "apache-beam", "numpy", "pyarrow", "pillow", "timm", "transformers")
_COLLECTIONS = ("all", "dev")
_TOLERANCE = 1e-4
"""Largest error of float32 on a device, relative to the largest value in float64 on the CPU."""

_NVIDIA = Path("/dev/nvidiactl")
"""Device of NVIDIA's driver, also in containers."""

_CUDA_ADVICE = {
    "no kernel image": "this torch has no code for this GPU: install a build of torch for it, see pytorch.org",
    "out of memory": "another process uses its memory: see nvidia-smi",
    "driver": "update the driver, or install a torch for an older CUDA",
}


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Attributes:
        result: measured state; keys in addresses are replaced by ``***``.
        advice: remedy; empty for status ``ok``.
    """

    name: str
    status: Literal["ok", "warning", "failed"]
    result: str
    advice: str = ""

    def __str__(self) -> str:
        """Return one line, and a second line with the advice."""
        status = self.status.upper() if self.status == "failed" else self.status
        line = f"{status:<8} {self.name:<10}  {self.result}"
        return f"{line}\n{'':>9}-> {self.advice}" if self.advice else line


def run_checks(output: str | None = None, extractor: ExtractorRequest | None = None, device: str = "auto") -> list[Check]:
    """Check versions and device, and optionally weights and an output location.

    Errors are checks of status ``failed``. Without weights to download and an output in a store no network is used.

    Args:
        output: local folder, which need not exist, ``gs://...`` or ``s3://...``.
        extractor: extractor to load and run once.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``.

    Example:
        >>> [check.name for check in run_checks() if check.status == "failed"]  # doctest: +SKIP
        []
    """
    checks = _attempt("versions", check_versions())
    on_device = _attempt("device", check_device(device))
    checks += on_device
    if extractor is not None:
        can_run = all(check.status != "failed" for check in on_device)
        checks += _attempt("weights", check_weights(extractor, device if can_run else None))
    if output is not None:
        checks += _attempt("output", check_output(output))
    return [replace(check, result=redact(check.result), advice=redact(check.advice)) for check in checks]


def check_versions() -> Iterator[Check]:
    """Compare installed versions with the requirements, and list the extras."""
    try:
        version = metadata.version("imagepivot")
    except metadata.PackageNotFoundError:
        yield Check("imagepivot", "failed", "the distribution 'imagepivot' is not installed", "pip install imagepivot")
        return
    yield Check("imagepivot", "ok", f"{version}, Python {platform.python_version()}, {platform.platform()}")
    yield Check("packages", "ok", ", ".join(f"{name} {installed}" for name in _PACKAGES if (installed := _version_of(name))))
    if find_spec("packaging") is None:  # It comes with the extras; requirements are not compared without it.
        return
    names = metadata.metadata("imagepivot").get_all("Provides-Extra", [])
    extras = {name: _requirements("imagepivot", name) for name in names if name not in _COLLECTIONS}
    mismatches: dict[str, Check] = {}
    for extra, requirements in {"": _requirements("imagepivot"), **extras}.items():
        for name, specifier in requirements.items():
            installed = _version_of(name)
            if installed and not specifier.contains(installed, prereleases=True) and name not in mismatches:
                advice = f"pip install --upgrade '{f'imagepivot[{extra}]' if extra else 'imagepivot'}'"
                mismatches[name] = Check(name, "warning", f"{installed} is installed, expected {specifier}", advice)
    yield from mismatches.values()
    complete = [extra for extra, requirements in extras.items() if all(map(_version_of, requirements))]
    missing = [extra for extra in extras if extra not in complete]
    yield Check("extras", "ok", f"installed: {', '.join(complete) or 'none'}; not installed: {', '.join(missing) or 'none'}")


def check_device(device: str = "auto") -> Iterator[Check]:
    """Compute a small network on a device, and compare the result with the CPU's.

    ``cuda`` is every GPU, ``auto`` every GPU, else the CPU.

    Raises:
        UsageError: the device or torch is missing.
    """
    advice = "for features and training: pip install 'imagepivot[extractors]'"
    try:
        import torch
    except ModuleNotFoundError:
        if device != "auto":
            raise UsageError(f"device is {device!r}, and torch is not installed, {advice}") from None
        yield Check("device", "warning", "torch is not installed", advice)
        return
    from schemas.process.devices import driver_cuda, missing_gpu, resolve_device

    resolved = resolve_device(device)
    if resolved.type == "cuda" and device in ("auto", "cuda"):
        for index in range(torch.cuda.device_count()):
            yield compare_with_cpu(f"cuda:{index}", torch.cuda.get_device_name(index))
    elif resolved.type == "cuda":
        yield compare_with_cpu(str(resolved), torch.cuda.get_device_name(resolved))
    else:
        if not torch.cuda.is_available():
            cause, remedy = missing_gpu()
            has_nvidia = _NVIDIA.exists() or driver_cuda() is not None
            yield Check("gpu", "warning", cause, remedy) if has_nvidia else Check("gpu", "ok", f"none; {cause}")
        yield compare_with_cpu("cpu", f"{torch.get_num_threads()} threads")


def compare_with_cpu(device: str, title: str) -> Check:
    """Compare a small network in float32 on a device with float64 on the CPU."""
    import numpy as np

    expected = _run_network("cpu", "float64")
    try:
        values = _run_network(device, "float32")
    except RuntimeError as error:  # Also torch's error for full memory.
        advice = next((advice for text, advice in _CUDA_ADVICE.items() if text in str(error)), "see nvidia-smi and dmesg")
        cause = f"{type(error).__name__}: {first_line(error)}"
        return Check(device, "failed", f"{title}: a small network fails with {cause}", advice)
    difference = float(np.abs(values - expected).max() / np.abs(expected).max())
    result = f"{title}: a small network differs from the CPU in float64 by {difference:.1e} of the largest value"
    if difference <= _TOLERANCE:  # False for NaN.
        return Check(device, "ok", result)
    advice = "the device, its driver or this build of torch is faulty: update them, or use another --device"
    return Check(device, "failed", f"{result}, expected at most {_TOLERANCE:.0e}", advice)


def check_weights(request: ExtractorRequest, device: str | None = "auto") -> Iterator[Check]:
    """Verify the weights of an extractor, and run it on one image.

    Without a device the weights are only downloaded and verified.

    Raises:
        ImagepivotError: the extractor or its weights are missing, damaged or of another model.
    """
    description = request.describe()
    result = f"{request.weights} for {description.spec.name}, SHA-256 {description.parameters['weights']['sha256'][:12]}…"
    if description.parameters.get("untrained"):
        yield Check("weights", "warning", f"{result}, untrained", "give --weights of a trained model")
    else:
        yield Check("weights", "ok", result)
    if device is None:
        return
    import numpy as np
    from PIL import Image

    extractor = request.load(device)
    image = Image.radial_gradient("L").convert("RGB").resize((500, 375))
    columns = extractor.extract_columns(extractor.collate([extractor.preprocess(image)]))
    values = columns["features" if "features" in columns else "feature"]
    result = f"{description.spec.name} computes {values.dtype}{list(values.shape[1:])} for one image"
    if np.isfinite(values).all():
        yield Check("extractor", "ok", result)
    else:
        yield Check("extractor", "failed", f"{result}, with NaN or infinity", "give other --weights, or another --device")


def check_output(location: str) -> Iterator[Check]:
    """Write and delete a file in an output location, and the folders that it needs.

    Raises:
        ImagepivotError: no file can be written or deleted.
    """
    check_location(location)
    if is_remote(location) and not STORE.fullmatch(location):
        raise UsageError(f"cannot write to {location!r}: give a local folder, gs://BUCKET/PATH or s3://BUCKET/PATH")
    folder = Folder(location)
    folder.check_writable()
    paths = (folder.local_path, *folder.local_path.parents) if folder.is_local else ()
    missing = [path for path in paths if not path.exists()]
    name = f".doctor{TEMPORARY_MARK}{uuid.uuid4().int >> 64}"
    try:
        folder.put(name, b"imagepivot")
        folder.delete(name)
    finally:
        for path in missing:
            with suppress(OSError):  # Another process may have written a file.
                path.rmdir()
    yield Check("output", "ok", f"a file was written to {location!r} and deleted")


def _attempt(name: str, checks: Iterator[Check]) -> list[Check]:
    """Collect checks; an error ends them with a failed one."""
    results: list[Check] = []
    try:
        results.extend(checks)
    except ImagepivotError as error:
        results.append(Check(name, "failed", str(error)))
    except Exception as error:  # noqa: BLE001 -- any fault of a machine is a result
        results.append(Check(name, "failed", f"{type(error).__name__}: {first_line(error)}", "report it with this output"))
    return results


def _requirements(distribution: str, extra: str = "") -> dict[str, SpecifierSet]:
    """Return the versions that an extra requires by package, with nested extras."""
    from packaging.requirements import Requirement

    specifiers: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, metadata.requires(distribution) or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            specifiers[requirement.name] = requirement.specifier
            for nested in requirement.extras if _version_of(requirement.name) else ():
                specifiers = {**_requirements(requirement.name, nested), **specifiers}
    return specifiers


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run_network(device: str, dtype: str) -> np.ndarray:
    """Compute a small network with fixed weights; float[4, 32]."""
    import torch

    from extractors.computing.devices import precision_context

    generator = torch.Generator().manual_seed(0)
    pixels, kernel, matrix = (
        torch.randn(*shape, generator=generator).to(device, getattr(torch, dtype))
        for shape in ((4, 3, 64, 64), (16, 3, 3, 3), (16, 32))
    )
    with precision_context("fp32", torch.device(device)), torch.inference_mode():
        maps = torch.nn.functional.conv2d(pixels, kernel, padding=1).relu()
        return (maps.mean(dim=(2, 3)) @ matrix).cpu().numpy()
