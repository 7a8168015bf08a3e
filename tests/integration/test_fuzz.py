"""Files of every kind of dataset, damaged at random: every command that reads them ends with a message, never with a traceback.

A fixed set of cases runs always. ``IMAGEPIVOT_FUZZ_MINUTES=10`` goes on for ten minutes with each kind; ``IMAGEPIVOT_FUZZ_SEED`` is
the first case, to see one again.
"""

import io
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from schemas.features import FeatureSpec
from schemas.writing.validation import validate
from tests.builders import region_row, tree, write_rows
from tests.fake_extractors import use_colours
from tests.integration.damage import damage, is_signed, limited
from tests.train.trainings import CONFIG

pytestmark = pytest.mark.cluster

FIXED_CASES = 4  # For each kind.
SECONDS = 60  # No command takes so long; one that does is taken for one that never ends.
REGIONS, WIDTH = 3, 4


# --- datasets of every kind, by the commands that make them ----------------------------------------------------------


@dataclass(frozen=True)
class Corpus:
    """Folders of datasets by kind, with what they were made from. `make` makes one, or continues it."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name

    def make(self, kind: str, output: Path) -> tuple[object, ...]:
        return {
            "captions": (
                *("captions", self.root / "table.tsv", output, "--format", "table", "--recipe", "moses-truecase"),
                *("--max-failures", 9, "--shards", 2, "--workers", 1),
            ),
            "vocabulary": ("vocabulary", self.captions, output, "--min-count", 1, "--workers", 1),
            "encoded": ("encode", self.captions, self.vocabulary, output, "--workers", 1),
            "features": (
                *("features", self.images, output, "--device", "cpu", "--shards", 2, "--max-failures", 9, "--workers", 1),
            ),
        }[kind]


@pytest.fixture(scope="module")
def corpus(imagepivot, tmp_path_factory) -> Iterator[Corpus]:
    corpus = Corpus(tmp_path_factory.mktemp("fuzz"))
    generator = random.Random(1)
    lines = ["image_id\tlanguage\tsplit\ttext"]
    corpus.images.mkdir()
    for number in range(14):
        image_id, split = f"image-{number:02d}", ("train", "train", "val", "test")[number % 4]
        file = io.BytesIO()
        Image.new("RGB", (5, 4), tuple(generator.randbytes(3))).save(file, "PNG")
        (corpus.images / f"{image_id}.png").write_bytes(file.getvalue())
        for language, words in (("en", "the dog runs in Paris snow"), ("de", "der Hund läuft in Paris Schnee")):
            for _ in range(3):
                text = " ".join(generator.choices(words.split(), k=generator.randrange(1, 6)))
                lines.append(f"{image_id}\t{language}\t{split}\t{text}")
    lines += [f"image-{number:02d}\ten\ttrain\t " for number in (1, 2)]
    for number in range(3):
        (corpus.images / f"broken-{number}.png").write_bytes(b"no image")
    (corpus.root / "table.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    boxes, values = np.tile([0, 0, 2, 2], (REGIONS, 1)), np.ones((REGIONS, WIDTH))
    rows = [region_row(f"image-{number:02d}", boxes, values, 2, width=5, height=4) for number in range(14)]
    failures = [{"key": "broken-0", "uri": "broken-0.png", "stage": "decode", "reason": "not_an_image", "message": "no image"}]
    names = {"_names/classes": b"dog\n", "_names/attributes": b"black\n"}
    spec = FeatureSpec("toy", (REGIONS, WIDTH))
    write_rows(corpus.regions, "regions", rows, spec, shards=2, failures=failures, files=names)
    assert validate(corpus.regions) == []
    (corpus.root / "config.toml").write_text(CONFIG.replace("max_steps = 44", "max_steps = 1"))
    with pytest.MonkeyPatch.context() as patch:
        use_colours(patch)
        for kind in ("captions", "vocabulary", "encoded", "features"):
            imagepivot(*corpus.make(kind, corpus.root / kind), code=(0, 3))
        imagepivot(*reads("encoded", corpus, corpus.encoded)["train"](corpus.root / "run"))
        imagepivot("embed", corpus.run, corpus.root / "both", "--features", corpus.features, "--captions", corpus.encoded)
        shutil.move(corpus.root / "both" / "images", corpus.gallery)
        shutil.move(corpus.root / "both" / "captions", corpus.embeddings)
        yield corpus


KINDS = ("captions", "vocabulary", "encoded", "features", "regions", "gallery", "embeddings")


def reads(kind: str, corpus: Corpus, damaged: Path) -> dict[str, Callable[[Path], tuple[object, ...]]]:
    """The commands that read a dataset of a kind, by name: from the folder for their output to their arguments."""
    whole = {name: getattr(corpus, name) for name in KINDS}
    folder = {**whole, kind: damaged}
    data = ("--captions", folder["encoded"], "--features", folder["features"])
    picture = (corpus.images, "--image", "image-01", "--output")
    commands: dict[str, Callable[[Path], tuple[object, ...]]] = {
        "inspect": lambda out: ("inspect", damaged),
        "diff": lambda out: ("diff", damaged, whole[kind]),
        "diff whole": lambda out: ("diff", whole[kind], damaged),
    }
    if kind == "captions":
        commands |= {
            "vocabulary": lambda out: ("vocabulary", damaged, out, "--workers", 1),
            "search": lambda out: ("search", corpus.run, "a dog", "--features", corpus.features, "--truecaser", damaged),
            "truecaser": lambda out: (*corpus.make("captions", out), "--truecaser", damaged),
        }
    if kind in ("captions", "features", "regions"):
        two = (folder["features"], damaged) if kind == "captions" else (damaged, folder["captions"])
        commands["duplicates"] = lambda out: ("duplicates", *two)
    if kind in ("captions", "vocabulary"):
        commands["encode"] = lambda out: ("encode", folder["captions"], folder["vocabulary"], out, "--workers", 1)
    if kind in ("captions", "features"):
        layouts = ("--format", "webdataset", "--captions", folder["captions"]), ("--format", "npy"), ("--format", "mulisera")
        scan = ("--format", "scan", "--captions", folder["captions"], "--language", "en", "--captions-per-image", 3)
        for layout in (*layouts, scan):
            commands[f"export {layout[1]}"] = lambda out, layout=layout: ("export", folder["features"], out, *layout)
    if kind in ("vocabulary", "encoded", "features"):
        config = corpus.root / "config.toml"
        commands["train"] = lambda out: ("train", config, out, *data, "--vocabulary", folder["vocabulary"], "--device", "cpu")
    if kind in ("encoded", "features"):
        commands["evaluate"] = lambda out: ("evaluate", corpus.run, *data, "--splits", "test", "--device", "cpu")
        commands["embed"] = lambda out: ("embed", corpus.run, out, *data, "--device", "cpu")
    if kind == "features":
        query = ("search", corpus.run, "a dog", "--language", "en", "--tokenized")
        commands["search"] = lambda out: (*query, "--features", damaged)
    if kind in ("features", "regions"):
        commands["view"] = lambda out: ("view", damaged, *picture, f"{out}.png")
    if kind == "features":
        commands["update"] = lambda out: (*corpus.make(kind, damaged), "--update")
        commands["check content"] = lambda out: (*corpus.make(kind, damaged), "--update", "--check-content")
        commands["dry run"] = lambda out: (*corpus.make(kind, damaged), "--update", "--dry-run")
    if kind == "regions":
        for layout in ("tsv", "npy", "webdataset"):
            commands[f"export {layout}"] = lambda out, layout=layout: ("export", damaged, out, "--format", layout)
    if kind == "gallery":
        commands["search"] = lambda out: ("search", corpus.run, "a", "--embeddings", damaged, "--language", "en", "--tokenized")
        commands["export npy"] = lambda out: ("export", damaged, out, "--format", "npy")
    if kind in ("captions", "vocabulary", "encoded", "features"):
        commands["again"] = lambda out: corpus.make(kind, damaged)
        commands["again --verify"] = lambda out: (*corpus.make(kind, damaged), "--verify")
    return commands


# --- damage ----------------------------------------------------------------------------------------------------------


def damage_folder(folder: Path, generator: random.Random) -> tuple[str, str]:
    """Damage one file, which may be any; return its path and what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Of many files of one sort no more than of few.
    groups: dict[str, list[Path]] = {}
    for path in files:
        groups.setdefault(path.relative_to(folder).parts[0][:5], []).append(path)
    path = generator.choice(groups[generator.choice(sorted(groups))])
    name = path.relative_to(folder).as_posix()
    what = generator.choice((*["content"] * 10, "noise", "delete", "folder", "full folder", "link", "other"))
    if what == "content":
        path.write_bytes(damage({name: path.read_bytes() or b"x"}, generator)[name])
    elif what == "noise":
        path.write_bytes(generator.choice((b"", generator.randbytes(99), b"[" * 200_000)))
    elif what == "other":
        shutil.copyfile(generator.choice([other for other in files if other != path]), path)
    else:
        path.unlink()
        if what == "link":
            path.symlink_to(folder / "nowhere")
        elif what != "delete":
            path.mkdir()
            if what == "full folder":
                (path / "x.parquet").write_bytes(b"x")
    return name, what


# --- what must hold --------------------------------------------------------------------------------------------------


def is_reported(name: str, before: dict[str, bytes], after: dict[str, bytes]) -> bool | None:
    """Whether `validate` has to complain; None where it may."""
    if before == after:
        return False
    if name == "_manifest.json":
        try:
            return json.loads(after[name]) != json.loads(before[name])
        except (KeyError, ValueError, RecursionError):
            return True
    if name.startswith(".records/") and name not in after:
        return None  # A dataset without records is as good.
    return True


def try_case(seed: int, kind: str, corpus: Corpus, imagepivot, folder: Path, caplog) -> None:
    generator = random.Random(f"{kind} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    damaged = Path(shutil.copytree(getattr(corpus, kind), folder / "damaged"))
    before = tree(damaged)
    name, what = damage_folder(damaged, generator)
    after = tree(damaged)
    commands = reads(kind, corpus, damaged)
    chosen = generator.sample(sorted(commands), 2)
    label = f"IMAGEPIVOT_FUZZ_SEED={seed}: {kind}, {name}, {what}"

    def run(command: str, *arguments: object) -> Any:
        caplog.clear()
        try:
            with limited(SECONDS):
                done = imagepivot(*arguments, code=(0, 1, 2, 3))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise AssertionError(f"{label}, {command}: {type(error).__name__}: {error}") from error
        assert "Traceback" not in done.stdout + done.stderr + caplog.text, f"{label}, {command}: {done.stderr}{caplog.text}"
        if done.returncode in (1, 2) and command not in ("validate", "diff", "diff whole"):
            assert done.stderr.startswith("Error: "), f"{label}, {command}: {done.stdout}{done.stderr}"
        return done

    expected, forged = is_reported(name, before, after), is_signed(after.get(name, b""))
    done = run("validate", "validate", damaged)
    if expected is not None and not (forged and expected):  # What is forged and signed may be as good as what was there.
        assert done.returncode == (1 if expected else 0), f"{label}, validate: {done.stdout}{done.stderr}"
    for command in chosen:
        copy = Path(shutil.copytree(damaged, folder / f"copy-{command}", symlinks=True))
        arguments = reads(kind, corpus, copy)[command](folder / f"out-{command}")
        done = run(command, *arguments)
        if (
            command == "again --verify"
            and done.returncode in (0, 3)
            and not forged
            and not (what == "full folder" and name.startswith(".records/"))
        ):
            # What every message about damage advises.
            done = run("validate", "validate", copy)
            assert done.returncode == 0, f"{label}, validated after {command}: {done.stdout}{done.stderr}"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_dataset_ends_every_command_with_a_message(kind, corpus, imagepivot, tmp_path, caplog):
    first = int(os.environ.get("IMAGEPIVOT_FUZZ_SEED", "0"))
    end = time.monotonic() + 60 * float(os.environ.get("IMAGEPIVOT_FUZZ_MINUTES", "0"))
    for seed in itertools.count(first):
        if seed >= first + FIXED_CASES and time.monotonic() > end:
            break
        try_case(seed, kind, corpus, imagepivot, tmp_path / "case", caplog)
