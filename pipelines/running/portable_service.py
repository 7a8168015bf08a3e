"""Asking one of Beam's job services about a job: Flink, Spark and Beam's own runner take jobs in this way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc
from apache_beam.runners.portability.portable_runner import PipelineResult, PortableMetrics
from apache_beam.runners.runner import PipelineState

from pipelines.running.flink_cluster import FlinkCluster
from pipelines.running.services import ANSWER_SECONDS, SilentError, counts_of

__all__ = ["PortableService"]

_FLINK_MASTER = "beam:option:flink_master:v1"
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
        flink_master: Beam's option: address of Flink where it stands behind the service, and this process should use another
            address than the service does.
    """

    def __init__(self, endpoint: str, flink_master: str = "") -> None:
        self.name = f"the job service {endpoint!r}"
        self.flags: tuple[str, ...] = (f"--job_endpoint={endpoint}",)
        self._flink_master = flink_master
        self._stub = beam_job_api_pb2_grpc.JobServiceStub(grpc.insecure_channel(endpoint))

    def state(self, job_id: str) -> str | None:
        """Return the state of a job; None if the service knows no such job."""
        request = beam_job_api_pb2.GetJobStateRequest(job_id=job_id)
        try:
            state = str(PipelineResult.runner_api_state_to_pipeline_state(_ask(self._stub.GetState, request).state))
        except grpc.RpcError as error:
            # Beam's own service answers with an error of its own, whatever is wrong: its list of jobs tells.
            if self._info(job_id) is not None:
                raise SilentError(_reason(error)) from error
            return None
        if state == PipelineState.CANCELLED:
            flink, name = self._flink(job_id)
            if flink is not None and flink.runs(name):
                return PipelineState.CANCELLING
        return state

    def cancel(self, job_id: str) -> None:
        """Ask it to cancel a job, and Flink where that is behind it."""
        try:
            _ask(self._stub.Cancel, beam_job_api_pb2.CancelJobRequest(job_id=job_id))
        except grpc.RpcError as error:
            raise SilentError(_reason(error)) from error
        flink, name = self._flink(job_id)
        if flink is not None:
            flink.cancel(name)

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

    def _info(self, job_id: str) -> Any:
        """Return what the service lists of a job; None if it knows no such job."""
        jobs = _ask(self._stub.GetJobs, beam_job_api_pb2.GetJobsRequest()).job_info
        return next((job for job in jobs if job.job_id == job_id), None)

    def _flink(self, job_id: str) -> tuple[FlinkCluster | None, str]:
        """Return the Flink behind the service, and the job's name there; None where the service names none by an address."""
        info = self._info(job_id)
        options = {} if info is None else dict(info.pipeline_options)
        for master in (self._flink_master, options.get(_FLINK_MASTER)):
            # Beam's option leads to no cluster if it is empty, `[auto]` or `[local]`.
            if info is not None and isinstance(master, str) and master and not master.startswith("["):
                return FlinkCluster(master), info.job_name
        return None, ""


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
