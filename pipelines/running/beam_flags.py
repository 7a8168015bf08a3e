"""Flags for Beam: misspelled ones, and those that name code."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from schemas.console import events
from schemas.errors import UsageError

_SIMILAR = 0.8
_MODULES = {"dask": "apache_beam.runners.dask.dask_runner"}
"""Modules of runners that declare their flags when they are imported."""
_WITH_JOB_SERVICE = ("flink", "portable", "prism", "spark")
"""Runners with a job service that declares more flags."""

_HARMLESS_RUNNERS = ("direct", "dataflow", "flink", "prism", "spark")
_HARMLESS_FLAGS = frozenset(
    {
        *("autoscaling_algorithm", "dataflow_service_options", "direct_num_workers", "direct_running_mode", "disk_size_gb"),
        *("job_name", "labels", "machine_type", "max_num_workers", "network", "no_use_public_ips", "num_workers"),
        *("number_of_worker_harness_threads", "parallelism", "project", "region", "service_account_email", "staging_location"),
        *("subnetwork", "temp_location", "use_public_ips", "worker_disk_type", "worker_region", "worker_zone", "zone"),
    }
)
"""Flags that name no program, module, package, image or server to which pipelines are sent."""


def flags_of_code(flags: Sequence[str]) -> list[str]:
    """Return the flags that may name code, here or on workers: all but harmless ones."""
    parts = [(flag, *flag.removeprefix("--").partition("=")[::2]) for flag in flags]
    return [
        flag
        for flag, name, value in parts
        if name not in _HARMLESS_FLAGS and not (name == "runner" and value.lower().removesuffix("runner") in _HARMLESS_RUNNERS)
    ]


def parse_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Parse flags; refuse misspelled ones, and remark on other unknown ones.

    Raises:
        UsageError: a flag resembles one of Beam's, or a value is of the wrong type.
    """
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, _BeamArgumentParser

    class Parser(_BeamArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"flags after --: {message}")

    runner = PipelineOptions(list(flags)).view_as(StandardOptions).runner or ""
    module, _, name = runner.rpartition(".")
    name = name.lower().removesuffix("runner")
    if module := module or _MODULES.get(name, ""):
        with contextlib.suppress(ImportError):  # Starting the runner says so.
            importlib.import_module(module)
    parser = Parser(allow_abbrev=False, add_help=False)
    for options in {str(cls): cls for cls in PipelineOptions.__subclasses__()}.values():
        options._add_argparse_args(parser)
    values, unknown = parser.parse_known_args(list(flags))
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
        plain = "--" + flag.lstrip("-").replace("-", "_")
        similar = get_close_matches(plain, parser._option_string_actions, n=1, cutoff=_SIMILAR)
        guess = f": did you mean {similar[0]}?" if similar else ""
        if name in _WITH_JOB_SERVICE:
            events.remark(
                f"{flag} is unknown to Beam's Python SDK and is passed on to the job service{guess or '.'}", style="dim"
            )
        elif similar:
            raise UsageError(f"{flag} after -- is not a flag of Beam{guess}")
        else:
            events.remark(f"{flag} after -- is not a flag of Beam, which ignores it", style="dim")
    return vars(values)
