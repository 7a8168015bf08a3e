"""Where and how a pipeline is to run. Importing this, and asking about a run on this machine, loads no Beam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

from pipelines.running.accelerators import Accelerator
from schemas.errors import UsageError
from schemas.options import Opt
from schemas.process.resources import usable_cores
from schemas.storage.locations import is_remote

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


START_SECONDS = 1200.0
"""Seconds in which the first worker must have started; Dataflow takes minutes to start a machine and install packages."""


_ELSEWHERE = "Workers on other machines"


@dataclass(frozen=True)
class Execution:
    """Settings for running a pipeline; none of them changes the result.

    Attributes:
        workers: number of local worker processes; 0 for one per core, or what the command does by itself.
        beam_flags: flags for Beam, e.g. ``--runner=DataflowRunner``; if they name a runner, nothing runs locally.
        shared_disk: the workers of that runner see local paths as this machine does.
        start_timeout: seconds in which the first worker of that runner must have started.
        accelerator: the GPUs of that runner's workers, for steps that run a model; None for workers without.
        detach: do not wait for that runner's job once it has accepted it.
        default_workers: what 0 workers stand for; asked when there is something to do.

    Raises:
        UsageError: a value is out of range, a flag is misspelled, or there is no job to leave alone.
    """

    workers: Annotated[
        int,
        Opt(
            "Local worker processes; 0: one per core, for little text one; of a model one per GPU, or one that uses all cores.",
            least=0,
        ),
    ] = 0
    beam_flags: Annotated[tuple[str, ...], Opt("Flags for Beam.", is_behind_dashes=True)] = ()
    shared_disk: Annotated[
        bool, Opt("With a --runner behind --: its workers see local paths as this machine does.", panel=_ELSEWHERE)
    ] = False
    start_timeout: Annotated[
        float, Opt("With a --runner behind --: seconds in which its first worker must have started.", panel=_ELSEWHERE)
    ] = START_SECONDS
    detach: Annotated[
        bool,
        Opt(
            "With a --runner behind --: end as soon as it has accepted the job; the same command without it waits for the job.",
            panel=_ELSEWHERE,
        ),
    ] = False
    accelerator: Annotated[Accelerator | None, "of commands that run a model over images"] = None
    default_workers: Callable[[], int] = field(default=usable_cores, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.beam_flags:
            from pipelines.running.flags import check_flags

            check_flags(self.beam_flags)
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
        """Check that the workers can reach what they read and write, before anything starts.

        Args:
            locations: pairs of what a location is, in words, and the location.

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
        """Return these settings with one worker by default for less text than pays for the start of several.

        Args:
            size: bytes of the text.
            least: bytes from which several workers are faster.
        """
        return self if size >= least else replace(self, default_workers=lambda: 1)

    @property
    def local_workers(self) -> int:
        """Number of local worker processes."""
        return self.workers or self.default_workers()

    def _flags(self, **options: bool) -> PipelineOptions:
        from apache_beam.options.pipeline_options import PipelineOptions

        return PipelineOptions(list(self.beam_flags), **options)
