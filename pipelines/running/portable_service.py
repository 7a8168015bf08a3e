"""Asking one of Beam's job services about a job: Flink, Spark and Beam's own runner take jobs in this way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc
from apache_beam.runners.portability.portable_runner import PipelineResult, PortableMetrics

from pipelines.running.services import ANSWER_SECONDS, SilentError, counts_of

__all__ = ["PortableService"]

_SILENT = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class PortableService:
    """A job service of Beam's.

    Args:
        endpoint: its address, ``HOST:PORT``.
    """

    def __init__(self, endpoint: str) -> None:
        self.name = f"the job service {endpoint!r}"
        self.flags: tuple[str, ...] = (f"--job_endpoint={endpoint}",)
        self._stub = beam_job_api_pb2_grpc.JobServiceStub(grpc.insecure_channel(endpoint))

    def state(self, job_id: str) -> str | None:
        """Return the state of a job; None if the service knows no such job."""
        request = beam_job_api_pb2.GetJobStateRequest(job_id=job_id)
        try:
            return PipelineResult.runner_api_state_to_pipeline_state(_ask(self._stub.GetState, request).state)
        except grpc.RpcError as error:
            # Beam's own service answers with an error of its own, whatever is wrong: its list of jobs tells.
            jobs = _ask(self._stub.GetJobs, beam_job_api_pb2.GetJobsRequest()).job_info
            if any(job.job_id == job_id for job in jobs):
                raise SilentError(_reason(error)) from error
            return None

    def cancel(self, job_id: str) -> None:
        """Ask it to cancel a job."""
        try:
            _ask(self._stub.Cancel, beam_job_api_pb2.CancelJobRequest(job_id=job_id))
        except grpc.RpcError as error:
            raise SilentError(_reason(error)) from error

    def counts(self, job_id: str) -> dict[str, int]:
        """Return what the workers of a job have counted. Beam's own service says it when the job has ended."""
        try:
            response = _ask(self._stub.GetJobMetrics, beam_job_api_pb2.GetJobMetricsRequest(job_id=job_id))
        except grpc.RpcError as error:
            raise SilentError(_reason(error)) from error
        return counts_of(PortableMetrics(response).query()[PortableMetrics.COUNTERS])

    def result(self, job_id: str) -> PipelineResult:
        """Return Beam's result of a job; it hears the messages that the service has kept."""
        messages = self._stub.GetMessageStream(beam_job_api_pb2.JobMessagesRequest(job_id=job_id))
        states = self._stub.GetStateStream(beam_job_api_pb2.GetJobStateRequest(job_id=job_id))
        return PipelineResult(self._stub, job_id, messages, states)

    def page(self, job_id: str) -> str:
        """Return nothing: the job service does not say."""
        return ""


def _ask(method: Callable[..., Any], request: Any) -> Any:
    try:
        return method(request, timeout=ANSWER_SECONDS)
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() in _SILENT:
            raise SilentError(_reason(error)) from error
        raise


def _reason(error: grpc.RpcError) -> str:
    if not isinstance(error, grpc.Call):
        return type(error).__name__
    lines = str(error.details()).splitlines()
    return f"{error.code().name}: {lines[0] if lines else ''}"
