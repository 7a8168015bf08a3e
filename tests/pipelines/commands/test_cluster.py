"""The command ``cluster``: what it takes for its own, what it hands on, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.commands import app as cli
from schemas.errors import UsageError

pytestmark = pytest.mark.slow

FEATURES = ("features", "gs://bucket/photos", "gs://bucket/features")
GPUS = ("--gpu", "nvidia-l4", "--gpus-per-worker", "2", "--worker-machine", "g2-standard-24")
DATAFLOW = ("--", "--runner=DataflowRunner", "--project=p", "--max_num_workers=4")


def call(*words: object) -> str:
    done = CliRunner().invoke(cli.app, ["cluster", "plan", *map(str, words)])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def plan(*words: object) -> dict:
    place = words.index("--") if "--" in words else len(words)
    return json.loads(call(*words[:place], "--json", *words[place:]))


def test_with_a_count_nothing_is_looked_at():
    """Neither the bucket nor the weights exist."""
    words = (*FEATURES, "--count", 1_000_000, "--weights", "gs://bucket/w.pth", *GPUS, "--rate", 900, *DATAFLOW)
    planned = plan(*words)
    assert planned["work"]["shards"] == 16
    assert planned["work"]["row_bytes"] == 8192
    assert planned["cluster"] == {
        "machines": 4,
        "slots": 2,
        "rate": {"per_second": 900.0, "origin": "given"},
        "machine": "g2-standard-24",
        "gpu": "nvidia-l4",
    }
    assert (planned["slots"], planned["rounds"]) == (8, 2)
    hints = {step["name"]: step["hints"] for step in planned["graph"]["steps"] if step["hints"]}
    assert set(hints) == {"ExtractFeatures/Start/FirstWorker", "ExtractFeatures/ExtractShard"}
    assert hints["ExtractFeatures/ExtractShard"]["accelerator"].startswith(
        "type:nvidia-l4;count:2;machine_type:g2-standard-24;"
    )


def test_options_may_stand_anywhere_and_those_of_the_command_are_read_as_it_reads_them():
    printed = call("--count", 50, *FEATURES, "--extractor", "faster-rcnn-36", "--machines", 3, "--shards=32")
    assert "50 images / 32 shards = 2 each" in printed
    assert "x 295,920 bytes" in printed
    assert "on this machine" in printed
    with pytest.raises(UsageError, match="the number of shards is 0"):
        call(*FEATURES, "--count", 50, "--shards", 0)


def test_images_that_are_there_are_listed(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(bytes(100 * (number + 1)))
    before = sorted(tmp_path.iterdir())
    planned = plan("features", tmp_path, tmp_path / "features", "--weights", "random:0")
    assert (planned["work"]["count"], planned["work"]["item_bytes"], planned["read_bytes"]) == (3, 200.0, 600)
    assert planned["requests"] == {"writes": 0, "reads": 0}
    assert sorted(tmp_path.iterdir()) == before


def test_captions_are_estimated_from_numbers_or_by_their_files(tmp_path):
    words = ("captions", "gs://bucket/c.tsv", "gs://bucket/c", "--format", "table")
    invented = plan(*words, "--count", 100_000_000, "--item-bytes", 70)
    assert invented["work"]["shards"] == 128
    assert invented["graph"] is None
    table = tmp_path / "c.tsv"
    table.write_text("image_id\ttext\n1\ta dog\n")
    found = plan("captions", table, tmp_path / "out", "--format", "table", "--count", 1)
    assert found["read_bytes"] == table.stat().st_size
    assert "ReadCaptions/ReadPieces" in [step["name"] for step in found["graph"]["steps"]]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("features", "gs://b/photos", "--count", "5"), "OUTPUT is missing"),
        ((*FEATURES, "--count", "0"), "--count is 0"),
        ((*FEATURES, "--count", "5", "--machines", "0"), "--machines is 0, expected 1 or more"),
        ((*FEATURES, "--count", "5", "--rate", "0"), "--rate is 0"),
        ((*FEATURES, "--count", "5", "--item-bytes", "-1"), "--item-bytes is -1"),
        ((*FEATURES, "--count", "5", *GPUS), "the workers run on this machine"),
        (("features", "photos", "gs://b/f", "--count", "5", *DATAFLOW), "IMAGES 'photos' is a path on this machine"),
        (("vocabulary", "captions", "v", "--count", "5"), "--count is for captions and features"),
        ((*FEATURES, "--count", "5", "--shards", "1", "--extractor", "nothing"), "nothing"),
    ],
)
def test_what_is_refused(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message):
        call(*words)
    assert list(Path().iterdir()) == []


def test_an_option_that_the_command_does_not_have_is_wrong_usage():
    done = CliRunner().invoke(
        cli.app, ["cluster", "plan", "features", "gs://b/photos", "gs://b/f", "--count", "5", "--rates", "3"]
    )
    assert done.exit_code == 2
    assert "No such option: --rates" in done.output
