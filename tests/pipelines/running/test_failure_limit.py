"""Too many failures fail a job after its commit: here, where a command waits, and where nobody does."""

from __future__ import annotations

import sys
import traceback
from fractions import Fraction
from pathlib import Path

import pytest

from pipelines.commands import flex_template
from pipelines.running import runner
from pipelines.running.transforms import _commit
from schemas.dataset import open_dataset
from schemas.errors import TooManyFailuresError, UsageError, read_error
from schemas.manifest import Manifest
from schemas.storage.folder import Folder
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import FailureLimit
from schemas.writing.validation import validate
from tests.beam import BEAM_FLAGS, IN_BEAM
from tests.builders import tree
from tests.fake_extractors import picture, use_colours

OPTIONS = ("--device", "cpu", "--shards", "2")
FLINK = ("--shared-disk", "--", "--runner=FlinkRunner", "--job_endpoint=localhost:1")


@pytest.mark.parametrize("text", ["0", "1", "7", "0%", "1%", "12.5%", "33.3%", "100%"])
def test_limit_is_exceeded_by_one_more_and_by_all(text):
    for inputs in (1, 3, 8, 40, 1000):
        share = text.endswith("%")
        allowed = int(Fraction(text[:-1]) * inputs // 100) if share else int(text)
        for failed in {0, 1, allowed, allowed + 1, inputs - 1, inputs}:
            if failed <= inputs:
                expected = failed > allowed or failed == inputs
                assert FailureLimit(text).is_exceeded(failed=failed, rows=inputs - failed) is expected, (failed, inputs)
    assert not FailureLimit(text).is_exceeded(failed=0, rows=0)


@pytest.mark.parametrize("text", ["", "%", "-1", "1 %", "1.5", "1e2", "101%", "100.001%", "ten", "1%%", "٣", "9" * 5000])
def test_limit_of_another_form_is_refused(text):
    with pytest.raises(UsageError, match=r"^--max-failures is '.*', expected 0 or more, or a share of the inputs from 0% to"):
        FailureLimit.parse(text)
    assert FailureLimit.parse(" 1% ") == FailureLimit("1%")


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    """Ten images, two of which are none."""
    use_colours(monkeypatch)
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(10):
        (folder / f"{number}.png").write_bytes(b"text" if number in (3, 8) else picture(number, 0, 0))
    return folder


@pytest.fixture
def elsewhere(monkeypatch) -> list[BaseException]:
    """Runs pipelines of remote runners here; lists the errors of the jobs, of which a launcher gets the text."""
    errors: list[BaseException] = []
    local = runner.run_pipeline

    def run(build, execution, **_):
        try:
            local(build, IN_BEAM)
        except Exception as error:  # noqa: BLE001 -- any error fails a job
            errors.append(error)
            text = "".join(traceback.format_exception(error))
            if not (execution.detach or execution.template):
                raise read_error(f"the job failed:\n{text}\n\tat java.base") from None
        if execution.detach:
            raise runner.DetachedError("submitted")

    monkeypatch.setattr(runner, "run_pipeline", run)
    return errors


HERE, BY_BEAM = ("--workers", "1"), ("--", *BEAM_FLAGS)


@pytest.mark.parametrize(
    ("flags", "limit", "code"),
    [(HERE, "1", 3), (HERE, "20%", 0), (BY_BEAM, "19.9%", 3), (FLINK, "0", 3), (FLINK, "2", 0)],
)
def test_command_that_waits_ends_with_code_3_and_the_dataset(call, images, tmp_path, elsewhere, flags, limit, code):
    found = call("features", images, tmp_path / "f", *OPTIONS, "--max-failures", limit, *flags)
    assert found[0] == code, found
    assert "features: 8 rows in 2 shards" in found[1]
    assert "2 inputs failed: 2 not_an_image. They are listed by" in found[2]
    assert "Error" not in found[2]
    assert validate(tmp_path / "f") == []
    assert elsewhere == []  # The job ends well: a runner would repeat it.
    assert call("features", images, tmp_path / "f", *OPTIONS, "--max-failures", limit)[0] == code  # Up to date.


def test_detached_job_fails_on_its_runner_after_the_commit(call, images, tmp_path, elsewhere):
    code, _, err = call("features", images, tmp_path / "f", *OPTIONS, "--max-failures", "10%", "--detach", *FLINK)
    assert (code, err) == (0, "")
    assert [type(error) for error in elsewhere] == [TooManyFailuresError]
    assert str(elsewhere[0]) == (
        "2 of 10 inputs failed (2 not_an_image), more than --max-failures 10% allows. The dataset "
        f"{str(tmp_path / 'f')!r} is committed; imagepivot inspect lists its --failures"
    )
    assert validate(tmp_path / "f") == []
    assert open_dataset(tmp_path / "f").manifest.rows == 8


@pytest.mark.parametrize(("limit", "errors"), [(("--max_failures=10%",), 1), (("--max_failures=2",), 0)])
def test_flex_template_job_fails_after_the_commit(monkeypatch, images, tmp_path, elsewhere, limit, errors):
    output = tmp_path / "f"
    places = (f"--images={images}", f"--output={output}", "--shared_disk=true", "--shards=2", "--device=cpu")
    googles = ("--runner=DataflowRunner", "--project=p", "--template_location=gs://b/job_object")
    monkeypatch.setattr(sys, "argv", ["launch.py", "--command=features", *places, *limit, *googles])
    with pytest.raises(SystemExit) as end:
        flex_template.main()
    assert end.value.code in (0, None)
    assert [type(error) for error in elsewhere] == [TooManyFailuresError] * errors
    assert validate(output) == []


def test_captions_of_a_pipeline_fail_after_the_commit(call, tmp_path, elsewhere):
    (tmp_path / "c.tsv").write_text("image_id\ttext\na\tone\nb\t\nc\t\n")
    words = ("captions", tmp_path / "c.tsv", tmp_path / "c", "--format", "table", "--shards", "2", "--max-failures")
    assert call(*words, "50%", "--detach", *FLINK)[0] == 0
    assert [type(error) for error in elsewhere] == [TooManyFailuresError]
    assert call(*words, "50%", *FLINK)[0] == 3  # The dataset is up to date.


def test_commit_step_that_a_runner_repeats_fails_alike_and_keeps_the_dataset(call, images, tmp_path):
    call("features", images, tmp_path / "f", *OPTIONS, "--workers", "1", "--max-failures", "2")
    manifest = Manifest.read(Folder(str(tmp_path / "f")))
    output = OutputDataset(
        Folder(str(tmp_path / "f")), "features", manifest.parameters, shards=2, max_failures=FailureLimit("1")
    )
    (tmp_path / "f" / "_manifest.json").unlink()
    for _ in range(3):
        with pytest.raises(
            TooManyFailuresError, match=r"^2 of 10 inputs failed \(2 not_an_image\), more than --max-failures 1 a"
        ):
            _commit(b"", [0, 1], output, ("pillow",))
        assert validate(tmp_path / "f") == []


@pytest.mark.parametrize("limit", ["0", "40", "1000", "100%"])
def test_forty_dead_addresses_are_no_success(call, tmp_path, monkeypatch, elsewhere, limit):
    use_colours(monkeypatch)
    (tmp_path / "t.csv").write_text("image_id,uri\n" + "".join(f"a{number},a{number}.jpg\n" for number in range(40)))
    words = ("features", tmp_path / "t.csv", tmp_path / "f", *OPTIONS, "--max-failures", limit)
    code, out, err = call(*words, "--workers", "1")
    assert (code, "0 rows in 2 shards" in out, "all 40 inputs failed: 40 unreadable" in err) == (3, True, True)
    before = tree(tmp_path / "f")
    assert call(*words, "--update", "--workers", "1")[0] == 3
    assert tree(tmp_path / "f") == before


def test_forty_dead_addresses_fail_the_first_worker(call, tmp_path, monkeypatch, elsewhere):
    use_colours(monkeypatch)
    (tmp_path / "t.csv").write_text("image_id,uri\n" + "".join(f"a{number},a{number}.jpg\n" for number in range(40)))
    code, _, err = call("features", tmp_path / "t.csv", tmp_path / "f", *OPTIONS, "--max-failures", "100", *FLINK)
    assert (code, err.count("Error: the first worker failed its check: it cannot read the images of '")) == (1, 1)
    assert not [name for name in Folder(str(tmp_path / "f")).names() if "part-" in name or "manifest" in name]
