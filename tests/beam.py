"""The execution in which Beam runs a job here, in this process."""

from pipelines.running.execution import Execution

BEAM_FLAGS = ("--runner=apache_beam.runners.portability.fn_api_runner.FnApiRunner",)

IN_BEAM = Execution(beam_flags=BEAM_FLAGS)
