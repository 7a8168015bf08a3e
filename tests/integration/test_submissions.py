"""Submissions to Dataflow: hints, images, files, options and sizes, as the stock client makes them; nothing is sent."""

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
    list_images(10)
    return folder


def list_images(count: int) -> None:
    rows = "".join(f"i{number},gs://photos/{number}.jpg\n" for number in range(count))
    Path("images.csv").write_text(f"image_id,uri\n{rows}")


def captions(output: str, shards: int = 2) -> tuple[object, ...]:
    return ("captions", "captions.tsv", output, "--format", "table", "--shards", shards)


def features(*options: object) -> tuple[object, ...]:
    return ("features", "images.csv", "out", *options)


@pytest.fixture(scope="module")
def submitted(folder, patch):
    """Return what a command submits; flags for Beam stand behind ``--``."""

    def run(*arguments: object) -> Submission:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        return submit(lambda: command(*arguments[:end], "--shared-disk", "--", *FLAGS, *arguments[end + 1 :]), patch)

    return run


@pytest.fixture(scope="module")
def with_gpus(submitted) -> Submission:
    return submitted(*features(*GPU))


def test_only_model_and_preflight_steps_request_gpus(with_gpus):
    assert with_gpus.hints() == {"ExtractFeatures/Start/FirstWorker": HINTS, "ExtractFeatures/ExtractShard": HINTS}
    assert {"ExtractFeatures/ListImages", "CommitDataset/Commit"} <= {step.unique_name for step in with_gpus.steps()}


def test_steps_with_gpus_are_not_fused_with_others(with_gpus):
    """Steps fuse within an environment only."""
    model, check, listing, commit = (
        next(step.environment_id for step in with_gpus.steps() if step.unique_name.endswith(name))
        for name in ("/ExtractShard", "/FirstWorker", "/ListImages", "/Commit")
    )
    assert model == check != listing == commit


def test_options_of_workers(submitted, with_gpus):
    """Every core of a worker without GPUs is a process, and the runner chooses the number of threads."""
    assert with_gpus.pool.machine_type == ""  # That of the other workers.
    assert with_gpus.pool.num_threads_per_worker == 1
    assert "no_use_multiple_sdk_containers" in with_gpus.experiments
    assert "use_multiple_sdk_containers" not in with_gpus.experiments
    without = submitted(*captions("out"))
    assert without.hints() == {}
    assert "use_multiple_sdk_containers" in without.experiments
    assert without.pool.num_threads_per_worker == 0


def test_container_image_applies_to_every_step(submitted):
    image = "eu-docker.pkg.dev/project/images/imagepivot:1"
    for arguments in (features(*GPU), captions("out")):
        one = submitted(*arguments, "--", f"--sdk_container_image={image}")
        assert one.images() == {image}
        assert {each.container_image for each in one.pool.sdk_harness_container_images} == {image}
        assert set(one.staged) <= BEAMS


def test_only_the_package_wheel_is_staged(submitted, with_gpus):
    for one in (with_gpus, submitted(*captions("out"))):
        assert set(one.staged) == {OURS, *BEAMS}
        names = zipfile.ZipFile(io.BytesIO(one.staged[OURS])).namelist()
        assert sorted(name for name in names if ".dist-info/" not in name) == sorted(name for name, _ in source_files())
        assert one.staged["extra_packages.txt"].decode().split() == [OURS]
        assert not any(b"SECRET" in data for data in one.staged.values())
        assert all(sorted(packages) == sorted({OURS, *BEAMS}) for packages in one.packages())


def sizes(one: Submission) -> tuple[int, int]:
    """Bytes of the message to Dataflow, and of the graph in the bucket."""
    return len(type(one.job).to_json(one.job)), one.graph.ByteSize()


def test_submitted_graph_size_is_independent_of_images(submitted):
    few = sizes(submitted(*features("--shards", 4)))
    list_images(100_000)
    many = sizes(submitted(*features("--shards", 4)))
    list_images(10)
    assert many[0] == pytest.approx(few[0], abs=50)
    assert many[1] == pytest.approx(few[1], abs=500)


def test_submitted_graph_size_hardly_depends_on_shards(submitted):
    """The message not at all, the graph by the digest of each shard's list of images."""
    list_images(10_000)
    for arguments, each in ((features("--shards"), 64), (captions("out")[:-1], 8)):
        few, many = (sizes(submitted(*arguments, shards)) for shards in (2, 1024))
        assert many[0] == pytest.approx(few[0], abs=50)
        assert many[1] - few[1] < each * 1024
    list_images(10)


def test_too_large_graph_is_refused_before_submission(patch):
    with patch.context() as smaller:
        smaller.setattr(runner, "MAX_GRAPH_BYTES", 1000)
        with pytest.raises(UsageError, match=r"the pipeline for DataflowRunner is .* bytes, expected at most 1,000: "):
            command(*features(), "--shared-disk", "--", *FLAGS)
