"""Submissions to Dataflow: hints, images, files and options, as the stock client makes them; nothing is sent."""

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("google.cloud.dataflow_v1beta3", reason="pip install 'imagepivot[gcp]'")

from apache_beam.portability.api import beam_runner_api_pb2 as pb
from apache_beam.portability.common_urns import environments, primitives, resource_hints
from apache_beam.runners.dataflow.internal import apiclient
from google.cloud import dataflow_v1beta3

from pipelines.commands import app as cli
from pipelines.running import remote, runner
from pipelines.running.package_wheel import source_files
from schemas.errors import ImagepivotError, UsageError
from tests.fake_extractors import use_colours

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

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


HINTS = {"accelerator": "type:nvidia-l4;count:1;machine_type:g2-standard-4;install-nvidia-driver", "bundles": "1"}
GPU = ("--gpu", "nvidia-l4", "--worker-machine", "g2-standard-4")
OURS = "imagepivot-0.2.0-py3-none-any.whl"
BEAMS = {"extra_packages.txt", "submission_environment_dependencies.txt"}  # Lists of names and versions, made by Beam.


def command(*arguments: object) -> None:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None:
        raise result.exception


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory, patch) -> Path:
    """The working folder, in which there also is what no run has to do with."""
    folder = tmp_path_factory.mktemp("submissions")
    use_colours(patch)
    patch.chdir(folder)
    rows = [f"i{number}\t{language}\tThe Dog {number}" for number in range(6) for language in ("en", "de")]
    Path("captions.tsv").write_text("\n".join(["image_id\tlanguage\ttext", *rows]) + "\n")
    for name in ("private.txt", "schemas.py", "setup.py", "requirements.txt"):
        Path(name).write_text("SECRET = 1\n")
    rows = [f"i{number},gs://photos/{number}.jpg" for number in range(10)]
    Path("images.csv").write_text("\n".join(["image_id,uri", *rows]) + "\n")
    return folder


CAPTIONS = ("captions", "captions.tsv", "out", "--format", "table", "--shards", 2)
FEATURES = ("features", "images.csv", "out")


@pytest.fixture(scope="module")
def with_gpus(folder, patch) -> Submission:
    return submit(lambda: command(*FEATURES, *GPU, "--shared-disk", "--", *FLAGS), patch)


@pytest.fixture(scope="module")
def without_gpus(folder, patch) -> Submission:
    return submit(lambda: command(*CAPTIONS, "--shared-disk", "--", *FLAGS), patch)


def test_only_model_and_preflight_steps_request_gpus(with_gpus):
    assert with_gpus.hints() == {"ExtractFeatures/Start/FirstWorker": HINTS, "ExtractFeatures/ExtractShard": HINTS}
    assert {"ExtractFeatures/ListImages", "CommitDataset/Commit"} <= {step.unique_name for step in with_gpus.steps()}


def test_options_of_workers(with_gpus, without_gpus):
    """Every core of a worker without GPUs is a process, and the runner chooses the number of threads."""
    assert with_gpus.pool.machine_type == ""  # That of the other workers.
    assert with_gpus.pool.num_threads_per_worker == 1
    assert "no_use_multiple_sdk_containers" in with_gpus.experiments
    assert "use_multiple_sdk_containers" not in with_gpus.experiments
    assert without_gpus.hints() == {}
    assert "use_multiple_sdk_containers" in without_gpus.experiments
    assert without_gpus.pool.num_threads_per_worker == 0


@pytest.mark.parametrize("words", [(*FEATURES, *GPU), CAPTIONS])
def test_container_image_applies_to_every_step(words, patch):
    image = "eu-docker.pkg.dev/project/images/imagepivot:1"
    flags = ("--shared-disk", "--", *FLAGS, f"--sdk_container_image={image}")
    one = submit(lambda: command(*words, *flags), patch)
    steps = [one.environment_of(step) for step in one.steps()]
    assert {environment.urn for environment in steps} == {environments.DOCKER.urn}
    assert {pb.DockerPayload.FromString(environment.payload).container_image for environment in steps} == {image}
    assert {each.container_image for each in one.pool.sdk_harness_container_images} == {image}
    assert set(one.staged) <= BEAMS


def test_only_the_package_wheel_is_staged(with_gpus, without_gpus):
    for one in (with_gpus, without_gpus):
        assert set(one.staged) == {OURS, *BEAMS}
        names = zipfile.ZipFile(io.BytesIO(one.staged[OURS])).namelist()
        assert sorted(name for name in names if ".dist-info/" not in name) == sorted(name for name, _ in source_files())
        assert one.staged["extra_packages.txt"].decode().split() == [OURS]
        assert not any(b"SECRET" in data for data in one.staged.values())
        assert all(sorted(packages) == sorted({OURS, *BEAMS}) for packages in one.packages())


def test_too_large_graph_is_refused_before_submission(patch):
    with patch.context() as smaller:
        smaller.setattr(runner, "MAX_GRAPH_BYTES", 1000)
        with pytest.raises(UsageError, match=r"the pipeline for DataflowRunner is .* bytes, expected at most 1,000: "):
            command(*FEATURES, "--shared-disk", "--", *FLAGS)
