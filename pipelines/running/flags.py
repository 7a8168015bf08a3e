"""Check of the flags for Beam, which ignores those that it does not know."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions, _BeamArgumentParser

from schemas.console import events
from schemas.errors import UsageError

_SIMILAR = 0.8
_MODULES = {"dask": "apache_beam.runners.dask.dask_runner"}
"""Modules of runners whose flags Beam knows only once they are imported."""
_WITH_JOB_SERVICE = ("flink", "portable", "prism", "spark")
"""Runners whose job service has flags of its own, by which Beam extends those that it knows."""


class _Parser(_BeamArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"flags behind --: {message}")


def check_flags(flags: Sequence[str]) -> None:
    """Refuse misspelled flags, and remark on others that Beam does not know.

    Args:
        flags: the flags behind ``--``.

    Raises:
        UsageError: a flag resembles one of Beam's, or a value is of the wrong type.
    """
    runner = PipelineOptions(list(flags)).view_as(StandardOptions).runner or ""
    module, _, name = runner.rpartition(".")
    name = name.lower().removesuffix("runner")
    if module := module or _MODULES.get(name, ""):
        with contextlib.suppress(ImportError):  # Starting the runner says so.
            importlib.import_module(module)
    parser = _Parser(allow_abbrev=False, add_help=False)
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
