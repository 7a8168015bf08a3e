"""A dataset whose every text is hostile, through every command that shows data: nothing but escapes comes out, no markup counts.

A command that shows data belongs in `COMMANDS` or `RUN_COMMANDS`; what it prints and the files for people that it writes are
looked at.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image

from pipelines.commands.app import app
from schemas.features import FeatureSpec
from tests.builders import write_encoded, write_rows

EVIL = "\x1b[31mred\x1b[0m\x1b]0;owned\x07\x9b1m\u202eexe\u2066[bold]x[/bold][/nope]{$\\frac{$\x7f"
TEXT = f"{EVIL} line\rover\u2028\t\n[red]end"
VISIBLE = r"\x1b[31mred\x1b[0m"
UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
IDS = [f"{number}{EVIL}" for number in range(12)]
SPLITS = {"train": IDS[:6], "val": IDS[6:9], f"[red]{EVIL}": IDS[9:]}
TEST = list(SPLITS)[2]
CONFIG = """
[data]
portions = { en = ["comparable"] }
[model]
embed_dim = 4
word_dim = 4
[schedule]
batch_size = 3
eval_every_steps = 2
patience = 0
max_steps = 2
"""


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> Path:
    """Datasets of each kind, from a writer that checks no text, and what commands read beside them."""
    folder = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    key = {"language": "en", "portion": "comparable", "index": 0}
    failure = {"key": f"x{EVIL}", "uri": f"x{TEXT}", "stage": "decode", "reason": "truncated", "message": TEXT}
    captions = [
        {"image_id": image_id, **key, "split": split, "text": TEXT, "tokens": [EVIL, "dog"]}
        for split, image_ids in SPLITS.items()
        for image_id in image_ids
    ]
    counts = {"captions": 12, "tokens": 24}
    statistics = {"captions": {f"comparable/{split}/en": counts for split in SPLITS}}
    parameters = {"text": {"recipe": "raw"}, "source": {"format": "table", TEXT: TEXT}}
    inputs = [{"name": f"{TEXT}.csv", "sha256": "0" * 64, "bytes": 1}]
    write_rows(folder / "captions", "captions", captions, parameters=parameters, statistics=statistics, inputs=inputs)
    other = [{**row, "tokens": ["dog", TEXT]} for row in captions[:-1]]
    write_rows(folder / "other", "captions", other, parameters={"text": {"recipe": TEXT}})
    write_encoded(folder, captions)
    spec = FeatureSpec(f"toy{TEXT}", (4,), source=TEXT)
    rows = [{"image_id": image_id, "feature": rng.standard_normal(4).astype(np.float32)} for image_id in IDS]
    write_rows(folder / "features", "features", rows, spec, parameters={"transform": {TEXT: TEXT}}, failures=[failure])
    write_rows(folder / "few", "features", rows[:7], spec, failures=[failure])
    (folder / "photos").mkdir()
    Image.new("RGB", (20, 10)).save(folder / "photos" / f"a{EVIL.replace('/', '|')}.png")
    table = [{"image_id": "a", "text": TEXT, "split": TEXT.replace("/", "|").replace("\n", "")}]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    table = [{"image_id": "a", "text": TEXT}, {"image_id": "b", "text": " "}]
    (folder / "safe.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "ids.jsonl").write_text(json.dumps({"image_id": IDS[0], "text": "a"}) + "\n")
    (folder / "images.jsonl").write_text(json.dumps({"image_id": "a", "uri": f"x{TEXT}://"}) + "\n")
    (folder / "ids.txt").write_text(f"{IDS[0]}\n", encoding="utf-8")
    np.save(folder / "features.npy", np.zeros((1, 4), np.float32))
    (folder / "config.toml").write_text(CONFIG)
    return folder


COMMANDS = {
    "inspect captions": "inspect captions",
    "inspect captions as json": "inspect captions --json",
    "inspect encoded": "inspect encoded",
    "inspect vocabulary": "inspect vocabulary",
    "inspect features": "inspect features",
    "inspect features as json": "inspect features --json",
    "inspect failures": "inspect features --failures",
    "inspect failures as json": "inspect features --failures --json",
    "validate": "validate captions",
    "diff": "diff captions other",
    "diff features": "diff features few",
    "duplicates": "duplicates features captions --output {out}/duplicates.csv",
    "report": "report captions encoded vocabulary features few --images photos --output {out}/report.html",
    "duplicates as json": "duplicates features captions --json",
    "duplicates, refused": "duplicates features captions --images photos",
    "captions": "captions safe.jsonl {out}/captions --format table --recipe raw --shards 1",
    "captions, refused": "captions ids.jsonl {out}/captions --format table --recipe raw --shards 1",
    "captions, refused split": "captions captions.jsonl {out}/captions --format table --recipe raw --shards 1",
    "captions, events": "captions ids.jsonl {out}/captions --format table --recipe raw --shards 1 --log-json",
    "vocabulary": "vocabulary captions {out}/vocabulary --min-count 1 --splits {split}",
    "encode": "encode captions vocabulary {out}/encoded",
    "features, refused": "features photos {out}/features --extractor resnet50-pool --weights random:1",
    "features of a table, refused": "features images.jsonl {out}/features --extractor resnet50-pool --weights random:1",
    "import, refused": "import features.npy {out}/imported --name x --ids ids.txt",
    "export": "export features {out}/npy --format npy",
    "export tsv": "export captions {out}/wds --format webdataset",
    "export scan, refused": "export few {out}/scan --format scan --captions captions",
    "view": "view features photos --image {id} -o {out}/a.png",
    "view, unknown": "view features photos --image nothing -o {out}/a.png",
}


def run(imagepivot, line: str, folder: Path, out: Path) -> str:
    """Run a command in the folder of the datasets; return what it printed, after a look at that and at the files for people."""
    words = [word.format(out=out, id=IDS[0], split=TEST) for word in line.split()]
    done = imagepivot(*words, cwd=folder, code=(0, 1, 2, 3))
    shown = done.stdout + done.stderr
    assert shown
    assert UNSAFE.findall(shown) == [], ascii(shown)
    for path in out.rglob("*"):
        if path.suffix in (".html", ".json", ".jsonl", ".md", ".toml") and not path.name.startswith("_"):
            assert UNSAFE.findall(path.read_text(encoding="utf-8")) == [], path
    return shown


BEAM = ("captions", "encode")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if line.startswith(BEAM) else name for name, line in COMMANDS.items()]
)
def test_commands_show_hostile_text_as_escapes(name, imagepivot, hostile, tmp_path):
    shown = run(imagepivot, COMMANDS[name], hostile, tmp_path)
    if name.startswith("inspect") and not name.endswith(("encoded", "json")):
        assert VISIBLE in shown
        assert "[red]end" in shown or name == "inspect vocabulary"


def test_json_of_hostile_text_parses_to_the_text(imagepivot, hostile):
    content = json.loads(imagepivot("inspect", "captions", "--json", "--rows", 12, cwd=hostile).stdout)
    assert sorted(row["image_id"] for row in content["first_rows"]) == sorted(IDS)
    assert {row["text"] for row in content["first_rows"]} == {TEXT}
    lines = imagepivot("inspect", "features", "--failures", "--json", cwd=hostile).stdout.splitlines()
    assert [json.loads(line)["message"] for line in lines] == [TEXT]


RUN_COMMANDS = (
    "train config.toml {out}/run --captions encoded --features features --vocabulary vocabulary --device cpu",
    "evaluate {out}/run --captions encoded --features features --device cpu --splits {split}",
    "evaluate {out}/run --captions encoded --features features --device cpu --splits {split} --json",
    "evaluate {out}/run --captions encoded --features few --device cpu --splits {split}",
    "evaluate {out}/run --captions encoded --features features --device cpu --splits nothing",
    "compare {out}/run {out}/run",
    "compare {out}/run {out}/run --json",
    "embed {out}/run {out}/embeddings --captions encoded --features features --device cpu",
    "inspect {out}/embeddings/captions",
    "search {out}/run dog --tokenized --features features --device cpu",
    "search {out}/run dog --tokenized --features features --device cpu --json",
    "search {out}/run dog --tokenized --features features --device cpu --captions captions --output {out}/found.html",
    "report {out}/run captions --output {out}/report.html",
    "figures {out}/run {out}/figures --captions encoded --features features --device cpu --split {split} --only retrieval,map",
    "figures {out}/run {out}/figures --captions encoded --features features --device cpu --split {split} --images photos",
    "train config.toml {out}/few --captions encoded --features few --vocabulary vocabulary --device cpu",
    "train config.toml {out}/few --captions encoded --features few --vocabulary vocabulary --device cpu --log-json "
    "--allow-missing-features",
)


@pytest.mark.slow
def test_commands_of_runs_show_hostile_text_as_escapes(imagepivot, hostile, tmp_path):
    shown = {line: run(imagepivot, line, hostile, tmp_path) for line in RUN_COMMANDS}
    assert {line.split()[0] for line, text in shown.items() if VISIBLE in text} >= {"inspect", "train", "evaluate", "search"}
    assert (tmp_path / "figures" / "retrieval.png").exists()
    assert UNSAFE.findall((tmp_path / "run" / "log.jsonl").read_text()) == []


def test_every_command_with_data_output_is_tested():
    looked_at = {line.split()[0] for line in (*COMMANDS.values(), *RUN_COMMANDS)}
    without = {"build", "demo", "doctor", "word-vectors", "text-features", "extractors", "sts", "reproduce", "publish"}
    assert set(typer.main.get_command(app).commands) - without <= looked_at
