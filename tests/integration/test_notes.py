"""``--note``: texts in the manifest that say which run wrote it."""

import json

import pytest

from schemas.dataset import open_dataset
from schemas.manifest import MANIFEST_NAME

WORDS = ("captions", "table.tsv", "out", "--format", "table", "--shards", "2", "--workers", "1")


@pytest.fixture
def run(imagepivot, tmp_path):
    """Write the captions with notes, and return the manifest's."""
    (tmp_path / "table.tsv").write_text("image_id\ttext\na\tone\nb\ttwo\n")

    def run(*notes: str, code: int = 0) -> dict[str, str]:
        done = imagepivot(*WORDS, *(f"--note={note}" for note in notes), code=code, cwd=tmp_path)
        return done.stderr if code else open_dataset(tmp_path / "out").manifest.notes

    return run


def test_notes_are_shown_and_belong_to_no_fingerprint(run, imagepivot, tmp_path):
    assert run() == {}
    plain = (tmp_path / "out" / MANIFEST_NAME).read_text()
    assert "notes" not in plain
    (tmp_path / "out" / MANIFEST_NAME).unlink()
    assert run("job=17", "image=repo/cpu@sha256:0a", "who=a=b, c") == {
        "job": "17",
        "image": "repo/cpu@sha256:0a",
        "who": "a=b, c",
    }
    assert json.loads(plain)["fingerprint"] == open_dataset(tmp_path / "out").fingerprint
    shown = imagepivot("inspect", "out", cwd=tmp_path).stdout
    assert all(text in shown for text in ("notes", "job", "17", "repo/cpu@sha256:0a"))
    assert json.loads(imagepivot("inspect", "out", "--json", cwd=tmp_path).stdout)["notes"]["job"] == "17"


def test_notes_of_the_run_that_commits_replace_all_earlier_ones(run, tmp_path):
    run("job=17", "image=a")
    assert run("job=18") == {"job": "17", "image": "a"}, "nothing was written"
    next((tmp_path / "out").glob("part-00000*")).unlink()
    assert run("job=19") == {"job": "19"}


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        (["job"], "--note is 'job', expected KEY=VALUE"),
        (["a=x\ny"], "without line ends"),
        (["a=1", "a=2"], "--note has a key twice"),
        (["a=" + "é" * 2048], "--note has 4,098 bytes in all, expected at most 4,096"),
    ],
)
def test_other_notes_are_refused(run, notes, says):
    assert says in " ".join(run(*notes, code=2).split())
