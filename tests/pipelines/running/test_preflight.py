from importlib.metadata import version

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from pipelines.running import preflight
from pipelines.running.preflight import PREFLIGHT_MARKER, PreflightCheck
from pipelines.running.runner import run_pipeline
from pipelines.running.transforms import CreateAfterPreflight
from schemas.errors import DatasetError, UsageError
from schemas.storage.folder import Folder
from tests.beam import IN_BEAM


def no_gpu() -> None:
    raise UsageError("--device 'cuda' is not on this host")


def not_a_users_mistake() -> None:
    raise ZeroDivisionError


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "out"))


def test_worker_like_the_launcher_leaves_a_sign(folder):
    PreflightCheck(folder)()
    assert folder.names() == [PREFLIGHT_MARKER]


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("version", lambda name: "9.9", rf"^the first worker failed .* imagepivot 9\.9, expected {version('imagepivot')}:"),
        ("_code_digest", lambda: "0" * 64, "expected the launcher's code of that version: install"),
    ],
)
def test_another_version_or_other_code(folder, monkeypatch, place, value, says):
    check = PreflightCheck(folder)
    monkeypatch.setattr(preflight, place, value)
    with pytest.raises(UsageError, match=says):
        check()
    assert folder.names() == []


def test_preflight_runs_the_extra_check(folder):
    with pytest.raises(UsageError, match=r"^the first worker failed its check: --device 'cuda' is not on this host$"):
        PreflightCheck(folder, no_gpu)()
    with pytest.raises(ZeroDivisionError):
        PreflightCheck(folder, not_a_users_mistake)()
    assert folder.names() == []


@pytest.mark.slow
@pytest.mark.parametrize("values", [[], [1], ["a", "b", "c"]])
def test_pipeline_begins_with_its_values(folder, values):
    for check in (None, PreflightCheck(folder)):
        run_pipeline(
            lambda pipeline, check=check: assert_that(pipeline | CreateAfterPreflight(values, check), equal_to(values)), IN_BEAM
        )
    assert folder.names() == [PREFLIGHT_MARKER]


def test_failed_preflight_stops_the_pipeline(folder, tmp_path):
    first, last = CreateAfterPreflight([1], PreflightCheck(folder, code="")), beam.Map(lambda _: (tmp_path / "done").touch())
    with pytest.raises(UsageError, match="the first worker failed its check"):
        run_pipeline(lambda pipeline: pipeline | first | last, IN_BEAM)
    assert not (tmp_path / "done").exists()


def test_preflight_unwritable_output_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"the first worker failed its check: cannot use '.*file/out'"):
        PreflightCheck(Folder(str(tmp_path / "file" / "out")))()
