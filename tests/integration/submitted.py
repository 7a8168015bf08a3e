"""What a run on Dataflow would submit: the stock client makes the job, its files are kept here, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from apache_beam.portability.api import beam_runner_api_pb2 as pb
from apache_beam.portability.common_urns import environments, primitives, resource_hints
from google.cloud import dataflow_v1beta3

from pipelines.running import remote
from schemas.errors import ImagepivotError

FLAGS = (
    "--runner=DataflowRunner",
    "--project=project",
    "--region=us-central1",
    "--temp_location=gs://bucket/tmp",
    "--dry_run=True",
    "--no_auth",
)


@dataclass
class Submission:
    """A job of Dataflow.

    Attributes:
        job: the message that the client sends.
        graph: the pipeline that it stages.
        staged: the files that it stages besides, by name.
    """

    job: dataflow_v1beta3.Job
    graph: pb.Pipeline
    staged: dict[str, bytes] = field(default_factory=dict)

    @property
    def pool(self) -> dataflow_v1beta3.WorkerPool:
        (pool,) = self.job.environment.worker_pools
        return pool

    @property
    def experiments(self) -> list[str]:
        return list(self.job.environment.experiments)

    def environment_of(self, transform: pb.PTransform) -> pb.Environment:
        return self.graph.components.environments[transform.environment_id]

    def steps(self) -> Iterator[pb.PTransform]:
        """Yield the steps in which our code runs."""
        for transform in self.graph.components.transforms.values():
            if transform.spec.urn == primitives.PAR_DO.urn:
                yield transform

    def hints(self) -> dict[str, Mapping[str, str]]:
        """Return the hints of every step that has any, by the step's name."""
        found = {}
        names = {resource_hints.ACCELERATOR.urn: "accelerator", resource_hints.MAX_ACTIVE_BUNDLES_PER_WORKER.urn: "bundles"}
        for transform in self.graph.components.transforms.values():
            hints = self.environment_of(transform).resource_hints if transform.environment_id else {}
            if hints:
                found[transform.unique_name] = {names[urn]: value.decode() for urn, value in hints.items()}
        return found

    def images(self) -> set[str]:
        """Return the container images of all environments."""
        for environment in self.graph.components.environments.values():
            assert environment.urn == environments.DOCKER.urn
        return {
            pb.DockerPayload.FromString(environment.payload).container_image
            for environment in self.graph.components.environments.values()
        }

    def packages(self) -> list[list[str]]:
        """Return the names of the files that each environment installs."""
        return [
            [
                pb.ArtifactStagingToRolePayload.FromString(artifact.role_payload).staged_name
                for artifact in environment.dependencies
            ]
            for environment in self.graph.components.environments.values()
        ]


def submit(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Submission:
    """Run a command or a job, with `FLAGS`, until its pipeline is submitted."""
    from apache_beam.runners.dataflow.internal import apiclient

    submissions: list[Submission] = []

    def stage(_client, _folder, name, stream, **_options) -> None:
        staged[name] = Path(stream).read_bytes() if isinstance(stream, str) else stream.read()

    def wait(result, **_) -> None:
        client = apiclient.DataflowApplicationClient(result.job.options, result.job.root_staging_location)
        client.create_job_description(result.job)
        graph = pb.Pipeline.FromString(staged.pop("pipeline.pb"))
        submissions.append(Submission(result.job.proto, graph, staged))
        raise ImagepivotError("submitted")

    staged: dict[str, bytes] = {}
    with monkeypatch.context() as patched:
        patched.setattr(apiclient.DataflowApplicationClient, "stage_file_with_retry", stage)
        patched.setattr(remote, "watch", wait)
        with pytest.raises(ImagepivotError, match=r"^submitted$"):
            run()
    (submission,) = submissions
    return submission
