"""Compiled models: through ``torch.compile``, on a CPU so that the bytes of features stay independent of threads and batches.

On a CPU the code is made for one thread and for the shape that every forward has, weights are frozen into it, and it is kept on
disk in a folder of imagepivot's own cache, which `extractors.request` names, or that of ``TORCHINDUCTOR_CACHE_DIR``, where later
runs and other workers of the machine find it. What torch compiles there is C++, so a compiler must be installed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from extractors.computing.cpu_parallel import run_single_threaded
from schemas.errors import UsageError

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
# One thread, whatever torch's number is while it compiles, and no helper processes.
_ON_CPU = {"freezing": True, "cpp.threads": 1, "compile_threads": 1}


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
            f"--compile on a CPU needs a C++ compiler, and there is no {' or '.join(names)} here: install one (Debian: apt install "
            "g++), name it with CXX, or leave --compile out"
        )


def compile_model(model: nn.Module, device: torch.device, *, enabled: bool) -> nn.Module:
    """Let a model be compiled at its first forward if ``enabled``, and return it. On a CPU, `warm_up_compile` has to follow.

    Raises:
        UsageError: see `check_compile`.
    """
    if not enabled:
        return model
    check_compile(device)
    if device.type == "cpu":
        model.compile(dynamic=False)
    else:
        model.compile()
    return model


def set_compile_cache(folder: Path) -> None:
    """Let torch keep what it compiles in a folder, unless the user has named another one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # Loads the compiler.

    # Torch puts its own folder there as soon as its compiler is imported, by whatever library, and reads it whenever it needs it.
    if os.environ.get(_FOLDER) in (None, default_cache_dir()):
        os.environ[_FOLDER] = str(folder)


def warm_up_compile(forward: Callable[[Tensor], Any], example: Tensor) -> None:
    """Run a compiled model on a CPU once, as every forward will, before threads do.

    Args:
        forward: runs the model.
        example: an input of the shape that all inputs will have.

    Raises:
        UsageError: the model cannot be compiled here.
    """
    from torch._inductor import config  # Loads the compiler.

    def compile_and_run(values: Tensor) -> None:
        # Each thread has a configuration of its own, and what is frozen is decided before the options of ``compile`` are read.
        with config.patch(_ON_CPU):
            forward(values)

    try:
        run_single_threaded(compile_and_run, [example])
    except (RuntimeError, OSError) as error:
        reason = first_line(error)[:300]
        raise UsageError(
            f"--compile: torch cannot compile the model on this machine ({reason}): leave --compile out"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message that is not blank, or else its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
