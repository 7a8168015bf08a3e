"""Models compiled by ``torch.compile``.

On a CPU, code is compiled for one thread and one input shape, with frozen weights. Features therefore do not
depend on thread count and batch size. This needs a C++ compiler. Later runs and other workers reuse the code
from imagepivot's cache or from ``TORCHINDUCTOR_CACHE_DIR``.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extractors.computing.cpu_parallel import run_single_threaded
from schemas.errors import UsageError, first_line

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_CPU_CONFIG = {"freezing": True, "cpp.threads": 1, "compile_threads": 1}  # Without helper processes.


def check_compile(device: torch.device) -> None:
    """Check that models can be compiled for a device.

    Raises:
        UsageError: the device is a CPU, and this machine has no C++ compiler.
    """
    if device.type != "cpu":
        return
    asked = os.environ.get("CXX")
    names = (asked,) if asked else ("g++", "clang++", "c++")
    if not any(shutil.which(name) for name in names):
        raise UsageError(
            f"--compile on a CPU needs a C++ compiler, but {' or '.join(names)} is not installed: install "
            "one (Debian: apt install g++), name it with CXX, or leave --compile out"
        )


def compile_model(model: nn.Module, device: torch.device, *, enabled: bool) -> nn.Module:
    """Set a model up to be compiled at its first forward if ``enabled``.

    Returns the model. On a CPU call `warm_up_compile` next.
    """
    if enabled:
        model.compile(dynamic=False if device.type == "cpu" else None)
    return model


def set_compile_cache(folder: Path) -> None:
    """Set torch's cache of compiled code, unless the user has set one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # Loads the compiler.

    # Importing the compiler sets the variable to torch's default.
    if os.environ.get(_FOLDER) in (None, default_cache_dir()):
        os.environ[_FOLDER] = str(folder)


def warm_up_compile(forward: Callable[[Tensor], Any], example: Tensor) -> None:
    """Run a compiled model on a CPU once, before threads do.

    The example has the shape of all later inputs.

    Raises:
        UsageError: the model cannot be compiled here.
    """
    from torch._inductor import config  # Loads the compiler.

    def compile_and_run(values: Tensor) -> None:
        # The configuration is per thread, and freezing is decided before the options of ``compile`` are read.
        with config.patch(_CPU_CONFIG):
            forward(values)

    try:
        run_single_threaded(compile_and_run, [example])
    except (RuntimeError, OSError) as error:
        reason = first_line(error)[:300]
        raise UsageError(f"torch cannot compile the model on this machine ({reason}): leave --compile out") from error
