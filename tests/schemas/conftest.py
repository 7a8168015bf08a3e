"""Small datasets of every kind, made through the public writers, and tools to break them.

What a dataset must hold is computed here a second time, by hand: `Toy.rows` are plain dictionaries, assigned to shards by
``int(hexdigest, 16)`` and sorted as tuples, so that a test compares two independent makings.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.console import events
from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from schemas.manifest import Manifest
from schemas.storage.folder import Folder
from schemas.vocabulary import Vocabulary
from schemas.writing.dataset_writer import commit
from schemas.writing.output import OutputDataset
from schemas.writing.output_state import OutputState
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import ShardWriter, open_shard
from tests.builders import region_row, shard_by_hand, sign

ROOT = Path(__file__).parent.parent.parent
KEYS = {
    **dict.fromkeys(("captions", "encoded", "embeddings", "token-features"), ("image_id", "language", "portion", "index")),
    "features": ("image_id",),
    "regions": ("image_id",),
    "vocabulary": ("id",),
    "word-vectors": ("language", "id"),
}
KINDS = [
    *("captions", "encoded", "vocabulary", "features", "features16", "regions", "embeddings", "word-vectors"),
    *("token-features", "token-features16"),
]
"""Names of the toys."""

CAPTION_KEY = ("image_id", "language", "portion", "index", "split")
SHARDS = 3
# Twelve images; every one of the three shards holds some of them.
IMAGE_IDS = [f"image-{number:02d}" for number in range(9)] + ["bild-ä", "картинка 1", "猫"]
POOL = FeatureSpec(name="resnet50-pool", shape=(2048,), source="He et al. 2016")
CROPS16 = FeatureSpec(name="vgg19-10crop", shape=(4096,), dtype="float16")
REGIONS = FeatureSpec(name="faster-rcnn-36", shape=(36, 2048))
WORDS = FeatureSpec(name="word-vectors", shape=(8,))
TOKENS = FeatureSpec(name="bert", shape=(6,), source="last layer")
TOKENS16 = FeatureSpec(name="bert", shape=(6,), dtype="float16")
JOINT = FeatureSpec(name="bilingual-c2c", shape=(16,), source="a joint space")


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as Python values, vectors flat."""
    return [{name: v.ravel().tolist() if isinstance(v, np.ndarray) else v for name, v in row.items()} for row in rows]


# What the pipelines of these kinds may write besides shards.
OTHER_FILES = {
    "captions": r"_?truecaser/[A-Za-z0-9-]+\.model",
    "vocabulary": r"_?vocabulary\.txt",
    "features": r"_names/(classes|attributes)|_truecaser/[A-Za-z0-9-]+\.model",
    "regions": r"_names/(classes|attributes)|names/(classes|attributes)\.txt",
}


def flip(path: Path, position: int | None = None) -> None:
    """Flip a bit of a file, by default one in its middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 4
    path.write_bytes(data)


def prepare(output: OutputDataset, *, overwrite: bool) -> None:
    """Does what a run does before its first shard."""
    state = OutputState(output, ReusePolicy(overwrite=overwrite))
    state.check_compatible()
    state.clear()


@dataclass(frozen=True)
class Toy:
    """A dataset on disk and what it must hold.

    `rows` are in the order of the shards, and by key within a shard; vectors are arrays of their own shape.
    """

    output: OutputDataset
    spec: FeatureSpec | None
    rows: list[dict[str, Any]]
    failures: list[dict[str, str]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.output.folder.local_path

    @property
    def kind(self) -> str:
        return self.output.kind

    @property
    def schema(self) -> pa.Schema:
        return schema_of(self.kind, self.spec)

    @property
    def glob(self) -> str:
        return str(self.path / "part-*.parquet")

    def at(self, path: Path) -> Toy:
        return replace(self, output=replace(self.output, folder=Folder(str(path))))

    def shard(self, number: int) -> list[dict[str, Any]]:
        if "image_id" not in KEYS[self.kind]:
            return self.rows
        return [row for row in self.rows if shard_by_hand(row["image_id"], self.output.shards) == number]

    def table(self, rows: list[dict[str, Any]]) -> pa.Table:
        flat = [{name: v.ravel() if isinstance(v, np.ndarray) else v for name, v in row.items()} for row in rows]
        return pa.Table.from_pylist(flat, schema=self.schema)

    def fill(self, number: int, shard: ShardWriter) -> None:
        rows = self.shard(number)
        shard.write(self.table(rows))
        shard.add_failures(f for f in self.failures if self.failure_shard(f) == number)
        shard.statistics = {"rows_written": len(rows)}

    def write_shard(self, number: int) -> None:
        with open_shard(self.output, number) as shard:
            self.fill(number, shard)

    def failure_shard(self, failure: dict[str, str]) -> int:
        return shard_by_hand(failure["key"].split("/")[0], self.output.shards)

    def write(self) -> Manifest:
        prepare(self.output, overwrite=False)
        for number in range(self.output.shards):
            self.write_shard(number)
        return self.commit()

    def commit(self) -> Manifest:
        files: tuple[str, ...] = ()
        if self.kind == "vocabulary":
            self.output.folder.put("_vocabulary.txt", "".join(f"{row['token']}\n" for row in self.rows).encode())
            files = ("_vocabulary.txt",)
        return commit(self.output, files=files)


def make_toy(
    path: Path,
    kind: str,
    rows: list[dict[str, Any]],
    *,
    spec: FeatureSpec | None = None,
    parameters: dict[str, Any] | None = None,
    failures: list[dict[str, str]] | None = None,
    shards: int = SHARDS,
) -> Toy:
    """Puts rows into the order of a dataset; writes nothing."""
    stored = {} if spec is None else {"feature": {**vars(spec), "shape": list(spec.shape)}}
    number_of = (lambda row: 0) if "image_id" not in KEYS[kind] else (lambda row: shard_by_hand(row["image_id"], shards))
    return Toy(
        output=OutputDataset(
            Folder(str(path)), kind, {**stored, **(parameters or {})}, shards=shards, other_files=OTHER_FILES.get(kind, "")
        ),
        spec=spec,
        rows=sorted(rows, key=lambda row: (number_of(row), *(row[name] for name in KEYS[kind]))),
        failures=failures or [],
    )


def make_features(path: Path, spec: FeatureSpec = POOL, *, image_ids: list[str] = IMAGE_IDS, **kwargs: Any) -> Toy:
    rng = np.random.default_rng(7)
    rows = [
        {"image_id": name, "feature": rng.standard_normal(spec.shape, dtype=np.float32).astype(spec.dtype)}
        for name in image_ids
    ]
    return make_toy(path, "features", rows, spec=spec, **kwargs)


def make_captions(path: Path, **kwargs: Any) -> Toy:
    words = {"en": ["a", "dog", "runs", "in", "snow"], "de": ["ein", "Hund", "läuft", "im", "Schnee"]}
    rng = np.random.default_rng(11)
    rows = []
    for position, image_id in enumerate(IMAGE_IDS):
        split = "val" if position % 4 == 0 else "train"
        for key in (("en", "translation", 0), ("de", "translation", 0), ("en", "comparable", 0), ("en", "comparable", 1)):
            tokens = [words[key[0]][n] for n in rng.integers(0, 5, size=1 + position % 4)]
            row = dict(zip(CAPTION_KEY, (image_id, *key, split), strict=True))
            rows.append({**row, "text": " ".join(tokens) + " .", "tokens": tokens})
    failure = {"uri": "captions.tsv:7", "stage": "prepare", "reason": "empty_caption", "message": "nothing but spaces: «  »"}
    failures = [{"key": f"{image_id}/de/comparable/0", **failure} for image_id in IMAGE_IDS[:2]]
    return make_toy(path, "captions", rows, parameters={"tokenizer": "moses"}, failures=failures, **kwargs)


def count_tokens(captions: Toy) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {}
    for row in captions.rows:
        counts.setdefault(row["language"], Counter()).update(row["tokens"])
    return counts


def make_vocabulary(path: Path, captions: Toy, **kwargs: Any) -> Toy:
    vocabulary = Vocabulary.from_counts(count_tokens(captions), min_count=1)
    rows = [
        {"id": number, "token": token, "count": sum(counts.values()), "counts": sorted(counts.items())}
        for number, (token, counts) in enumerate(zip(vocabulary.tokens, vocabulary.counts, strict=True))
    ]
    return make_toy(path, "vocabulary", rows, shards=1, **kwargs)


def make_word_vectors(path: Path, captions: Toy, vocabulary: Toy, **kwargs: Any) -> Toy:
    rng = np.random.default_rng(19)
    rows = [
        {"language": language, "id": row["id"], "token": row["token"], "vector": rng.standard_normal(8, dtype=np.float32)}
        for language in count_tokens(captions)
        for row in vocabulary.rows
        if language in dict(row["counts"])
    ]
    parameters = {"languages": ["de", "en"], "lookup": "as they are"}
    return make_toy(path, "word-vectors", rows, spec=WORDS, parameters=parameters, shards=1, **kwargs)


def rows_of(captions: Toy, columns: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each caption, with its key and these columns."""
    keys = ({name: row[name] for name in CAPTION_KEY} for row in captions.rows)
    return [{**key, **more} for key, more in zip(keys, columns, strict=True)]


def make_encoded(path: Path, captions: Toy, vocabulary: Toy, **kwargs: Any) -> Toy:
    ids = {row["token"]: row["id"] for row in vocabulary.rows}
    encoded = [[1, *(ids[token] for token in row["tokens"]), 2] for row in captions.rows]
    rows = rows_of(captions, ({"token_ids": token_ids, "length": len(token_ids)} for token_ids in encoded))
    return make_toy(path, "encoded", rows, parameters={"vocabulary_size": len(vocabulary.rows)}, **kwargs)


def make_embeddings(path: Path, captions: Toy, **kwargs: Any) -> Toy:
    rng = np.random.default_rng(17)
    rows = rows_of(captions, ({"embedding": rng.standard_normal(JOINT.shape, dtype=np.float32)} for _ in captions.rows))
    return make_toy(path, "embeddings", rows, spec=JOINT, **kwargs)


def make_token_features(path: Path, captions: Toy, spec: FeatureSpec = TOKENS, **kwargs: Any) -> Toy:
    rng = np.random.default_rng(23)
    lengths = [len(row["tokens"]) + 2 for row in captions.rows]
    vectors = (rng.standard_normal((length, *spec.shape), dtype=np.float32).astype(spec.dtype) for length in lengths)
    rows = rows_of(captions, ({"length": length, "vectors": each} for length, each in zip(lengths, vectors, strict=True)))
    return make_toy(path, "token-features", rows, spec=spec, **kwargs)


def make_regions(path: Path, **kwargs: Any) -> Toy:
    rng = np.random.default_rng(13)
    rows = []
    for position, image_id in enumerate(IMAGE_IDS):
        row = region_row(
            image_id,
            np.sort(rng.uniform(0, 480, (36, 2, 2)), axis=1).reshape(36, 4).astype(np.float32),
            rng.standard_normal((36, 2048), dtype=np.float32),
            36 if position else 20,
            height=480 + position,
            class_ids=rng.integers(1, 1601, 36).astype(np.int16),
            class_scores=rng.uniform(0, 1, 36).astype(np.float32),
            attribute_ids=rng.integers(1, 401, 36).astype(np.int16),
            attribute_scores=rng.uniform(0, 1, 36).astype(np.float32),
        )
        rows.append(row)
    return make_toy(path, "regions", rows, spec=REGIONS, **kwargs)


FAILED_IMAGES = [
    {"key": key, "uri": f"images/{key}.jpg", "stage": "decode", "reason": reason, "message": "17 of 90 bytes: Ende"}
    for key, reason in [("broken-1", "truncated"), ("broken-2", "not_an_image"), ("broken-3", "truncated")]
]


# --- datasets --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    """A committed dataset of every kind, by name; never to be written to."""
    root = tmp_path_factory.mktemp("toys")
    captions = make_captions(root / "captions")
    vocabulary = make_vocabulary(root / "vocabulary", captions)
    toys = {
        "captions": captions,
        "vocabulary": vocabulary,
        "encoded": make_encoded(root / "encoded", captions, vocabulary),
        "features": make_features(root / "features", failures=FAILED_IMAGES),
        "features16": make_features(root / "features16", CROPS16),
        "regions": make_regions(root / "regions"),
        "embeddings": make_embeddings(root / "embeddings", captions),
        "word-vectors": make_word_vectors(root / "word-vectors", captions, vocabulary),
        "token-features": make_token_features(root / "token-features", captions),
        "token-features16": make_token_features(root / "token-features16", captions, TOKENS16),
    }
    for toy in toys.values():
        toy.write()
    return toys


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(str(tmp_path / "data"))


@pytest.fixture
def remarks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(events, "_show", lambda text, style: shown.append(text))
    return shown


@pytest.fixture
def copy_toy(toys: dict[str, Toy], tmp_path: Path) -> Callable[[str], Toy]:
    def copy(name: str) -> Toy:
        return toys[name].at(Path(shutil.copytree(toys[name].path, tmp_path / name)))

    return copy


@pytest.fixture
def new_features(tmp_path: Path) -> Callable[..., Toy]:
    return lambda name="new", **kwargs: make_features(tmp_path / name, **kwargs)


# --- tools that break datasets ---------------------------------------------------------------------------------------


class Forger:
    """Rewrites files of a dataset, and whatever is on record about them, as if the dataset had been written so."""

    def edit_manifest(self, toy: Toy, edit: Callable[[dict[str, Any]], object]) -> None:
        path = toy.path / "_manifest.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        edit(content)
        path.write_text(json.dumps(sign(content)), encoding="utf-8")

    def relist(self, toy: Toy, name: str) -> None:
        """Lists the bytes and rows that a file has now; without a record, which would tell another story."""
        data = (toy.path / name).read_bytes()
        (toy.path / ".records" / name).with_suffix(".jsonl").unlink(missing_ok=True)

        def edit(content: dict[str, Any]) -> None:
            entry = next(e for e in [*content["shards"], *content["failures"], *content["files"]] if e["path"] == name)
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
            if name.endswith(".parquet"):
                footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
                entry.update(rows=pq.read_metadata(toy.path / name).num_rows, footer_sha256=hashlib.sha256(footer).hexdigest())
            elif "rows" in entry:
                entry["rows"] = len(data.splitlines())

        self.edit_manifest(toy, edit)

    def shard(
        self, toy: Toy, name: str, change: Callable[[pa.Table], pa.Table], *, footer: dict[str, str] | None = None
    ) -> None:
        """Rewrites a shard, with its own footer unless told otherwise, and lists it."""
        path, pairs = toy.path / name, self.footer(toy, name)
        table = change(pq.ParquetFile(path).read()).replace_schema_metadata(None)  # Else the footer comes along with it.
        with pq.ParquetWriter(path, table.schema) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(pairs if footer is None else footer)
        self.relist(toy, name)

    def footer(self, toy: Toy, name: str) -> dict[str, str]:
        pairs = pq.read_metadata(toy.path / name).metadata
        return {k.decode(): v.decode() for k, v in pairs.items() if k.startswith(b"imagepivot.")}

    def failures(self, toy: Toy, name: str, change: Callable[[list[dict[str, str]]], object]) -> None:
        """Rewrites a file of failures, lists it, and lets the footer of its shard name it."""
        path, shard = toy.path / name, Path(name).with_suffix(".parquet").name
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        change(rows)
        data = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        path.write_bytes(data)
        self.relist(toy, name)
        stated = {"rows": len(rows), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        stated["reasons"] = Counter(row["reason"] for row in rows)
        footer = {**self.footer(toy, shard), "imagepivot.failures": json.dumps(stated)}
        self.shard(toy, shard, lambda table: table, footer=self.sealed(footer))

    def sealed(self, footer: dict[str, str]) -> dict[str, str]:
        """Returns a footer with the digest of its content."""
        rest = {key.removeprefix("imagepivot."): text for key, text in footer.items() if key != "imagepivot.sha256"}
        text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return {**footer, "imagepivot.sha256": hashlib.sha256(text.encode()).hexdigest()}

    def value(self, toy: Toy, name: str, row: int, **values: Any) -> None:
        def change(table: pa.Table) -> pa.Table:
            rows = table.to_pylist()
            rows[row].update(values)
            return pa.Table.from_pylist(rows, schema=table.schema)

        self.shard(toy, name, change)


@pytest.fixture(scope="session")
def forge() -> Forger:
    return Forger()


# --- other processes -------------------------------------------------------------------------------------------------


@contextmanager
def blocked_process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a script until it prints ``ready``; there it must wait on its standard input. Killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
