"""What torch computes on: whether it sees the GPUs, and whether a network gives on each of them what it gives on the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipelines.doctor.findings import Finding, first_line
from pipelines.doctor.machine import gigabytes
from schemas.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from extractors import Extractor

__all__ = ["TOLERANCES", "Cuda", "Forward", "check_devices", "check_forward", "forward_of", "visibility"]

_GROUP = "devices"
_DRIVER = Path("/proc/driver/nvidia/version")
_NODES = ("/dev/nvidia0", "/dev/nvidiactl", str(_DRIVER), "/dev/dxg")
"""Files by which the system shows a GPU of NVIDIA's, whatever torch says."""

TOLERANCES = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1, "fp16": 2e-2}
"""Greatest difference between GPU and CPU, relative to the greatest value, by precision: what the tests of the extractors allow,
and room for networks that are deeper."""

_ADVICE = (
    ("no kernel image", "this torch holds no code for this GPU: install a build of torch for it, see pytorch.org"),
    ("out of memory", "another process uses its memory: see nvidia-smi"),
    ("driver", "update the driver, or install a torch for an older CUDA"),
    ("ECC", "the GPU is broken, or needs a reset"),
)


class Cuda(Protocol):
    """What is asked of ``torch.cuda``; tests have one of their own."""

    def is_available(self) -> bool:
        """Whether there is a GPU that torch can use."""

    def device_count(self) -> int:
        """Return the number of GPUs."""

    def get_device_name(self, device: int) -> str:
        """Return what a GPU is called."""

    def get_device_capability(self, device: int) -> tuple[int, int]:
        """Return the generation of a GPU, e.g. (9, 0)."""

    def mem_get_info(self, device: int) -> tuple[int, int]:
        """Return bytes that are free, and all bytes."""

    def max_memory_allocated(self, device: int) -> int:
        """Return the most bytes that torch has held on a GPU so far."""


class Forward(NamedTuple):
    """A network that can run on any device.

    Attributes:
        what: what it is, in words.
        run: returns its values on a device, an array of any shape.
        precision: the precision on a GPU.
        is_comparable: whether each value on a GPU belongs to the same one on the CPU; not where the network makes choices.
    """

    what: str
    run: Callable[[str], np.ndarray]
    precision: str = "fp32"
    is_comparable: bool = True


def check_devices(
    device: str | None, *, cuda: Cuda | None = None, forward: Callable[[], Forward] | None = None
) -> Iterator[Finding]:
    """Find out which devices torch has, and whether they compute.

    Args:
        device: the device that is asked for; None if torch need not be there.
        cuda: ``torch.cuda``, unless a test brings its own.
        forward: makes what runs on each GPU; by default a small network.

    Raises:
        UsageError: the device that is asked for is not there, or torch is not.
    """
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError:
        if device is not None:
            raise UsageError(
                f"device is {device!r}, and torch is not installed: pip install 'imagepivot[extractors]'"
            ) from None
        found, advice = "torch is not installed", "for features and training: pip install 'imagepivot[extractors]'"
        yield Finding(_GROUP, "torch", "note", found, advice, {"version": None})
        return
    cuda = cuda or torch.cuda
    built = torch.version.cuda or getattr(torch.version, "hip", None)
    count = cuda.device_count() if cuda.is_available() else 0
    values = {
        "version": torch.__version__,
        "built_for": built,
        "gpus": count,
        "threads": torch.get_num_threads(),
        "driver": _driver(),
    }
    found = f"{torch.__version__}, built for {f'CUDA {built}' if built else 'the CPU only'}, {values['threads']} threads"
    yield Finding(_GROUP, "torch", "ok", found, values=values)
    if count == 0:
        if device not in (None, "auto", "cpu"):
            from extractors.computing.devices import resolve_device

            resolve_device(device)  # Its error says what is wrong.
        seen = [node for node in _NODES if Path(node).exists()]
        yield visibility(seen, built, os.environ.get("CUDA_VISIBLE_DEVICES"))
        return
    asked = _numbers(device, count)
    if not asked and device != "cpu":
        from extractors.computing.devices import resolve_device

        resolve_device(str(device))
    network = (forward or _small_network)() if asked else None
    for number in asked:
        yield _facts(cuda, number)
        if network is not None:
            yield check_forward(number, network, cuda)


def visibility(nodes: Sequence[str], built: str | None, chosen: str | None) -> Finding:
    """Say why torch sees no GPU.

    Args:
        nodes: files by which the system shows that there is one.
        built: version of CUDA that torch is built for; None if for the CPU only.
        chosen: the variable ``CUDA_VISIBLE_DEVICES``; None if it is not set.
    """
    values = {"nodes": list(nodes), "built_for": built, "cuda_visible_devices": chosen}
    if not nodes:
        return Finding(_GROUP, "gpu", "ok", "none; models run on the CPU", values=values)
    found = f"the system shows one ({nodes[0]}), and torch does not see it"
    if not built:
        advice = "this torch is built for the CPU only: install one for CUDA, see pytorch.org"
    elif chosen in ("", "-1"):
        advice = f"CUDA_VISIBLE_DEVICES is {chosen!r}, which hides it: unset it, or name the GPU's number"
    else:
        advice = (
            "see whether nvidia-smi lists it; in a container: docker run --gpus all; else the driver is too old for this torch"
        )
    return Finding(_GROUP, "gpu", "note", found, advice, values)


def check_forward(number: int, forward: Forward, cuda: Cuda) -> Finding:
    """Run a network on the CPU and on a GPU, and compare what they give.

    Args:
        number: number of the GPU.
        forward: the network.
        cuda: ``torch.cuda``.
    """
    import numpy as np

    name, tolerance = f"cuda:{number}", TOLERANCES[forward.precision]
    expected = forward.run("cpu")
    try:
        found = forward.run(name)
    except RuntimeError as error:  # Also torch's own for full memory.
        advice = next(
            (advice for text, advice in _ADVICE if text in str(error)), "see nvidia-smi, and the driver's log (dmesg)"
        )
        return Finding(_GROUP, name, "problem", f"{forward.what} fails on it: {first_line(error)}", advice)
    held = cuda.max_memory_allocated(number)
    values: dict[str, Any] = {"what": forward.what, "bytes": held, "precision": forward.precision}
    if not held:
        advice = "the result came from elsewhere: check that this torch is one for CUDA"
        return Finding(_GROUP, name, "problem", f"{forward.what} left no trace in its memory", advice, values)
    if not np.isfinite(found).all():
        advice = (
            f"the GPU or its driver is faulty: try --device cpu{' and --precision fp32' if forward.precision != 'fp32' else ''}"
        )
        return Finding(_GROUP, name, "problem", f"{forward.what} gives values that are no numbers", advice, values)
    if not forward.is_comparable:
        text = f"{forward.what} runs on it; its choices are not compared with the CPU's"
        return Finding(_GROUP, name, "ok", text, values=values)
    if found.shape != expected.shape:
        return Finding(_GROUP, name, "problem", f"{forward.what} gives {found.shape}, on the CPU {expected.shape}", "", values)
    scale = float(np.abs(expected).max()) or 1.0
    values["difference"] = float(np.abs(found.astype(np.float64) - expected).max()) / scale
    text = f"{forward.what} differs from the CPU by {values['difference']:.1e} of the greatest value"
    if values["difference"] <= tolerance:
        return Finding(_GROUP, name, "ok", f"{text}, in {forward.precision}", values=values)
    advice = "the GPU or its driver is faulty: run the test programs of its maker, or use --device cpu"
    return Finding(_GROUP, name, "problem", f"{text}, at most {tolerance:.0e} is expected", advice, values)


def forward_of(load: Callable[[str], Extractor], data: bytes, what: str, precision: str) -> Forward:
    """Return the network of an extractor, on one image.

    Args:
        load: loads the extractor on a device.
        data: bytes of the image.
        what: name of the extractor.
        precision: its precision.
    """
    from extractors import RegionExtractor, decode

    def compute(extractor: Extractor) -> np.ndarray:
        columns = extractor.extract_columns(extractor.collate([extractor.preprocess(decode(data))]))
        return columns["features" if "features" in columns else "feature"]

    on_cpu = load("cpu")
    expected = compute(on_cpu)
    return Forward(
        what,
        lambda device: expected if device == "cpu" else compute(load(device)),
        precision,
        is_comparable=not isinstance(on_cpu, RegionExtractor),
    )


def _driver(path: Path = _DRIVER) -> str | None:
    """Return what the driver of NVIDIA's GPUs says of itself; None where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return None


def _facts(cuda: Cuda, number: int) -> Finding:
    free, total = cuda.mem_get_info(number)
    major, minor = cuda.get_device_capability(number)
    name = cuda.get_device_name(number)
    values = {"number": number, "name": name, "capability": f"{major}.{minor}", "free": free, "total": total}
    found = f"{name}, {gigabytes(free)} of {gigabytes(total)} free"
    if free >= total / 10:
        return Finding(_GROUP, f"cuda:{number}", "ok", found, values=values)
    return Finding(_GROUP, f"cuda:{number}", "note", found, "another process uses it: see nvidia-smi", values)


def _numbers(device: str | None, count: int) -> list[int]:
    """Return the numbers of the GPUs that a request means; none if it means another device."""
    if device in (None, "auto", "cuda"):
        return list(range(count))
    kind, _, number = str(device).partition(":")
    return [int(number)] if kind == "cuda" and number.isdigit() and int(number) < count else []


def _small_network() -> Forward:
    """Return a network of one convolution and one product, with fixed weights, that needs no file."""
    import torch

    from extractors.computing.devices import numerics

    def run(device: str) -> np.ndarray:
        random = torch.Generator().manual_seed(0)
        pixels, kernel, matrix = (
            torch.randn(*shape, generator=random).to(device) for shape in ((4, 3, 64, 64), (16, 3, 3, 3), (16, 32))
        )
        with numerics("fp32", torch.device(device)), torch.inference_mode():
            maps = torch.nn.functional.conv2d(pixels, kernel, padding=1).relu()
            return (maps.mean(dim=(2, 3)) @ matrix).cpu().numpy()

    return Forward("a small network", run)
