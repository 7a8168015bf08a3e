"""Locations at which nothing can be, given as every argument of every command: an error in one paragraph, and nothing written."""

import os
from pathlib import Path

import numpy as np
import pytest
import typer

from pipelines.commands import app as cli
from tests.tiny_bert import make_tiny_bert

BAD = {
    "no bucket s3": "s3://",
    "no bucket gs": "gs://",
    "no bucket but a key": "s3:///key",
    "root": "/",
    "empty": "",
    "http": "http://127.0.0.1:9/x",
    "another scheme": "ftp://127.0.0.1:9/x",
    "no scheme": "://x",
    "NUL": "a\0b",
    "too long": "x" * 300,
    "loop": "loop",
    "below a loop": "loop/x",
    "nobody's": "~nobody-at-all/x",
    "below a file": "table.tsv/x",
    "not UTF-8": "\udcff",
    "line end": "none\n",
}
# Whole command lines; IN marks what is read, OUT what is written. Several of a line are tried one after the other.
LINES = {
    "captions": "captions table.tsv OUT --format table --workers 1",
    "vocabulary": "vocabulary captions OUT",
    "encode": "encode captions vocabulary OUT",
    "word-vectors": "word-vectors vocabulary words.vec OUT --languages en",
    "text-features": "text-features captions OUT --model bert --device cpu",
    "features": "features photos OUT --weights random:0 --device cpu --dry-run",
    "import": "import array.npy OUT --name x",
    "export": "export features OUT --format npy",
    "inspect": "inspect features",
    "validate": "validate features",
    "publish": "publish features OUT",
    "diff": "diff features features",
    "duplicates": "duplicates features captions",
    "report": "report features --output report.html",
    "view": "view features photos --image 1 -o drawing.png",
    "evaluate": "evaluate run --captions encoded --features features",
    "compare": "compare run",
    "embed": "embed run OUT --features features --captions encoded",
    "search": "search run dog --tokenized --features features",
    "sts": "sts run pairs.tsv",
    "figures": "figures run OUT --captions encoded --features features --images photos",
    "reproduce": "reproduce kadar2018 OUT --captions encoded --features features --vocabulary vocabulary --seeds 1",
    "train": "train demo OUT --captions encoded --features features --vocabulary vocabulary --max-steps 1",
    "doctor": "doctor OUT",
    "build": "build demo --output OUT",
    "demo": "demo OUT",
}
# Options that name files or folders, beside those above, with lines that reach them.
OPTIONS = {
    "config": "inspect features --config LOCATION",
    "weights": "features photos OUT --dry-run --device cpu --weights LOCATION",
    "truecaser": "captions table.tsv OUT --format table --recipe moses-truecase --workers 1 --truecaser LOCATION",
    "model": "text-features captions OUT --device cpu --model LOCATION",
    "ids": "import array.npy OUT --name x --ids LOCATION",
    "boxes": "import array.npy OUT --name x --boxes LOCATION",
    "captions": "export features OUT --format scan --captions LOCATION",
    "lists": "export features OUT --format npy --lists LOCATION",
    "embeddings": "search run dog --tokenized --embeddings LOCATION",
    "vectors": "sts pairs.tsv --vectors LOCATION",
    "output": "sts pairs.tsv --output LOCATION",
}
# Options whose names are checked before anything is read, beside the outputs of LINES without a run.
NOT_UTF8 = (
    "evaluate run --captions encoded --features features --output LOCATION",
    "duplicates features captions --output LOCATION",
    "duplicates features captions --images LOCATION",
    "view features photos --image 1 -o LOCATION.png",
    "sts pairs.tsv --output LOCATION",
    "captions table.tsv out --format table --shards like:LOCATION",
    "import LOCATION out --name x --format npy",
    "import array.npy out --name x --ids LOCATION",
)
NAMES = (
    *("table.tsv", "pairs.tsv", "array.npy", "words.vec", "photos", "captions", "vocabulary", "encoded", "features", "run"),
    *("OUT", "drawing.png", "demo"),
)


@pytest.fixture(scope="module")
def folder(imagepivot, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("locations")
    (folder / "table.tsv").write_text("image_id\ttext\n1\ta dog\n2\ta cat\n")
    (folder / "pairs.tsv").write_text("1\ta dog\ta cat\n")
    (folder / "words.vec").write_text("a 1 0\ndog 0 1\n")
    (folder / "photos").mkdir()
    make_tiny_bert(folder / "bert")
    (folder / "photos" / "1.jpg").touch()
    np.save(folder / "array.npy", np.ones((2, 4), np.float32))
    (folder / "array.txt").write_text("1\n2\n")
    (folder / "loop").symlink_to("loop")
    for line in (
        "captions table.tsv captions --format table --shards 1 --workers 1",
        "vocabulary captions vocabulary --min-count 1",
        "encode captions vocabulary encoded --workers 1",
        "import array.npy features --name x --shards 1",
    ):
        imagepivot(*line.split(), cwd=folder)
    return folder


def places() -> list[tuple[str, str, int]]:
    """Name and line of a case, and the place of the word to replace."""
    found = []
    for name, line in LINES.items():
        words = line.split()
        found += [(f"{name} {n}", line, n) for n, word in enumerate(words) if n and word in NAMES and words[n - 1] != "--rows"]
    for name, line in OPTIONS.items():
        found.append((f"--{name}", line, line.split().index("LOCATION")))
    return found


@pytest.fixture
def refused(folder, monkeypatch, capsys):
    """Runs a command line and checks that it is refused in one paragraph, without a trace on disk."""

    def run(words: list[str]) -> str:
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.argv", ["imagepivot", *words])
        before = sorted(map(str, folder.rglob("*")))
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        assert end.value.code in (1, 2), out + err
        assert "Traceback" not in out + err
        failed = {"doctor": out.count("\nFAILED "), "build": err.count("\nstep scenes (imagepivot demo) failed with exit ")}
        assert err.startswith(("Error: ", "Usage: ")) or failed.get(words[0]) == 1  # A step's own process says why.
        assert sorted(map(str, folder.rglob("*"))) == before
        return err

    return run


def cases() -> list[tuple[str, int, str]]:
    """Line, place and location of every case: of all combinations those in which nothing can be at the location."""
    everything = []
    for name, line, place in places():
        word = line.split()[place]
        for bad, location in BAD.items():
            is_preset = line.startswith("train") and place == 1
            is_written = word == "OUT" or name == "--output"
            something = is_written and bad in ("root", "nobody's", "line end", "not UTF-8")  # Some can write there.
            not_given = bad == "empty" and (word == "LOCATION" or is_preset)
            if not something and not not_given:
                everything.append(pytest.param(line, place, location, id=f"{name}-{bad}"))
    return everything[::5]  # 5 and the number of locations: coprime.


@pytest.mark.cluster
@pytest.mark.parametrize(("line", "place", "bad"), cases())
def test_impossible_location_is_refused(refused, line, place, bad):
    words = ["out" if word == "OUT" else word for word in line.split()]
    words[place] = bad
    refused(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [*(line for name, line in LINES.items() if "OUT" in line and name not in ("build", "embed")), *NOT_UTF8]
)
def test_name_that_is_not_utf8_is_refused_before_anything_is_read(refused, line):
    words = line.replace("LOCATION", "\udcff\udcfe").replace("OUT", "\udcff\udcfe").split()
    err = refused(words)
    assert "it is not UTF-8; if its name is, set PYTHONUTF8=1" in err or words[0] == "doctor"
    assert err.count("\n") <= 1


def test_every_command_is_tried():
    group = typer.main.get_command(cli.app)
    assert set(LINES) == set(group.commands) - {"extractors"}  # It takes no location.
    assert os.sep not in "".join(NAMES)
