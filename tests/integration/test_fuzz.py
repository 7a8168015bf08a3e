"""Files of every kind of dataset, damaged at random: every command that reads them ends with a message, never with a traceback.

A fixed set of cases runs always. ``IMAGEPIVOT_FUZZ_MINUTES=10 pytest -s tests/integration/test_fuzz.py`` goes on with fresh ones
for ten minutes and prints how many there were; ``IMAGEPIVOT_FUZZ_SEED`` is the first of them, to see one again.
"""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from extractors import Description, Extractor, ExtractorRequest
from schemas.features import FeatureSpec
from tests.builders import sign, tree
from tests.train.trainings import CONFIG

pytestmark = pytest.mark.cluster

FIXED_CASES = 4  # For each kind.
SECONDS = 60  # No command takes so long; one that does is taken for one that never ends.
REGIONS, WIDTH, CLASSES, ATTRIBUTES = 3, 4, 5, 2


# --- datasets of every kind, by the commands that make them ----------------------------------------------------------


class FakePool(Extractor):
    """The colour of an image, and one."""

    def preprocess(self, image):
        return torch.tensor([*image.getpixel((0, 0)), 1])

    def extract(self, batch):
        return batch.numpy().astype(np.float32)


class FakeRegions(Extractor):
    """Two regions of an image."""

    def preprocess(self, image):
        return torch.tensor(image.size)

    def collate(self, images):
        return list(images)

    def extract(self, batch):
        return self.extract_columns(batch)["features"]

    def extract_columns(self, batch):
        count = len(batch)
        used = np.arange(REGIONS) < 2
        sizes = np.array([image.tolist() for image in batch], np.int32)
        return {
            "width": sizes[:, 0],
            "height": sizes[:, 1],
            "num_regions": np.full(count, 2, np.int16),
            "boxes": np.tile(np.array([0, 0, 2, 2], np.float32), (count, REGIONS, 1)) * used[:, None],
            "features": np.ones((count, REGIONS, WIDTH), np.float32) * used[:, None],
            "class_ids": np.tile(np.int16(3) * used, (count, 1)).astype(np.int16),
            "class_scores": np.tile(np.float32(0.5) * used, (count, 1)).astype(np.float32),
            "attribute_ids": np.tile(np.int16(1) * used, (count, 1)).astype(np.int16),
            "attribute_scores": np.tile(np.float32(0.5) * used, (count, 1)).astype(np.float32),
        }


def describe(request: ExtractorRequest) -> Description:
    if request.name == "faster-rcnn-36":
        spec = FeatureSpec("faster-rcnn-36", (REGIONS, WIDTH))
        return Description(spec, {"name": request.name}, kind="regions", classes=CLASSES, attributes=ATTRIBUTES)
    transform = {"crop": 4, "resize_short": 4}
    return Description(FeatureSpec(request.name, (4,)), {"name": request.name, "transform": transform})


def load(request: ExtractorRequest, device: object) -> Extractor:
    return (FakeRegions if request.name == "faster-rcnn-36" else FakePool)(describe(request))


@dataclass(frozen=True)
class Corpus:
    """Folders of datasets by kind, with what they were made from. `make` makes one, or continues it."""

    root: Path

    def __getattr__(self, name: str) -> Path:
        return self.root / name

    def make(self, kind: str, output: Path) -> tuple[object, ...]:
        images = ("features", self.images, output, "--device", "cpu", "--shards", 2, "--max-failures", 9, "--workers", 1)
        names = ("--class-names", self.root / "classes.txt", "--attribute-names", self.root / "attributes.txt")
        return {
            "captions": (
                *("captions", self.root / "table.tsv", output, "--format", "table", "--recipe", "moses-truecase"),
                *("--max-failures", 9, "--shards", 2, "--workers", 1),
            ),
            "vocabulary": ("vocabulary", self.captions, output, "--min-count", 1, "--workers", 1),
            "encoded": ("encode", self.captions, self.vocabulary, output, "--workers", 1),
            "features": (*images, "--extractor", "resnet50-pool"),
            "regions": (*images, "--extractor", "faster-rcnn-36", *names),
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
    (corpus.root / "classes.txt").write_text("".join(f"class {n}\n" for n in range(CLASSES)))
    (corpus.root / "attributes.txt").write_text("".join(f"attribute {n}\n" for n in range(ATTRIBUTES)))
    (corpus.root / "config.toml").write_text(CONFIG.replace("max_steps = 44", "max_steps = 1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExtractorRequest, "describe", describe)
        patch.setattr(ExtractorRequest, "load", load)
        for kind in ("captions", "vocabulary", "encoded", "features", "regions"):
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
        commands["update"] = lambda out: (*corpus.make(kind, damaged), "--update")
        commands["check content"] = lambda out: (*corpus.make(kind, damaged), "--update", "--check-content")
        commands["dry run"] = lambda out: (*corpus.make(kind, damaged), "--update", "--dry-run")
    if kind == "regions":
        for layout in ("tsv", "npy", "webdataset"):
            commands[f"export {layout}"] = lambda out, layout=layout: ("export", damaged, out, "--format", layout)
    if kind == "gallery":
        commands["search"] = lambda out: ("search", corpus.run, "a", "--embeddings", damaged, "--language", "en", "--tokenized")
        commands["export npy"] = lambda out: ("export", damaged, out, "--format", "npy")
    if kind in ("captions", "vocabulary", "encoded", "features", "regions"):
        commands["again"] = lambda out: corpus.make(kind, damaged)
        commands["again --verify"] = lambda out: (*corpus.make(kind, damaged), "--verify")
    return commands


# --- damage ----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**40, 10**30, 1.5, -0.0, 1e300),
    *("", "x", "3", "../x", "/etc/passwd", ".", "a\nb", "\u2028"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "2"], "0" * 64, "part-00000-of-00002.parquet", "features", [-1]),
    [2, 2],
]
TEXTS = [
    *(b"[]", b"7", b"null", b'"x"', b"{}", b"{", b"\xff\xfe", b"[" * 200_000),
    *(b'{"format": "imagepivot", "version": 2}', b"\n\n"),
]


def flip(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.choice((1, 1, 1, 2, 5, 50))):
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def flip_frame(data: bytes, generator: random.Random) -> bytes:
    """In the last part of a file, where Parquet has its footer, or in its first."""
    size = min(len(data), generator.choice((8, 64, 512, 4096)))
    if generator.random() < 0.7:
        return data[: len(data) - size] + flip(data[len(data) - size :], generator)
    return flip(data[:size], generator) + data[size:]


def overwrite(data: bytes, generator: random.Random) -> bytes:
    start, size = generator.randrange(len(data)), generator.randrange(1, 65)
    block = generator.choice((bytes(size), b"\xff" * size, generator.randbytes(size)))
    return (data[:start] + block + data[start + size :])[: len(data)]


def parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2, 3]}), file)
    return file.getvalue()


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "flip again": flip,
    "flip the frame": flip_frame,
    "flip the frame again": flip_frame,
    "overwrite": overwrite,
    "cut": lambda data, generator: data[: generator.randrange(len(data))],
    "empty": lambda data, generator: b"",
    "append": lambda data, generator: data + generator.randbytes(generator.randrange(1, 20)),
    "noise": lambda data, generator: generator.randbytes(len(data)),
    "parquet": lambda data, generator: parquet(),
    "text": lambda data, generator: generator.choice(TEXTS),
}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a JSON value with every key or index in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def edit(path: Path, generator: random.Random) -> str:
    """Change one value of a manifest, and sign what comes out; sometimes with a fitting fingerprint, too."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    container, key = generator.choice(list(places(manifest)))
    what = generator.choice(("remove", "replace", "replace", "replace", "replace", "twice"))
    if what == "remove":
        del container[key]
    elif what == "twice" and isinstance(container, list):
        container.append(container[key])
    else:
        container[key] = generator.choice(VALUES)
    if generator.random() < 0.5:
        content = {name: manifest.get(name) for name in ("kind", "parameters", "inputs")}
        shards = manifest.get("shards")
        content |= {"schema_version": 1, "shards": len(shards) if isinstance(shards, list) else 0}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        manifest["fingerprint"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(sign(manifest)), encoding="utf-8")
    return f"{what} {key!r}"


def damage(folder: Path, generator: random.Random) -> tuple[str, str]:
    """Damage one file, which may be any; return its path and what was done."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    # Of many files of one sort no more than of few.
    groups: dict[str, list[Path]] = {}
    for path in files:
        groups.setdefault(path.relative_to(folder).parts[0][:5], []).append(path)
    path = generator.choice(groups[generator.choice(sorted(groups))])
    name = path.relative_to(folder).as_posix()
    if name == "_manifest.json" and generator.random() < 0.6:
        return name, f"edit: {edit(path, generator)}"
    what = generator.choice((*BYTES, "delete", "folder", "full folder", "link", "other"))
    if what in BYTES:
        data = path.read_bytes()
        path.write_bytes(BYTES[what](data, generator) if data else b"x")
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


class Hang(BaseException):
    """Raised in a command that does not end; no command catches it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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


def try_case(seed: int, kind: str, corpus: Corpus, imagepivot, folder: Path, caplog) -> Counter[str]:
    generator = random.Random(f"{kind} {seed}")
    shutil.rmtree(folder, ignore_errors=True)
    damaged = Path(shutil.copytree(getattr(corpus, kind), folder / "damaged"))
    before = tree(damaged)
    name, what = damage(damaged, generator)
    after = tree(damaged)
    commands = reads(kind, corpus, damaged)
    chosen = generator.sample(sorted(commands), 2)
    counts: Counter[str] = Counter({kind: 1, what.partition(":")[0]: 1})
    label = f"IMAGEPIVOT_FUZZ_SEED={seed}: {kind}, {name}, {what}"

    def run(command: str, *arguments: object) -> Any:
        caplog.clear()
        counts[command] += 1
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
            counts["refused"] += 1
        return done

    expected, forged = is_reported(name, before, after), what.startswith("edit")
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
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_fixed_cases(kind, corpus, imagepivot, tmp_path, caplog):
    for seed in range(FIXED_CASES):
        try_case(seed, kind, corpus, imagepivot, tmp_path / "case", caplog)


@pytest.mark.skipif("IMAGEPIVOT_FUZZ_MINUTES" not in os.environ, reason="set IMAGEPIVOT_FUZZ_MINUTES to look for more")
@pytest.mark.timeout(0)
def test_fresh_cases(corpus, imagepivot, tmp_path, caplog):
    seed = int(os.environ.get("IMAGEPIVOT_FUZZ_SEED", random.SystemRandom().randrange(1_000_000, 1_000_000_000)))
    end = time.monotonic() + 60 * float(os.environ["IMAGEPIVOT_FUZZ_MINUTES"])
    counts: Counter[str] = Counter()
    failures: list[str] = []
    while time.monotonic() < end:
        for kind in KINDS:
            (tmp_path / "last").write_text(f"{kind} {seed}")  # Should the process itself end.
            try:
                counts += try_case(seed, kind, corpus, imagepivot, tmp_path / "case", caplog)
            except AssertionError as error:
                failures.append(str(error))
        seed += 1
    print(f"\n{sum(counts[kind] for kind in KINDS):,} cases: {dict(counts.most_common())}")
    assert not failures, f"{len(failures)} of them failed:\n" + "\n".join(failures)
