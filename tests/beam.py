"""The execution in which Beam runs a job here, in this process."""

from typing import Any

from pipelines.running.execution import Execution

BEAM_FLAGS = ("--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner",)

RUNNER = BEAM_FLAGS[0].partition("=")[2]

SEEN: list[Any] = []
"""What `see` got; a test empties it first."""


def see(element: Any) -> None:
    """Remember an element of a pipeline here, in the process of the test; a lambda would have a copy of the list."""
    SEEN.append(element)


IN_BEAM = Execution(beam_flags=BEAM_FLAGS)
