"""Devices, pinned copies and TF32 switches of torch. Importing this loads torch."""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from schemas.errors import UsageError

_DRIVER = "libcuda.so.1"


def resolve_device(device: str) -> torch.device:
    """Return the requested device.

    Args:
        device: ``cpu``, ``cuda`` (the first GPU), ``cuda:N``, or ``auto`` (the first GPU if available, else ``cpu``).

    Raises:
        UsageError: the name is invalid, or this host lacks the device.
    """
    available, count = torch.cuda.is_available(), torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda:0" if available else "cpu")
    if device == "cpu":
        return torch.device("cpu")
    kind, colon, digits = device.partition(":")
    if kind == "mps":
        raise UsageError(
            f"device is {device!r}, and GPUs of Apple are unsupported, as their results are untested: pass --device cpu"
        )
    if kind != "cuda" or (colon and not (digits.isascii() and digits.isdigit())):
        raise UsageError(f"device is {device!r}, expected 'cpu', 'cuda', 'cuda:N' or 'auto'")
    index = int(digits) if colon else 0
    if not available or index >= count:
        cause, remedy = missing_gpu()
        raise UsageError(
            f"device {device!r} is not on this host: torch.cuda.is_available() is {available}, torch.cuda.device_count() is "
            f"{count}, torch is {torch.__version__}. {cause}: {remedy}; or pass --device cpu, which is many times slower"
        )
    return torch.device("cuda", index)


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device supports a precision.

    Args:
        precision: ``fp32``; ``tf32`` (float32 with products of 10-bit mantissas); ``bf16`` or ``fp16`` (mixed
            precision: convolutions and matrix products in 16 bits, results in float32).
        device: from `resolve_device`.

    Raises:
        UsageError: the device does not support the precision.
    """
    if device.type == "cpu" and precision in ("tf32", "fp16"):
        raise UsageError(f"precision {precision!r} needs a GPU, but the device is 'cpu': pass fp32 or bf16, or another device")


def driver_cuda() -> int | None:
    """Return the newest CUDA of NVIDIA's driver, e.g. 12040 for 12.4, or None."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return None
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value


def missing_gpu() -> tuple[str, str]:
    """Return why torch finds no GPU, and the remedy."""
    built, newest = torch.version.cuda, driver_cuda()
    if built is None:
        return "this torch is built without CUDA", "install another build, see pytorch.org"
    if newest is None:
        return (
            f"NVIDIA's driver is missing ({_DRIVER} is not found; torch is built for CUDA {built})",
            "install it; start a container with docker run --gpus all, on Google's machines with "
            "LD_LIBRARY_PATH=/usr/local/nvidia/lib64",
        )
    runs = f"NVIDIA's driver runs CUDA {newest // 1000}.{newest % 1000 // 10}, torch is built for CUDA {built}"
    if newest // 1000 < int(built.partition(".")[0]):  # A driver runs every minor version of its CUDA.
        return f"the driver is too old: {runs}", "update it, or install a torch for an older CUDA, see pytorch.org"
    return f"no GPU is visible: {runs}", "see nvidia-smi, and check CUDA_VISIBLE_DEVICES"


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Copy values to a device; to a GPU asynchronously through pinned memory."""
    if device.type != "cuda" or values.device == device:
        return values.to(device)
    pinned = values if values.is_pinned() else values.pin_memory()
    return pinned.to(device, non_blocking=True)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Switch TF32 on or off for all float32 products of cuBLAS and cuDNN.

    Torch has old and new switches. Reading an old switch that contradicts a new one is an error, e.g. in ``torch.compile``.
    Therefore both are set, the old ones first, since they set new ones, too. Switches that already contradict stay.
    """
    cudnn = torch.backends.cudnn
    new = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in new]
    old = _read_switch(lambda: cudnn.allow_tf32), _read_switch(torch.get_float32_matmul_precision)

    def switch_to(convolutions: Any, products: Any, values: Sequence[str]) -> None:
        if old[0] is not None:
            cudnn.allow_tf32 = convolutions
        if old[1] is not None:
            torch.set_float32_matmul_precision(products)
        for switch, value in zip(new, values, strict=True):
            switch.fp32_precision = value

    value = "tf32" if tf32 else "ieee"
    switch_to(tf32, "high" if tf32 else "highest", [value, value, value, "ieee"])  # The last is for CPUs.
    try:
        yield
    finally:
        switch_to(*old, before)


def _read_switch(read: Callable[[], Any]) -> Any:
    """Return the value of an old switch; None if new switches contradict it."""
    try:
        return read()
    except RuntimeError:
        return None
