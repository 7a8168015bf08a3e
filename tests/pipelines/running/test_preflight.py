from importlib.metadata import version

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from pipelines.running import preflight
from pipelines.running.execution import Execution
from pipelines.running.preflight import SIGN, FirstWorker
from pipelines.running.runner import run_pipeline
from pipelines.running.transforms import Begin
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder

ONE = Execution(workers=1)


def no_gpu() -> None:
    raise UsageError("--device 'cuda' is not on this host")


def not_a_users_mistake() -> None:
    raise ZeroDivisionError


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "out"))


def test_a_worker_like_the_launcher_leaves_a_sign(folder):
    FirstWorker.of_launcher(folder)()
    assert folder.names() == [SIGN]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("version", lambda name: "9.9", rf"^the first worker cannot do .* '9\.9', expected '{version('imagepivot')}'"),
        ("_code", lambda: "0" * 64, r"it has imagepivot '.*' with other code in it"),
    ],
)
def test_another_version_or_other_code(folder, monkeypatch, place, value, says):
    check = FirstWorker.of_launcher(folder)
    monkeypatch.setattr(preflight, place, value)
    with pytest.raises(UsageError, match=says):
        check()
    assert folder.names() == []


def test_what_the_work_needs_besides(folder):
    with pytest.raises(UsageError, match=r"^the first worker cannot do the work: --device 'cuda' is not on this host$"):
        FirstWorker.of_launcher(folder, no_gpu)()
    with pytest.raises(ZeroDivisionError):
        FirstWorker.of_launcher(folder, not_a_users_mistake)()
    assert folder.names() == []


@pytest.mark.slow
@pytest.mark.parametrize("values", [[], [1], ["a", "b", "c"]])
def test_a_pipeline_begins_with_its_values(folder, values):
    for check in (None, FirstWorker.of_launcher(folder)):
        run_pipeline(lambda pipeline, check=check: assert_that(pipeline | Begin(values, check), equal_to(values)), ONE)
    assert folder.names() == [SIGN]


def test_nothing_goes_on_without_the_check(folder, tmp_path):
    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | Begin([1], FirstWorker(folder)) | beam.Map(lambda _: (tmp_path / "done").touch())

    with pytest.raises(UsageError, match="the first worker cannot do the work"):
        run_pipeline(build, ONE)
    assert not (tmp_path / "done").exists()


def test_an_output_that_a_worker_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"the first worker cannot do the work: cannot use '.*file/out/"):
        FirstWorker.of_launcher(Folder(str(tmp_path / "file" / "out")))()
