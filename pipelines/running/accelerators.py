"""GPUs of workers on other machines, by name: what they become among Beam's hints and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    WorkerOptions,
)

from schemas.errors import UsageError

__all__ = ["Accelerator", "check_machine"]

_ONE_PROCESS = "no_use_multiple_sdk_containers"
_SEVERAL_PROCESSES = "use_multiple_sdk_containers"


@dataclass(frozen=True)
class Accelerator:
    """GPUs of each worker that runs the model.

    Attributes:
        type: the runner's name of the GPU, e.g. ``nvidia-l4``.
        count: number of GPUs of a worker.

    Raises:
        UsageError: the name is not one, or the number is below 1.
    """

    type: str
    count: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]*", self.type):
            raise UsageError(f"--gpu is {self.type!r}, expected the name of one type, e.g. nvidia-l4")
        if self.count < 1:
            raise UsageError(f"--gpus-per-worker is {self.count}, expected 1 or more")

    def hints(self) -> dict[str, str]:
        """Return Beam's resource hints for a step that needs the GPUs: one active bundle for each of them."""
        return {
            "accelerator": f"type:{self.type};count:{self.count};install-nvidia-driver",
            "max_active_bundles_per_worker": str(self.count),
        }

    def check(self, options: PipelineOptions) -> None:
        """Check that the flags for Beam do not ask for GPUs, or for processes, in another way.

        Raises:
            UsageError: they do.
        """
        experiments = options.view_as(DebugOptions).experiments or []
        for name, option in _settings(options):
            if option.startswith(("worker_accelerator", "accelerator")):
                raise UsageError(
                    f"--gpu is {self.type!r}, and behind -- stands {name}={option}: Dataflow takes GPUs for some steps or for the "
                    "whole job, not both. Leave the flag out"
                )
        if _SEVERAL_PROCESSES in experiments:
            raise UsageError(
                f"--gpu is {self.type!r}, and behind -- stands --experiments={_SEVERAL_PROCESSES}: then every core of a worker "
                "would load the model into the GPU's memory. Leave the flag out"
            )

    def configure(self, options: PipelineOptions) -> None:
        """Make each worker one process with a thread for each GPU, unless the flags name another number of threads.

        Args:
            options: Beam's options, which are changed.
        """
        debug = options.view_as(DebugOptions)
        debug.add_experiment(_ONE_PROCESS)
        debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or self.count


def check_machine(machine: str, options: PipelineOptions) -> None:
    """Check that the flags for Beam do not name another type of machine.

    Raises:
        UsageError: they name one.
    """
    if given := options.view_as(WorkerOptions).machine_type:
        raise UsageError(
            f"--worker-machine is {machine!r}, and behind -- stands --worker_machine_type={given}: both name the workers' type of "
            "machine. Leave one out"
        )


def _settings(options: PipelineOptions) -> Iterator[tuple[str, str]]:
    """Yield the flags in which GPUs may be asked for, and each of their values."""
    for name, values in (
        ("--dataflow_service_options", options.view_as(GoogleCloudOptions).dataflow_service_options),
        ("--experiments", options.view_as(DebugOptions).experiments),
        ("--resource_hints", options.view_as(StandardOptions).resource_hints),
    ):
        yield from ((name, value) for value in values or ())
