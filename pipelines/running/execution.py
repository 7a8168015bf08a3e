"""Execution of a pipeline: workers, runner, GPUs.

Neither this module nor a local run loads Beam.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pipelines.running.beam_flags import flags_of_code, parse_flags
from schemas.errors import UsageError
from schemas.options import SEVERAL_MACHINES, Opt
from schemas.process.resources import usable_cores
from schemas.storage.locations import is_remote
from schemas.writing.reuse_policy import FailureLimit

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_DRIVER = re.compile(r"[0-9][0-9x.]*")
_OLD_GPUS = re.compile(r"k80|p4|p100|v100")  # Below compute capability 7.5, the least of CUDA 13.
_ONE_PROCESS = "no_use_multiple_sdk_containers"
_SEVERAL_PROCESSES = "use_multiple_sdk_containers"


@dataclass(frozen=True)
class Accelerator:
    """GPUs of each worker that runs the model.

    Raises:
        UsageError: a name is invalid, or the number is below 1.

    Examples:
        >>> gpu = imagepivot.Accelerator("nvidia-l4", machine="g2-standard-4")
        >>> execution = imagepivot.Execution(beam_flags=("--runner=DataflowRunner",), accelerator=gpu)
    """

    type: Annotated[
        str,
        Opt("Run the model only on workers with this type of GPU, e.g. [i]nvidia-l4[/i].", name="gpu", panel=SEVERAL_MACHINES),
    ]
    count: Annotated[
        int, Opt("Set GPUs per worker (--gpu only). Default: 1.", name="gpus-per-worker", panel=SEVERAL_MACHINES)
    ] = 1
    machine: Annotated[
        str,
        Opt(
            "Set the machine type (--gpu only), e.g. [i]g2-standard-4[/i]. Default: the runner's.",
            name="worker-machine",
            panel=SEVERAL_MACHINES,
        ),
    ] = ""
    driver: Annotated[
        str,
        Opt("Set the driver (--gpu only), e.g. [i]5xx[/i].", name="gpu-driver", panel=SEVERAL_MACHINES),
    ] = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.type):
            raise UsageError(f"--gpu is {self.type!r}, expected a type of GPU, e.g. nvidia-l4")
        if _OLD_GPUS.fullmatch(self.type.rpartition("-")[2]):
            raise UsageError(
                f"--gpu is {self.type!r}, whose compute capability is below 7.5, the least that torch for "
                "CUDA 13 runs on: use a T4 or a newer GPU, e.g. nvidia-tesla-t4 or nvidia-l4"
            )
        if self.machine and not _NAME.fullmatch(self.machine):
            raise UsageError(f"--worker-machine is {self.machine!r}, expected a type of machine, e.g. g2-standard-4")
        if self.driver and not _DRIVER.fullmatch(self.driver):
            raise UsageError(f"--gpu-driver is {self.driver!r}, expected a version, e.g. 5xx")
        if self.count < 1:
            raise UsageError(f"--gpus-per-worker is {self.count}, expected 1 or more")

    def hints(self) -> dict[str, str]:
        """Return Beam's resource hints for a step on GPUs, with one bundle per GPU."""
        machine = f"machine_type:{self.machine};" if self.machine else ""
        driver = f"install-nvidia-driver:{self.driver}" if self.driver else "install-nvidia-driver"
        return {
            # Format of Dataflow's right fitting.
            "accelerator": f"type:{self.type};count:{self.count};{machine}{driver}",
            "max_active_bundles_per_worker": str(self.count),
        }

    def check(self, flags: Mapping[str, Any]) -> None:
        """Check the values of Beam's flags against --gpu.

        Raises:
            UsageError: a flag also requests GPUs, or a process per core.
        """
        for name in ("dataflow_service_options", "experiments", "resource_hints"):
            for value in flags[name] or ():
                if value.startswith(("worker_accelerator", "accelerator")):
                    raise UsageError(
                        f"--gpu is {self.type!r}, and --{name}={value} follows --: Dataflow adds GPUs to "
                        "some steps or to the whole job, not both. Leave the flag out"
                    )
        if _SEVERAL_PROCESSES in (flags["experiments"] or ()):
            raise UsageError(
                f"--gpu is {self.type!r}, and --experiments={_SEVERAL_PROCESSES} follows --: every core of "
                "a worker would load the model into GPU memory. Leave the flag out"
            )


@dataclass(frozen=True)
class Execution:
    """Settings for running a pipeline; none of them changes the result.

    The runner that the flags for Beam name replaces the local workers. ``default_workers`` computes the
    number of workers for 0; it is called only if shards are missing.

    Beyond ``max_failures`` a job that no launcher waits for fails after its commit; a launcher that waits compares the manifest.

    Raises:
        UsageError: a value is out of range, a flag is misspelled, flags name no runner, or --detach or --gpu
            is given without a remote one.

    Examples:
        >>> local = imagepivot.Execution(workers=4)
        >>> remote = imagepivot.Execution(beam_flags=("--runner=FlinkRunner",), shared_disk=True)
        >>> local.runs_here, remote.runs_here
        (True, False)
    """

    workers: Annotated[int, Opt("Start this many local processes; 0: chosen by cores, GPUs and input size.", min_=0)] = 0
    beam_flags: Annotated[tuple[str, ...], Opt("Pass flags to Beam.", is_behind_dashes=True, code_in=flags_of_code)] = ()
    shared_disk: Annotated[bool, Opt("Assume that workers see local paths as this machine does.", panel=SEVERAL_MACHINES)] = (
        False
    )
    start_timeout: Annotated[float, Opt("Fail if no worker starts within this many seconds.", panel=SEVERAL_MACHINES)] = (
        1200  # Dataflow takes minutes to start a machine and install packages.
    )
    detach: Annotated[bool, Opt("Return once accepted; the same command waits.", panel=SEVERAL_MACHINES)] = False
    accelerator: Annotated[Accelerator | None, "of commands that run a model over images"] = None
    max_failures: Annotated[FailureLimit | None, "of commands whose inputs can fail"] = None
    default_workers: Callable[[], int] = field(default=usable_cores, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.beam_flags and not self.runner:
            raise UsageError(
                f"the flags after -- name no runner of Beam: add one, e.g. --runner=DirectRunner, or leave "
                f"{self.beam_flags[0]} out: local workers do not use Beam"
            )
        if self.detach and self.runs_here:
            raise UsageError(
                "--detach needs a runner on other machines, which would continue the job: leave it out, or "
                "name one after --, e.g. -- --runner=DataflowRunner"
            )
        if not self.start_timeout > 0:
            raise UsageError(f"--start-timeout is {self.start_timeout}, expected more than 0 seconds")
        if self.accelerator is None:
            return
        if self.runs_here:
            raise UsageError(
                f"--gpu is {self.accelerator.type!r}, and the workers run on this machine: name a remote runner, e.g. -- "
                "--runner=DataflowRunner; for a GPU of this machine give --device cuda instead"
            )
        self.accelerator.check(self.flags)

    @property
    def commit_limit(self) -> FailureLimit | None:
        """Limit of failures for the commit; None if a launcher waits.

        A runner repeats what fails: with a launcher that waits, the job ends well, and the command by its exit code.
        """
        return self.max_failures if self.detach or self.template else None

    @property
    def is_local(self) -> bool:
        """Whether local workers run the job, without Beam."""
        return not self.beam_flags

    @property
    def runs_here(self) -> bool:
        """Whether the workers run on this machine, in this environment."""
        if self.is_local:
            return True
        from apache_beam.options.pipeline_options import StandardOptions

        if self.flags["environment_type"] == "LOOPBACK":  # Workers run in this process.
            return True
        return self._runner_name in {local.lower().removesuffix("runner") for local in StandardOptions.LOCAL_RUNNERS}

    @cached_property
    def flags(self) -> dict[str, Any]:
        """Values of Beam's flags by name, with defaults; empty for local workers."""
        return parse_flags(self.beam_flags) if self.beam_flags else {}

    def to_options(self) -> PipelineOptions:
        """Return Beam's options for one pipeline, which may change them."""
        from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions

        options = PipelineOptions(list(self.beam_flags), save_main_session=False)
        if self.accelerator is not None:  # One process per worker, with a thread per GPU unless flags set threads.
            debug = options.view_as(DebugOptions)
            debug.add_experiment(_ONE_PROCESS)
            debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or self.accelerator.count
        return options

    @property
    def max_workers(self) -> int:
        """Workers that the flags ask for; 1 if they set no number."""
        return self.flags.get("max_num_workers") or self.flags.get("num_workers") or 1

    @property
    def is_dataflow(self) -> bool:
        """Whether the flags name Dataflow as the runner."""
        return self._runner_name == "dataflow"

    @property
    def _runner_name(self) -> str:
        return self.runner.rpartition(".")[2].lower().removesuffix("runner")

    def with_job_name(self, name: str) -> Execution:
        """Return a copy with a job name for Dataflow, unless flags set it."""
        if not self.is_dataflow or self.flags["job_name"]:
            return self
        return replace(self, beam_flags=(*self.beam_flags, f"--job_name={name}"))

    @property
    def template(self) -> str:
        """Location of the Dataflow template to write instead of a run; empty without one."""
        return self.flags.get("template_location") or ""

    @property
    def runner(self) -> str:
        """Name of the runner in the flags; empty without one."""
        return self.flags.get("runner") or ""

    def check_locations(self, locations: Iterable[tuple[str, str]]) -> None:
        """Check that workers can reach locations, which are pairs of name and location.

        Raises:
            UsageError: a location is on this machine's disk, and the workers run on others.
        """
        if self.runs_here or self.shared_disk:
            return
        for name, location in locations:
            if not is_remote(location):
                raise UsageError(
                    f"{name} {location!r} is a path on this machine, and the workers of {self.runner} run on others: give an "
                    "address in a bucket (gs://... or s3://...), or --shared-disk if all of them see that path as this machine does"
                )

    def for_text(self, size: int, bytes_of_worker: int) -> Execution:
        """Return a copy with as many default workers as text pays for.

        A worker takes half a second to start; meanwhile one process works on about ``bytes_of_worker``.
        """
        return replace(self, default_workers=lambda: max(1, min(usable_cores(), size // bytes_of_worker)))

    @property
    def local_workers(self) -> int:
        """Number of local worker processes."""
        return self.workers or self.default_workers()
