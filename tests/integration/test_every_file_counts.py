"""No command with kept results calls them up to date after a change of a file below its inputs, or of a module of ``--import``.

A command that keeps results belongs in `CASES`, another in `KEEPS_NOTHING`; a file
that may change without effect in `WITHOUT_EFFECT`.
"""

import csv
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from safetensors.torch import load_file, save_file

from pipelines.commands.app import app
from schemas.duplicates import Duplicate, duplicates_csv
from schemas.manifest import Manifest
from schemas.storage.folder import Folder
from tests.fake_extractors import use_colours
from tests.integration.processes import ForkedSteps
from tests.tiny_bert import make_tiny_bert
from tests.train.conftest import EDGES
from train.config import models as config_models
from train.models import catalogue

pytestmark = pytest.mark.slow

KEEPS_NOTHING = {
    "build": "runs the commands of a plan, which keep their results themselves",
    "compare": "computes and draws anew",
    "demo": "runs the commands of a plan after it has drawn and compared its scenes",
    "diff": "only prints",
    "doctor": "only prints",
    "duplicates": "compares anew and refuses an existing list",
    "extractors": "only prints",
    "inspect": "only prints",
    "publish": "compares the manifests of both, which state every file",
    "report": "describes anew",
    "search": "searches and draws anew",
    "validate": "only prints",
    "view": "draws anew",
}

MODULES = ("own.py", "base_of_own.py")
DATA = "--captions encoded --features features"
TRAIN = f"{DATA} --vocabulary vocabulary --device cpu --no-curves --no-tensorboard"

# Names of the inputs in `inputs`, and the command without its name, by command.
CASES = {
    "captions": ("captions.csv truecasers", "captions.csv out --format table --recipe moses-truecase --truecaser truecasers"),
    "vocabulary": ("captions", "captions out --min-count 1"),
    "encode": ("captions vocabulary", "captions vocabulary out"),
    "word-vectors": ("vocabulary en.vec de.vec", "vocabulary en.vec de.vec out --languages en,de"),
    "text-features": ("captions bert", "captions out --model bert --device cpu"),
    "features": ("photos", "photos out --device cpu --workers 1"),
    "import": ("features.npy ids.txt", "features.npy out --name x --ids ids.txt"),
    "export": ("features captions", "features out --format scan --captions captions --language en"),
    "train": (
        "own.toml word-vectors duplicates.csv first encoded features vocabulary",
        f"own.toml out {TRAIN} --set model.word_vectors=finetuned --word-vectors word-vectors --exclude duplicates.csv "
        "--init-from first --resume --import own",
    ),
    "evaluate": (
        "run encoded features duplicates.csv relevant captions.json",
        f"run {DATA} --splits test --languages en --device cpu --output out --exclude duplicates.csv --import own "
        "--relevance relevant/a_image_to_caption.json --annotations captions.json",
    ),
    "embed": ("run encoded features", f"run out {DATA} --device cpu --import own"),
    "sts": (
        "run pairs en.vec",
        "run pairs/STS.input.x.txt --vectors en.vec --tokenized --device cpu --output out --import own",
    ),
    "figures": (
        "run encoded features photos",
        f"run out {DATA} --images photos --split test --only retrieval --examples 2 --device cpu --import own",
    ),
    "reproduce": (
        "encoded features vocabulary",
        "kadar2018 {folder}/out --captions {folder}/encoded --features {folder}/features --vocabulary {folder}/vocabulary "
        "--rows kadar2018/bilingual-c2c --seeds 1 --max-steps 1 --set model.embed_dim=4 --set model.word_dim=4 --split test "
        "--device cpu --no-plot",
    ),
}

# Reasons by patterns of files.
WITHOUT_EFFECT = {
    "*/*.parquet": "shards and ranks; the manifest counts, and validate compares it with the shards",
    "*/.records/*": "for the resumption of the command that wrote the dataset; the manifest has the content",
    "vocabulary/_vocabulary.txt": "copy of the words for people",
    "bert/vocab.txt": "transformers reads tokenizer.json",
    "bert/tokenizer_config.json": "the loaded tokenizer counts, with its special tokens and its maximum length",
    "*/last.pt": "for the resumption of the training; results are those of best.pt",
    "*/config.toml": "copy of the configuration for people; best.pt has it",
    "*/log.jsonl": "progress of the training",
    "*/metrics.csv": "progress of the training",
}

CONFIG = """
[data]
portions = { en = ["comparable"], de = ["comparable"] }
[model]
embed_dim = 4
word_dim = 4
[schedule]
eval_every_steps = 2
patience = 0
max_steps = 2
batch_size = 8
"""


@pytest.fixture(scope="module")
def inputs(imagepivot, tmp_path_factory) -> Path:
    """Inputs of all commands, as their own commands write them."""
    folder, rng = tmp_path_factory.mktemp("inputs"), np.random.default_rng(0)
    ids = [f"COCO_val2014_{number:012d}" for number in range(1, 25)]
    splits = ["train"] * 12 + ["val"] * 9 + ["test"] * 3
    (folder / "photos").mkdir()
    with (folder / "captions.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["image_id", "language", "split", "text"])
        for image_id, split in zip(ids, splits, strict=True):
            rows.writerows(
                [image_id, language, split, f"{language}{image_id[-2]} w{image_id[-1]}"] for language in ("en", "de")
            )
            if split == "test":
                Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / "photos" / f"{image_id}.png")
    numbers = range(22, 25)
    annotations = [{"image_id": number, "id": number, "caption": f"en{number // 10} w{number % 10}"} for number in numbers]
    (folder / "captions.json").write_text(json.dumps({"annotations": annotations}))
    (folder / "relevant").mkdir()
    for name in ("image_to_caption", "caption_to_image"):
        (folder / "relevant" / f"a_{name}.json").write_text(json.dumps({str(number): [number] for number in numbers}))
    duplicates = [Duplicate(0, "hash", 1.0, ids[0], "train"), Duplicate(0, "hash", 1.0, ids[-2], "test")]
    (folder / "duplicates.csv").write_text(duplicates_csv(duplicates))
    (folder / "truecasers").mkdir()
    for language in ("en", "de"):
        (folder / "truecasers" / f"{language}.model").write_text("w1 (3/4) W1 (1)\n")
        words = [f"w{number} {' '.join(map(str, rng.standard_normal(4)))}\n" for number in range(10)]
        (folder / f"{language}.vec").write_text(f"10 4\n{''.join(words)}")
    (folder / "pairs").mkdir()
    (folder / "pairs" / "STS.input.x.txt").write_text("w1 w2\tw1\nw3\tw4 w5\nw6 w7\tw6 w8\n")
    (folder / "pairs" / "STS.gs.x.txt").write_text("5\n0\n3\n")
    np.save(folder / "features.npy", rng.standard_normal((24, 8)).astype(np.float32))
    (folder / "ids.txt").write_text("".join(f"{image_id}\n" for image_id in ids))
    (folder / "own.toml").write_text(CONFIG)
    (folder / "own.py").write_text("import base_of_own\nversion = 1\n")
    (folder / "base_of_own.py").write_text("sign = 1\n")
    make_tiny_bert(folder / "bert")

    def run(line: str) -> None:
        call(imagepivot, line, folder)

    run("captions captions.csv captions --format table --recipe raw --shards 2 --workers 1")
    run("vocabulary captions vocabulary --min-count 1")
    run("encode captions vocabulary encoded")
    run("word-vectors vocabulary en.vec de.vec word-vectors --languages en,de")
    run("import features.npy features --name x --ids ids.txt --shards 2")
    for name in ("run", "first"):
        run(f"train own.toml {name} {TRAIN} --import own")
    return folder


def call(imagepivot, line: str, folder: Path, *codes: int) -> str:
    """Run a command in a folder as in a new process: without modules and kinds of models of earlier calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(config_models, "_SECTIONS", dict(config_models._SECTIONS))
        patch.setattr(catalogue, "_BUILDERS", dict(catalogue._BUILDERS))
        patch.setattr("schemas.process.steps.run_command", ForkedSteps())
        try:
            done = imagepivot(*line.split(), cwd=folder, code=codes or (0,))
        finally:
            for name in (*MODULES, "other.py"):
                sys.modules.pop(Path(name).stem, None)
    return done.stdout + done.stderr


def change(path: Path) -> None:
    """Change a value in a file, which stays valid."""
    data = path.read_bytes()
    if path.name == "_manifest.json":
        # As features --update, a resumption with other libraries, or a repair leave it: another content of one fingerprint.
        manifest = Manifest.read(Folder(str(path.parent)))
        shards = tuple(replace(shard, sha256=shard.sha256[::-1]) for shard in manifest.shards)
        path.write_text(replace(manifest, shards=shards).to_json())
    elif path.suffix == ".pt":
        checkpoint = torch.load(path, weights_only=True)
        next(iter(checkpoint["model"].values())).add_(1)
        torch.save(checkpoint, path)
    elif path.suffix == ".safetensors":
        tensors = load_file(path)
        next(iter(tensors.values())).add_(1)
        save_file(tensors, path, {"format": "pt"})
    elif path.suffix == ".model":
        path.write_text(f"{data.decode()}w2 (1/1)\n")
    elif path.suffix in (".json", ".jsonl", ".txt", ".vec", ".csv", ".toml", ".py"):
        text = re.sub(r"\d(?=\D*\Z)", lambda digit: str((int(digit[0]) + 1) % 10), data.decode(), count=1)
        path.write_text(text if text.encode() != data else f"{text}\n")
    else:
        path.write_bytes(data + b"\0")
    assert path.read_bytes() != data


def state(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return contents and times of all files but the report of ``reproduce``, which is always written."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.stem != "kadar2018")
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=pytest.mark.cluster) if command == "reproduce" else command for command in CASES],
)
def test_changed_file_below_inputs_is_not_up_to_date(command, imagepivot, inputs, tmp_path, monkeypatch):
    use_colours(monkeypatch)
    names, line = CASES[command]
    folder, out = tmp_path / "in", tmp_path / "in" / "out"
    folder.mkdir()
    for name in (*names.split(), *(MODULES if "--import" in line else ())):
        (shutil.copytree if (inputs / name).is_dir() else shutil.copy)(inputs / name, folder / name)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]

    def run(*codes: int) -> str:
        return call(imagepivot, f"{command} {line.format(folder=folder)}", folder, *codes)

    run()
    before = state(out)
    run()
    assert state(out) == before, "the unchanged command writes again"
    shutil.copytree(out, tmp_path / "out")
    kept = set()
    for path in files:
        content, times = path.read_bytes(), path.stat()
        change(path)
        printed = run(0, 1, 2)
        assert "Traceback" not in printed
        if state(out) == before and "Error: " not in printed:
            kept.add(str(path.relative_to(folder)))
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "out", out)
    names = {str(path.relative_to(folder)) for path in files}
    allowed = {name for name in names if any(fnmatch(name, pattern) for pattern in WITHOUT_EFFECT)}
    assert kept - allowed == set(), "called up to date after a change"
    assert {name for name in allowed - kept if not name.endswith(".parquet")} == set(), "the change has an effect"


def test_changed_code_of_an_own_model_is_measured_and_drawn_anew_and_never_resumed(imagepivot, inputs, tmp_path):
    for name in ("encoded", "features", "vocabulary"):
        shutil.copytree(inputs / name, tmp_path / name)
    (tmp_path / "own.toml").write_text(CONFIG.replace("[model]\nembed_dim = 4\nword_dim = 4", '[model]\nkind = "counts"'))
    model = EDGES.replace("return a.values", "return SIGN * a.values")
    (tmp_path / "own.py").write_text(f"import base_of_own\nSIGN = base_of_own.sign\n{model}")
    (tmp_path / "base_of_own.py").write_text("sign = 1\n")
    train = f"train own.toml run {TRAIN} --resume --import own"
    embed = f"embed run embeddings {DATA} --device cpu --import own"
    evaluate, figures = (
        f"{line} {DATA} --device cpu --languages en --import own"
        for line in (
            "evaluate run --output {}/scores --splits test",
            "figures run {}/figures --split test --only retrieval --examples 2",
        )
    )

    def results(folder: str) -> tuple[Any, Any]:
        for line in (evaluate, figures):
            call(imagepivot, line.format(folder), tmp_path)
        texts = [(tmp_path / folder / name).read_text() for name in ("scores/evaluation.json", "figures/figures.json")]
        return json.loads(texts[0])["scores"], json.loads(texts[1])

    for line in (train, embed):
        call(imagepivot, line, tmp_path)
    before = results("kept")
    (tmp_path / "base_of_own.py").write_text("sign = -1\n")
    after = results("kept")
    assert after == results("new")
    assert after[0] != before[0]
    assert after[1] != before[1]
    assert "'run' cannot be resumed: the content of modules has changed since step 2" in call(imagepivot, train, tmp_path, 1)
    assert "'embeddings/images' holds another dataset" in call(imagepivot, embed, tmp_path, 1)
    shutil.copy(tmp_path / "own.py", tmp_path / "other.py")
    assert "content of modules has changed" in call(imagepivot, train.replace("import own", "import other"), tmp_path, 1)
    assert "content of modules has changed" in call(imagepivot, f"{train} --allow-changed-content", tmp_path)


def test_resumed_training_without_its_modules_is_refused(imagepivot, inputs, tmp_path):
    for name in ("encoded", "features", "vocabulary", "run"):
        shutil.copytree(inputs / name, tmp_path / name)
    shutil.copy(inputs / "own.toml", tmp_path)
    printed = call(imagepivot, f"train own.toml run {TRAIN} --resume", tmp_path, 1)
    assert re.search(r"the content of modules has changed since step 2 .*modules: was [0-9a-f]{12}\.\.\., now none", printed)


def test_every_command_keeps_nothing_or_is_tested():
    commands = set(typer.main.get_command(app).commands)
    assert commands == CASES.keys() | KEEPS_NOTHING.keys()
