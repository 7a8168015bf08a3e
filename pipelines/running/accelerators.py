"""GPUs of workers on other machines, by name: what they become among Beam's hints and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from schemas.errors import UsageError
from schemas.options import Opt

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions

_ELSEWHERE = "Workers on other machines"
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_ONE_PROCESS = "no_use_multiple_sdk_containers"
_SEVERAL_PROCESSES = "use_multiple_sdk_containers"


@dataclass(frozen=True)
class Accelerator:
    """GPUs of each worker that runs the model.

    Attributes:
        type: the runner's name of the GPU, e.g. ``nvidia-l4``.
        count: number of GPUs of a worker.
        machine: the runner's name of the type of machine that has them, e.g. ``g2-standard-4``; empty for the runner's own choice.

    Raises:
        UsageError: a name is not one, or the number is below 1.
    """

    type: Annotated[
        str,
        Opt(
            "Type of GPU for the workers that run the model, e.g. [i]nvidia-l4[/i]; the model runs nowhere else.",
            name="gpu",
            panel=_ELSEWHERE,
        ),
    ]
    count: Annotated[
        int, Opt("With --gpu: number of GPUs of a worker; 1 by default.", name="gpus-per-worker", panel=_ELSEWHERE)
    ] = 1
    machine: Annotated[
        str,
        Opt(
            "With --gpu: type of machine of these workers, e.g. [i]g2-standard-4[/i]; the runner's own choice by default.",
            name="worker-machine",
            panel=_ELSEWHERE,
        ),
    ] = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.type):
            raise UsageError(f"--gpu is {self.type!r}, expected the name of one type, e.g. nvidia-l4")
        if self.machine and not _NAME.fullmatch(self.machine):
            raise UsageError(f"--worker-machine is {self.machine!r}, expected the name of one type, e.g. g2-standard-4")
        if self.count < 1:
            raise UsageError(f"--gpus-per-worker is {self.count}, expected 1 or more")

    def hints(self) -> dict[str, str]:
        """Return Beam's resource hints for a step that needs the GPUs: one active bundle for each of them."""
        machine = f"machine_type:{self.machine};" if self.machine else ""
        return {
            # As on Dataflow's page on right fitting.
            "accelerator": f"type:{self.type};count:{self.count};{machine}install-nvidia-driver",
            "max_active_bundles_per_worker": str(self.count),
        }

    def check(self, options: PipelineOptions) -> None:
        """Check that the flags for Beam do not ask for GPUs, or for processes, in another way.

        Raises:
            UsageError: they do.
        """
        from apache_beam.options.pipeline_options import DebugOptions

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
        from apache_beam.options.pipeline_options import DebugOptions

        debug = options.view_as(DebugOptions)
        debug.add_experiment(_ONE_PROCESS)
        debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or self.count


def _settings(options: PipelineOptions) -> Iterator[tuple[str, str]]:
    """Yield the flags in which GPUs may be asked for, and each of their values."""
    from apache_beam.options.pipeline_options import DebugOptions, GoogleCloudOptions, StandardOptions

    for name, values in (
        ("--dataflow_service_options", options.view_as(GoogleCloudOptions).dataflow_service_options),
        ("--experiments", options.view_as(DebugOptions).experiments),
        ("--resource_hints", options.view_as(StandardOptions).resource_hints),
    ):
        yield from ((name, value) for value in values or ())
