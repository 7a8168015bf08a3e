"""Asking Dataflow about a job by its id, with Beam's own client."""

from __future__ import annotations

from typing import Any

from apache_beam.options.pipeline_options import GoogleCloudOptions, PipelineOptions

from pipelines.running.progress import NAMESPACE
from pipelines.running.services import ANSWER_SECONDS, SilentError
from schemas.errors import UsageError

__all__ = ["DataflowService"]

_FLAGS = ("project", "region", "dataflow_endpoint", "impersonate_service_account")


class DataflowService:
    """Dataflow in one project and region.

    Args:
        options: Beam's options.
    """

    def __init__(self, options: PipelineOptions) -> None:
        self._options = options
        self._google = google = options.view_as(GoogleCloudOptions)
        self.name = f"Dataflow in project {google.project!r}, region {google.region!r}"
        default = GoogleCloudOptions([])
        self.flags = tuple(
            f"--{name}={value}"
            for name in _FLAGS
            if (value := getattr(google, name)) and (name in ("project", "region") or value != getattr(default, name))
        )
        if google.no_auth:
            self.flags += ("--no_auth",)
        self._made: Any = None

    @property
    def _client(self) -> Any:
        """Beam's client, which finds the credentials.

        Raises:
            UsageError: it is not installed.
        """
        if self._made is None:
            try:
                from apache_beam.runners.dataflow.internal import apiclient
            except ImportError as error:
                raise UsageError(
                    f"asking Dataflow needs {error.name}, which is not installed: pip install 'imagepivot[gcp]'"
                ) from error
            self._made = apiclient.DataflowApplicationClient(self._options)
        return self._made

    def state(self, job_id: str) -> str | None:
        """Return the state of a job; None if there is no such job."""
        job = self._job(job_id)
        if job is None:
            return None
        from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult

        return DataflowPipelineResult.api_jobstate_to_pipeline_state(job.current_state)

    def cancel(self, job_id: str) -> None:
        """Ask it to cancel a job."""
        client = self._client
        try:
            client.modify_job_state(job_id, "JOB_STATE_CANCELLED")
        except Exception as error:
            raise SilentError(_reason(error)) from error

    def counts(self, job_id: str) -> dict[str, int]:
        """Return what the workers of a job have counted: committed values, or tentative ones where there are no others."""
        client = self._client
        try:
            metrics = client.get_job_metrics(job_id).metrics
        except Exception as error:
            raise SilentError(_reason(error)) from error
        counts: dict[bool, dict[tuple[str, str], int]] = {True: {}, False: {}}
        for metric in metrics:
            context = metric.name.context
            if context.get("namespace") == NAMESPACE and isinstance(metric.scalar, (int, float)):
                key = metric.name.name, context.get("step", "")
                counts[context.get("tentative") == "true"][key] = int(metric.scalar)
        total: dict[str, int] = {}
        for (name, _), count in {**counts[True], **{key: count for key, count in counts[False].items() if count}}.items():
            total[name] = total.get(name, 0) + count
        return total

    def result(self, job_id: str) -> Any:
        """Return Beam's result of a job."""
        from apache_beam.runners.dataflow.dataflow_runner import DataflowPipelineResult, DataflowRunner

        runner = DataflowRunner()
        runner.dataflow_client = self._client
        return DataflowPipelineResult(self._job(job_id), runner, self._options)

    def page(self, job_id: str) -> str:
        """Return the address of Dataflow's page of a job."""
        google = self._google
        return f"https://console.cloud.google.com/dataflow/jobs/{google.region}/{job_id}?project={google.project}"

    def _job(self, job_id: str) -> Any:
        """Ask once, where Beam's client would ask again for minutes; None if there is no such job.

        Raises:
            SilentError: it does not answer.
        """
        client = self._client
        from google.api_core.exceptions import NotFound
        from google.cloud import dataflow

        request = dataflow.GetJobRequest(job_id=job_id, project_id=self._google.project, location=self._google.region)
        try:
            return client._jobs_client.get_job(request=request, timeout=ANSWER_SECONDS)
        except NotFound:
            return None
        except Exception as error:
            raise SilentError(_reason(error)) from error


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
