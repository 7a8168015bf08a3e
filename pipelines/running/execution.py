"""Where and how a pipeline runs. Importing this, and asking about a run on this machine, loads no Beam."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, NoReturn

from schemas.console import events
from schemas.errors import UsageError
from schemas.options import SEVERAL_MACHINES, Opt
from schemas.process.resources import usable_cores
from schemas.storage.locations import is_remote

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


_NAME = re.compile(r"[a-z0-9][a-z0-9-]*")
_ONE_PROCESS = "no_use_multiple_sdk_containers"
_SEVERAL_PROCESSES = "use_multiple_sdk_containers"


@dataclass(frozen=True)
class Accelerator:
    """GPUs of each worker that runs the model.

    Raises:
        UsageError: a name is not one, or the number is below 1.
    """

    type: Annotated[
        str,
        Opt(
            "Run the model only on workers with this type of GPU, e.g. [i]nvidia-l4[/i].",
            name="gpu",
            panel=SEVERAL_MACHINES,
        ),
    ]
    count: Annotated[
        int, Opt("Set the number of GPUs per worker (--gpu only). Default: 1.", name="gpus-per-worker", panel=SEVERAL_MACHINES)
    ] = 1
    machine: Annotated[
        str,
        Opt(
            "Set the machine type (--gpu only), e.g. [i]g2-standard-4[/i]. Default: the runner's.",
            name="worker-machine",
            panel=SEVERAL_MACHINES,
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
        from apache_beam.options.pipeline_options import DebugOptions, GoogleCloudOptions, StandardOptions

        experiments = options.view_as(DebugOptions).experiments or []
        for name, values in (
            ("--dataflow_service_options", options.view_as(GoogleCloudOptions).dataflow_service_options),
            ("--experiments", experiments),
            ("--resource_hints", options.view_as(StandardOptions).resource_hints),
        ):
            for value in values or ():
                if value.startswith(("worker_accelerator", "accelerator")):
                    raise UsageError(
                        f"--gpu is {self.type!r}, and behind -- stands {name}={value}: Dataflow takes GPUs for some steps or for "
                        "the whole job, not both. Leave the flag out"
                    )
        if _SEVERAL_PROCESSES in experiments:
            raise UsageError(
                f"--gpu is {self.type!r}, and behind -- stands --experiments={_SEVERAL_PROCESSES}: then every core of a worker "
                "would load the model into the GPU's memory. Leave the flag out"
            )

    def configure(self, options: PipelineOptions) -> None:
        """Make each worker one process with a thread for each GPU, unless the flags name another number of threads."""
        from apache_beam.options.pipeline_options import DebugOptions

        debug = options.view_as(DebugOptions)
        debug.add_experiment(_ONE_PROCESS)
        debug.number_of_worker_harness_threads = debug.number_of_worker_harness_threads or self.count


START_SECONDS = 1200
"""Default seconds until the first worker has started: Dataflow takes minutes to start a machine and install packages."""


@dataclass(frozen=True)
class Execution:
    """Settings for running a pipeline; none of them changes the result.

    If the flags for Beam name a runner, nothing runs locally. ``default_workers`` says what 0 workers stand for, and is asked when
    there is something to do.

    Raises:
        UsageError: a value is out of range, a flag is misspelled, or there is no job to leave alone.
    """

    workers: Annotated[
        int,
        Opt(
            "Start this many local processes; 0: chosen by cores, GPUs and input size.",
            least=0,
        ),
    ] = 0
    beam_flags: Annotated[tuple[str, ...], Opt("Pass flags to Beam.", is_behind_dashes=True)] = ()
    shared_disk: Annotated[bool, Opt("Assume that workers see local paths as this machine does.", panel=SEVERAL_MACHINES)] = (
        False
    )
    start_timeout: Annotated[float, Opt("Fail if no worker starts within this many seconds.", panel=SEVERAL_MACHINES)] = (
        START_SECONDS
    )
    detach: Annotated[
        bool,
        Opt(
            "Return once the job is accepted; the same command without it waits for the job.",
            panel=SEVERAL_MACHINES,
        ),
    ] = False
    accelerator: Annotated[Accelerator | None, "of commands that run a model over images"] = None
    default_workers: Callable[[], int] = field(default=usable_cores, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.beam_flags:
            _check_flags(self.beam_flags)
        if self.detach and self.runs_here:
            raise UsageError(
                "--detach leaves a job to the runner that the flags behind -- name, and without one on other machines the work is "
                "done by this command: leave out --detach, or name a runner"
            )
        if not self.start_timeout > 0:
            raise UsageError(f"--start-timeout is {self.start_timeout}, expected more than 0 seconds")
        if self.accelerator is None:
            return
        if self.runs_here:
            raise UsageError(
                f"--gpu is {self.accelerator.type!r}, and the workers run on this machine: it is for those of another runner, as "
                "behind -- in -- --runner=DataflowRunner. Leave it out here; a GPU of this machine is used by --device cuda"
            )
        self.accelerator.check(self._flags())

    @property
    def is_local(self) -> bool:
        """Whether the pipeline runs on this machine, on the runner that we choose."""
        return not any(flag.split("=")[0] == "--runner" for flag in self.beam_flags)

    @property
    def is_one_process(self) -> bool:
        """Whether one worker of this machine does all of it, and Beam was told nothing."""
        return not self.beam_flags and self.local_workers == 1

    @property
    def runs_here(self) -> bool:
        """Whether the workers run on this machine, in this environment, whoever chose the runner."""
        if self.is_local:
            return True
        from apache_beam.options.pipeline_options import PortableOptions, StandardOptions

        if self.options.view_as(PortableOptions).environment_type == "LOOPBACK":  # The workers are this process's own.
            return True
        return self._runner_name in {local.lower().removesuffix("runner") for local in StandardOptions.LOCAL_RUNNERS}

    @property
    def options(self) -> PipelineOptions:
        """Beam's options."""
        options = self._flags(save_main_session=False)
        if self.accelerator is not None:
            self.accelerator.configure(options)
        return options

    @property
    def is_dataflow(self) -> bool:
        """Whether the flags name Dataflow as the runner."""
        return self._runner_name == "dataflow"

    @property
    def _runner_name(self) -> str:
        return self.runner.rpartition(".")[2].lower().removesuffix("runner")

    def with_job_name(self, name: str) -> Execution:
        """Return these settings with a name for the job on Dataflow, unless the flags name it."""
        from apache_beam.options.pipeline_options import GoogleCloudOptions

        if not self.is_dataflow or self.options.view_as(GoogleCloudOptions).job_name:
            return self
        return replace(self, beam_flags=(*self.beam_flags, f"--job_name={name}"))

    @property
    def template(self) -> str:
        """Where Dataflow's template goes that is made instead of a run; empty if none is."""
        if self.is_local:
            return ""
        from apache_beam.options.pipeline_options import GoogleCloudOptions

        return self.options.view_as(GoogleCloudOptions).template_location or ""

    @property
    def runner(self) -> str:
        """Name of the runner among the flags; empty if there is none."""
        from apache_beam.options.pipeline_options import StandardOptions

        return self.options.view_as(StandardOptions).runner or ""

    def check_locations(self, locations: Iterable[tuple[str, str]]) -> None:
        """Check that the workers can reach what they read and write: pairs of what a location is, in words, and the location.

        Raises:
            UsageError: a location is on this machine's disk, and the workers are elsewhere.
        """
        if self.runs_here or self.shared_disk:
            return
        for what, location in locations:
            if not is_remote(location):
                raise UsageError(
                    f"{what} {location!r} is a path on this machine, and the workers of {self.runner} run on others: give an "
                    "address in a bucket (gs://... or s3://...), or --shared-disk if all of them see that path as this machine does"
                )

    def for_text(self, size: int, least: int) -> Execution:
        """Return these settings with one worker by default for less text than ``least`` bytes, from which several are faster."""
        return self if size >= least else replace(self, default_workers=lambda: 1)

    @property
    def local_workers(self) -> int:
        """Number of local worker processes."""
        return self.workers or self.default_workers()

    def _flags(self, **options: bool) -> PipelineOptions:
        from apache_beam.options.pipeline_options import PipelineOptions

        return PipelineOptions(list(self.beam_flags), **options)


# --- flags for Beam ---------------------------------------------------------------------------------------------------

_SIMILAR = 0.8
_MODULES = {"dask": "apache_beam.runners.dask.dask_runner"}
"""Modules of runners whose flags Beam knows only once they are imported."""
_WITH_JOB_SERVICE = ("flink", "portable", "prism", "spark")
"""Runners whose job service has flags of its own, by which Beam extends those that it knows."""


def _check_flags(flags: Sequence[str]) -> None:
    """Refuse misspelled flags, and remark on others that Beam does not know.

    Raises:
        UsageError: a flag resembles one of Beam's, or a value is of the wrong type.
    """
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, _BeamArgumentParser

    class Parser(_BeamArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"flags behind --: {message}")

    runner = PipelineOptions(list(flags)).view_as(StandardOptions).runner or ""
    module, _, name = runner.rpartition(".")
    name = name.lower().removesuffix("runner")
    if module := module or _MODULES.get(name, ""):
        with contextlib.suppress(ImportError):  # Starting the runner says so.
            importlib.import_module(module)
    parser = Parser(allow_abbrev=False, add_help=False)
    for options in {str(cls): cls for cls in PipelineOptions.__subclasses__()}.values():
        options._add_argparse_args(parser)
    unknown = [word.partition("=")[0] for word in parser.parse_known_args(list(flags))[1] if word.startswith("-")]
    for flag in unknown:
        plain = "--" + flag.lstrip("-").replace("-", "_")
        similar = get_close_matches(plain, parser._option_string_actions, n=1, cutoff=_SIMILAR)
        guess = f": did you mean {similar[0]}?" if similar else ""
        if name in _WITH_JOB_SERVICE:
            events.remark(
                f"{flag} is no flag of Beam's Python: it is passed on, for the job service to know{guess or '.'}", style="dim"
            )
        elif similar:
            raise UsageError(f"{flag} behind -- is no flag of Beam's{guess}")
        else:
            events.remark(f"{flag} behind -- is no flag of Beam's, which ignores it", style="dim")
