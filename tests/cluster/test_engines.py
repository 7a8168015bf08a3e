"""Every pipeline command on engines as users run them: the bytes of a local run, also where something is killed in the middle."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from extractors import ExtractorRequest
from pipelines.datasets.transforms import ReadDataset
from pipelines.features.model_handler import Extract
from schemas.dataset import open_dataset
from schemas.writing.validation import validate
from tests.builders import tree
from tests.cluster import engines
from tests.integration.gate import GATE, at_work
from tests.integration.processes import start, wait_for
from tests.integration.test_own_extractors import CODE
from tests.integration.workload import CODES, MODEL, OUTPUTS, UNIQUE, commands, make_inputs, one_line, run_locally

pytest.importorskip("timm", reason="the extra dev installs it")

pytestmark = [pytest.mark.slow, pytest.mark.engines, pytest.mark.timeout(1200)]

SECONDS = 300.0


@dataclass(frozen=True)
class Held:
    """An engine whose workers publish no shard while the file ``hold`` exists."""

    name: str
    engine: engines.Engine
    hold: Path

    def words(self, *command: str) -> tuple[str, ...]:
        return (*command, "--", *self.engine.flags)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def local(inputs, imagepivot, tmp_path_factory) -> dict[str, bytes]:
    return run_locally(imagepivot, inputs, tmp_path_factory.mktemp("local") / "here")


@contextmanager
def at_hand(
    run: Callable[..., AbstractContextManager[engines.Engine]], request: pytest.FixtureRequest, root: Path
) -> Iterator[Held]:
    """Run an engine with the gate in its workers; skip where it cannot be had, and show what it said where a test failed."""
    (root / "gate").mkdir()
    (root / "gate" / "sitecustomize.py").write_text(GATE)
    hold, failed = root / "hold", request.session.testsfailed
    environment = {"PYTHONPATH": str(root / "gate"), "HOLD": str(hold)}
    try:
        with run(root / "engine", **environment) as engine:
            yield Held(run.__name__, engine, hold)
            if request.session.testsfailed > failed:
                print(engine.logs())
    except engines.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def flink(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.flink, request, tmp_path_factory.mktemp("flink")) as held:
        yield held


@pytest.fixture(scope="module")
def spark(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.spark, request, tmp_path_factory.mktemp("spark")) as held:
        yield held


@pytest.fixture(scope="module")
def prism(request, tmp_path_factory) -> Iterator[Held]:
    with at_hand(engines.prism, request, tmp_path_factory.mktemp("prism")) as held:
        yield held


# --- the same bytes ----------------------------------------------------------------------------------------------------


def of_output(content: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    return {path: data for path, data in content.items() if path.startswith(f"{name}/") and not path.endswith(".lock")}


@pytest.fixture
def check(local) -> Callable[[Path, str], None]:
    """Compare a dataset with that of a local run."""

    def compare(folder: Path, name: str) -> None:
        assert of_output(tree(folder), name) == of_output(local, name)

    return compare


@pytest.mark.parametrize("name", ["flink", "spark", "prism"])
def test_every_command_makes_the_bytes_of_a_local_run(name, request, inputs, local, imagepivot, check, tmp_path):
    held = request.getfixturevalue(name)
    folder = shutil.copytree(inputs, tmp_path / "there")
    outputs = OUTPUTS if name == "flink" else UNIQUE
    for command, output, code in zip(commands("--shared-disk"), OUTPUTS, CODES, strict=True):
        if output not in outputs:
            continue
        done = imagepivot(*held.words(*command), cwd=folder, code=code)
        assert "Traceback" not in done.stderr
        check(folder, output)
    assert tree(folder) == {
        path: data for path, data in local.items() if path.partition("/")[0] not in {*OUTPUTS}.difference(outputs)
    }
    if name == "flink":
        assert set(held.engine.states()) == {"FINISHED"}
        assert len(held.engine.states()) == len(CODES)


# --- what users compose ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flink", "prism"])
def test_extract_in_a_pipeline_of_ones_own_has_the_values_of_features(name, request, inputs, local, imagepivot, tmp_path):
    held = request.getfixturevalue(name)
    imagepivot(*commands("--shared-disk")[-1], cwd=shutil.copytree(inputs, tmp_path / "here"), code=3)
    dataset = open_dataset(tmp_path / "here" / "features")
    extractor = ExtractorRequest(MODEL, weights=str(inputs / "w.pth"))
    images = [(path.stem, path.read_bytes()) for path in (inputs / "photos").iterdir()]
    options = PipelineOptions([*held.engine.flags])
    folder = tmp_path / "there"
    folder.mkdir()

    def keep(image_id, values):  # In a worker, which has this function by value.
        import numpy

        numpy.save(folder / f"{image_id}.npy", values)

    with beam.Pipeline(options=options) as pipeline:
        features, failures = pipeline | "Images" >> beam.Create(images) | Extract(extractor, device="cpu", batch_size=2)
        _ = features | "KeepFeatures" >> beam.MapTuple(lambda image_id, feature: keep(image_id, feature))
        _ = failures | "KeepFailures" >> beam.Map(lambda row: keep(row["key"], sorted(row.items())))
        rows = pipeline | ReadDataset(dataset.folder.location)
        _ = rows | "KeepRows" >> beam.Map(lambda row: keep(f"row-{row.image_id}", row.feature))
    (failure,) = dataset.failures().to_pylist()
    assert dict(np.load(folder / "broken.npy")) == {**failure, "uri": ""}
    ids = dataset.image_ids()
    assert {path.stem for path in folder.iterdir()} == {"broken", *ids, *(f"row-{image_id}" for image_id in ids)}
    for row in dataset:
        for prefix in ("", "row-"):
            np.testing.assert_array_equal(np.load(folder / f"{prefix}{row['image_id']}.npy"), row["feature"])


@pytest.mark.parametrize("name", ["flink", "prism"])
def test_extractor_of_ones_own_makes_the_bytes_of_a_local_run(name, request, inputs, tmp_path):
    held = request.getfixturevalue(name)
    folder = shutil.copytree(inputs, tmp_path / "there")
    (held.hold.parent / "gate" / "mean_colour.py").write_text(CODE)  # On the path of the workers.
    (folder / "mean_colour.py").write_text(CODE)
    command = ("features", "photos", "colours", "--extractor", "mean-colour", "--import", "mean_colour", "--shards", "2")
    made = []
    for words in ((*command, "--workers", "1"), held.words(*command, "--shared-disk")):
        with start(*words, folder=folder) as launcher:
            ended = launcher.wait(SECONDS)
        assert ended.returncode == 3, ended.stderr
        made.append({path: data for path, data in of_output(tree(folder), "colours").items() if "part-" in path})
        shutil.rmtree(folder / "colours")
    assert made[1] == made[0]
    assert sum(path.endswith(".parquet") for path in made[0]) == 2


# --- what is killed in the middle --------------------------------------------------------------------------------------


@contextmanager
def holding(held: Held) -> Iterator[None]:
    """Let no worker publish a shard during the block."""
    held.hold.touch()
    try:
        yield
    finally:
        held.hold.unlink(missing_ok=True)


def written(output: Path) -> Callable[[], list[Path]]:
    """Return what finds the shards that workers are about to publish."""
    return lambda: list(output.glob(".part-*"))


def kill_workers(held: Held) -> None:
    killed = held.engine.workers()
    assert killed
    for worker in killed:
        os.kill(worker, signal.SIGKILL)


def test_flink_continues_without_a_killed_task_manager(flink, inputs, check, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "there")
    engine = flink.engine
    with start(*flink.words(*commands("--shared-disk")[0]), folder=folder) as launcher:
        with holding(flink):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            (lost, *_) = engine.busy()
            engine.processes[lost].kill()
            wait_for(lambda: engine.task_managers() == 1, SECONDS)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 0, ended.stderr
    check(folder, "plain")
    assert validate(str(folder / "plain")) == []
    assert "FAILED" not in engine.states()


def test_killed_worker_fails_the_job(flink, inputs, check, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "there")
    with start(*flink.words(*commands("--shared-disk")[0]), folder=folder) as launcher:
        with holding(flink):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            kill_workers(flink)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 0, ended.stderr
    check(folder, "plain")


@pytest.mark.parametrize("name", ["spark", "prism"])
def test_killed_worker_ends_the_job_and_the_same_command_resumes(name, request, inputs, imagepivot, check, tmp_path):
    held = request.getfixturevalue(name)
    folder = shutil.copytree(inputs, tmp_path / "there")
    words = held.words(*commands("--shared-disk")[0])
    with start(*words, folder=folder) as launcher:
        with holding(held):
            at_work(folder / "plain", SECONDS)
            wait_for(written(folder / "plain"), SECONDS)
            kill_workers(held)
        ended = launcher.wait(SECONDS)
    assert ended.returncode == 1
    said = {
        "spark": "client cancelled",
        "prism": "a worker process ended unexpectedly, because it was killed or ran out of memory",
    }
    assert said[name] in ended.stderr
    imagepivot(*words, cwd=folder)
    check(folder, "plain")


def state_on_flink(held: Held, job: str) -> str:
    """Return the state of a job on Flink itself."""
    (state,) = [found["state"] for found in held.engine.ask("/jobs/overview")["jobs"] if found["jid"] == job]
    return state


def check_on_flink(held: Held, text: str) -> tuple[str, str]:
    """Check the page in a message, and return Flink's id of the job and the command that cancels it."""
    address = held.engine.rest
    found = re.search(rf"Its page: {address}/#/job/running/(\w+)/overview To cancel the job: (curl .*)", text)
    assert found is not None, text
    job, cancel = found.groups()
    assert state_on_flink(held, job) == "RUNNING"
    assert cancel.strip() == f"curl -X PATCH '{address}/jobs/{job}?mode=cancel'"
    return job, cancel.strip()


def test_detached_flink_job_names_page_and_cancel_command(flink, inputs, imagepivot, check, tmp_path):
    folder = shutil.copytree(inputs, tmp_path / "there")
    command = commands("--shared-disk")[0]
    with holding(flink):
        text = imagepivot(*flink.words(*command, "--detach"), cwd=folder).stdout
        assert re.match(r"job '\S+' of PortableRunner is submitted and continues without this command\. ", text)
        job, cancel = check_on_flink(flink, text)
        at_work(folder / "plain", SECONDS)
        wait_for(written(folder / "plain"), SECONDS)
        subprocess.run(shlex.split(cancel), check=True, capture_output=True)
        wait_for(lambda: state_on_flink(flink, job) == "CANCELED", SECONDS)
    imagepivot(*flink.words(*command), cwd=folder)
    check(folder, "plain")


# --- what a user gets wrong --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flink", "spark", "prism"])
def test_users_mistake_on_a_worker_is_one_line(name, request, imagepivot, tmp_path):
    held = request.getfixturevalue(name)
    (tmp_path / "captions.tsv").write_text("image_id\tindex\ttext\n" + "a\t0\tx\ne\t0\tx\n" * 2)  # Found in both shards.
    done = imagepivot(*held.words(*commands("--shared-disk")[0]), cwd=tmp_path, code=1)
    assert re.search(r"caption key '[ae]/en/comparable/0' \(image_id/language/portion/index\) occurs twice", one_line(done))
    assert not list((tmp_path / "plain").glob("part-*"))
