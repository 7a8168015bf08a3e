"""Damaged files meet every way of reading: the file is named, with what is wrong and what to do."""

import json
import random
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.damage import content_errors, damaged
from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.failures import failures_content, parse_failures
from schemas.storage.folder import Folder
from tests.schemas.conftest import KINDS

OF_WORDS = ("vocabulary", "word-vectors")
VECTORS = {
    "features": "feature",
    "features16": "feature",
    "regions": "features",
    "embeddings": "embedding",
    "word-vectors": "vector",
}
ADVICE = (
    r": copy the whole folder again, or run the command that wrote it again with --verify, which rewrites only damaged files$"
)
READS = {
    "shard": lambda d: d.shard(0),
    "columns of a shard": lambda d: d.shard(0, d.schema.names[:1]),
    "table": lambda d: d.table(),
    "shards": lambda d: list(d.shards()),
    "batches": lambda d: list(d.batches(batch_size=2)),
    "shard_batches": lambda d: list(d.shard_batches(0)),
    "numpy": lambda d: d.numpy(VECTORS[d.kind]),
    "image_ids": lambda d: d.image_ids(),
    "rows": lambda d: d.rows(d.manifest.statistics["first_image"]),
    "take": lambda d: d.take([d.manifest.statistics["first_image"]]),
    "vocabulary": lambda d: d.vocabulary(),
}


def reads_of(kind):
    skipped = {"numpy"} if kind not in VECTORS else set()
    skipped |= {"image_ids", "rows", "take"} if kind in OF_WORDS else set()
    skipped |= {"vocabulary"} if kind != "vocabulary" else set()
    return [name for name in READS if name not in skipped]


@pytest.fixture
def copy(copy_toy, forge):
    """Makes a copy of a dataset; its statistics name an image of the first shard."""

    def make(kind):
        toy = copy_toy(kind)
        if kind not in OF_WORDS:
            forge.edit_manifest(toy, lambda content: content["statistics"].update(first_image=toy.shard(0)[0]["image_id"]))
        return toy, toy.path / toy.output.name(0)

    return make


def cut(data):
    return data[: len(data) // 2]


def other_parquet(data):
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), file)
    return file.getvalue().to_pybytes()


def every_reader_names(toy, says):
    for name in reads_of(toy.path.name):
        with pytest.raises(DatasetError, match=says):
            READS[name](open_dataset(toy.path))


DAMAGES = {
    "cut": cut,
    "other": other_parquet,
    "empty": lambda data: b"",
    "longer": lambda data: data + b"x",
    "zeros": lambda data: bytes(len(data)),
    "random": lambda data: random.Random(3).randbytes(len(data)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_shard_is_named_by_every_reader(copy, kind, damage):
    toy, path = copy(kind)
    data = path.read_bytes()
    path.write_bytes(damage(data))
    size = len(damage(data))
    problem = r"is damaged \(.+\)" if size == len(data) else rf"has {size:,} bytes, the manifest says {len(data):,}"
    every_reader_names(toy, rf"{path} {problem}{ADVICE}")


@pytest.mark.parametrize("kind", KINDS)
def test_missing_shard_or_a_folder_in_its_place(copy, kind):
    toy, path = copy(kind)
    path.unlink()
    every_reader_names(toy, rf"{path} is listed in the manifest but missing: copy")
    path.mkdir()
    every_reader_names(toy, rf"{path}")


@pytest.mark.parametrize("kind", KINDS)
def test_listed_shard_of_another_kind_is_named(copy, forge, toys, kind):
    other = toys["captions" if kind != "captions" else "encoded"]
    toy, path = copy(kind)
    path.write_bytes((other.path / other.output.name(0)).read_bytes())
    forge.relist(toy, path.name)
    every_reader_names(toy, rf"{path} (has the columns .*, expected .*|cannot hold .*){ADVICE}")


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary"])
def test_any_byte_of_a_shard_of_text(copy, kind):
    # Such a shard is small, so that its digest is compared whenever it is read.
    toy, path = copy(kind)
    data = path.read_bytes()
    for position in range(0, len(data), 37):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(DatasetError, match=rf"{path} is damaged \(its SHA-256 is not the one that the manifest lists\)"):
            open_dataset(toy.path).shard(0)


@pytest.mark.cluster
@pytest.mark.parametrize("kind", VECTORS)
def test_any_byte_of_the_frame_of_a_shard_of_vectors(toys, tmp_path, kind):
    """A flipped byte gives a message, or other values in the right place; nothing else ever comes out of pyarrow.

    Except for the footer: its digest is compared before pyarrow sees it. A flipped byte there has ended the process.
    """
    toy = toys[kind].at(tmp_path / kind)
    toy.write()
    path = toy.path / toy.output.name(0)
    data, dataset = path.read_bytes(), open_dataset(toy.path)
    footer = int.from_bytes(data[-8:-4], "little") + 8
    shape = dataset.numpy(VECTORS[kind]).shape
    generator, outcomes = random.Random(kind), Counter()
    ends = [*range(200), *range(len(data) - footer - 200, len(data))]
    inner = range(len(data) - footer)
    count = 100 if kind == "regions" else 250
    for position in (*generator.sample(ends, count), *generator.sample(inner, min(count, len(inner)))):
        changed = bytearray(data)
        changed[position] ^= generator.choice((1, 4, 64, 128, 255))
        path.write_bytes(changed)
        try:
            assert dataset.numpy(VECTORS[kind]).shape == shape
            assert len(dataset.table()) == sum(batch.num_rows for batch in dataset.batches()) == len(dataset)
            assert kind in OF_WORDS or len(dataset.image_ids()) == len(dataset)
            outcomes["read"] += 1
            assert position < len(data) - footer
        except DatasetError as error:
            outcomes["named" if str(path) in str(error) else "not named"] += 1
    assert outcomes["not named"] == 0
    assert outcomes["named"] > 50
    assert outcomes["read"] > 10  # A byte of a description, say, does no harm.


def test_text_not_utf8_is_named_by_every_reader(copy, forge):
    toy, path = copy("captions")
    table = pq.ParquetFile(path).read()
    texts = [b"\xff\xfe" if n == 1 else value.encode() for n, value in enumerate(table["text"].to_pylist())]
    broken = pa.array(texts, pa.binary()).view(pa.string())  # What pyarrow itself neither refuses to write nor to read.
    pq.write_table(table.set_column(5, table.schema.field("text"), broken), path)
    forge.relist(toy, path.name)
    for name in ("shard", "table", "batches", "rows"):
        with pytest.raises(DatasetError, match=rf"{path} is damaged \(.*UTF8.*\){ADVICE}"):
            READS[name](open_dataset(toy.path))


def test_vocabulary_without_its_specials(copy_toy, forge):
    toy = copy_toy("vocabulary")
    forge.shard(toy, toy.output.name(0), lambda table: table.slice(4))
    with pytest.raises(DatasetError, match=r"'.*/vocabulary' is no vocabulary: a vocabulary begins with .*\. Write it again"):
        open_dataset(toy.path).vocabulary()


# --- failures --------------------------------------------------------------------------------------------------------

ROW = {"key": "a", "uri": "a.jpg", "stage": "decode", "reason": "truncated", "message": "Ende"}


@pytest.mark.parametrize(
    "damage", [cut, lambda data: b"", lambda data: data + b"\n", lambda data: data.replace(b"Ende", b"Ente")]
)
def test_damaged_failures_are_named(copy_toy, damage):
    toy = copy_toy("features")
    path = next((toy.path / "_failures").iterdir())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(
        DatasetError, match=rf"{path} (has [\d,]+ bytes, the manifest says [\d,]+|is damaged \(.*SHA-256.*\)){ADVICE}"
    ):
        open_dataset(toy.path).failures()
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{path} is listed in the manifest but missing: copy"):
        open_dataset(toy.path).failures()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (json.dumps(ROW).encode(), "the last line has no end"),
        (b"{\n", "Expecting property name"),
        (json.dumps({**ROW, "key": 7}).encode() + b"\n", "a line is not an object"),
        (json.dumps({**ROW, "key": "\ud800"}).encode() + b"\n", "surrogates not allowed"),
        (b"\xff\n", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_parse_failures_invalid_lines_are_named(data, problem):
    with pytest.raises(DatasetError, match=rf"_failures/x\.jsonl is damaged \(.*{problem}.*\){ADVICE}"):
        parse_failures(data, "_failures/x.jsonl")


def test_failures_with_any_line_end_round_trip(tmp_path):
    folder = Folder(str(tmp_path))
    rows = [{**ROW, "key": f"{n}", "uri": f"a{end}b.jpg"} for n, end in enumerate("\n\r\x0b\x0c\x1c\x85\u2028\u2029")]
    content, entry = failures_content(rows)
    folder.put("x.jsonl", content)
    assert entry.rows == 8
    assert parse_failures(folder.read("x.jsonl"), "x.jsonl").to_pylist() == rows


# --- what says it ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        OSError("Couldn't deserialize thrift:\n TProtocolException"),
        pa.ArrowInvalid("out of range"),
        pa.ArrowMemoryError("malloc of size 9223372036854775807 failed"),
    ],
)
def test_content_errors_convert_pyarrow_errors(error):
    with pytest.raises(DatasetError, match=rf"^data/part-0 is damaged \(.+\){ADVICE}") as caught, content_errors("data/part-0"):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


def test_content_errors_pass_through_dataset_errors_and_bugs():
    for error in (damaged("a", "is broken"), KeyError("x"), TypeError("x")):
        with pytest.raises(type(error)) as caught, content_errors("data/part-0"):
            raise error
        assert caught.value is error


def test_content_errors_connection_failure_is_not_damage():
    says = rf"^s3://b/part-0 cannot be read \(reset\){ADVICE}"
    with pytest.raises(DatasetError, match=says), content_errors("s3://b/part-0"):
        raise OSError("reset")
