import hashlib
import json
import os
import re
import signal
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.dataset import open_dataset
from schemas.failures import FailuresEntry, failures_name, read_failures
from schemas.features import FeatureSpec
from schemas.fingerprints import canonical_json, fingerprint_of
from schemas.footers import read_footer
from schemas.kinds import CAPTIONS, FAILURES, VOCABULARY, features_schema
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import commit, complete_dataset, write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_writer import open_shard
from schemas.writing.validation import validate

NAME = "part-00000-of-00001.parquet"
FAILED = "_failures/part-00000-of-00001.jsonl"
RECORD = ".records/part-00000-of-00001.jsonl"
PARAMETERS = {"tokenizer": "moses", "ü": [1, 2.5, None]}


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "data"))


def write(folder, tables, kind="captions", parameters=PARAMETERS, *, statistics=None, failures=()):
    """The one shard of a dataset."""
    with open_shard(OutputDataset(folder, kind, parameters), 0) as shard:
        for table in tables:
            shard.write(table)
        shard.add_failures(failures)
        shard.statistics = statistics or {}


def write_captions(folder, rows, *, size=None, **kwargs):
    size = size or max(1, len(rows))
    tables = (pa.Table.from_pylist(rows[i : i + size], schema=CAPTIONS) for i in range(0, len(rows), size))
    write(folder, tables, **kwargs)


def many_captions(count):
    return [
        {
            "image_id": f"image-{n // 8:06d}",
            "language": ("de", "en", "fr", "cs")[n // 2 % 4],
            "portion": ("comparable", "translation")[n % 2],
            "index": 0,
            "split": "val" if n > count // 2 else "train",
            "text": f"Ein Satz über {n * 7919 % 1000} Dinge",
            "tokens": ["ein", "Satz", str(n * 7919 % 1000)],
        }
        for n in range(count)
    ]


# --- what a shard holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "features16", "regions"])
def test_rows_come_back_as_they_were(toys, kind):
    toy = toys[kind]
    for number, path in enumerate(sorted(toy.path.glob("part-*.parquet"))):
        table = pq.ParquetFile(path).read()
        table.validate(full=True)
        assert table.schema.equals(toy.schema, check_metadata=False)
        for found, expected in zip(table.to_pylist(), toy.shard(number), strict=True):
            assert list(found) == list(expected)
            for name, value in expected.items():
                if isinstance(value, np.ndarray):
                    np.testing.assert_array_equal(np.array(found[name], value.dtype), value.ravel())
                else:
                    assert found[name] == value


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "regions"])
def test_columns_keep_their_descriptions(toys, kind):
    toy = toys[kind]
    stored = pq.read_schema(next(toy.path.glob("part-*.parquet")))
    for field in toy.schema:
        assert stored.field(field.name).metadata[b"description"] == field.metadata[b"description"]
        assert not stored.field(field.name).nullable


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "regions"])
def test_a_footer_says_what_the_shard_is(toys, kind):
    toy = toys[kind]
    for number, path in enumerate(sorted(toy.path.glob("part-*.parquet"))):
        pairs = pq.read_metadata(path).metadata
        ours = {key.decode(): value.decode() for key, value in pairs.items() if key.startswith(b"imagepivot.")}
        failed = [failure for failure in toy.failures if toy.failure_shard(failure) == number]
        lines = path.parent.joinpath("_failures", f"{path.stem}.jsonl").read_bytes() if failed else b""
        stated = {
            "rows": len(failed),
            "bytes": len(lines),
            "sha256": hashlib.sha256(lines).hexdigest() if failed else "",
            "reasons": dict(Counter(failure["reason"] for failure in failed)),
        }
        digest = ours.pop("imagepivot.sha256")
        rest = {key.removeprefix("imagepivot."): text for key, text in ours.items()}
        assert digest == hashlib.sha256(canonical_json(rest).encode()).hexdigest()
        assert ours == {
            "imagepivot.version": "2",
            "imagepivot.kind": toy.kind,
            "imagepivot.fingerprint": toy.output.fingerprint,
            "imagepivot.parameters": canonical_json(toy.output.parameters),
            "imagepivot.statistics": f'{{"rows_written":{len(toy.shard(number))}}}',
            "imagepivot.failures": canonical_json(stated),
        }


def test_a_footer_is_read_again(folder):
    write_captions(folder, many_captions(5), statistics={"tokens": {"de": 3}})
    footer = read_footer(folder, NAME)
    assert (footer.kind, footer.fingerprint, footer.rows) == ("captions", fingerprint_of("captions", PARAMETERS, (), 1), 5)
    assert footer.parameters == {"tokenizer": "moses", "ü": [1, 2.5, None]}
    assert footer.statistics == {"tokens": {"de": 3}}


def test_rows_and_failures_are_counted_while_they_are_written(folder):
    with open_shard(OutputDataset(folder, "captions", PARAMETERS), 0) as shard:
        for count in range(1, 4):
            shard.write(pa.Table.from_pylist(many_captions(2), schema=CAPTIONS))
            shard.add_failures([failure(f"late {count}")])
            assert (shard.rows, len(shard.failures)) == (2 * count, count)
        shard.statistics = {"rows": shard.rows, "failed": len(shard.failures)}
    assert read_footer(folder, NAME).statistics == {"rows": 6, "failed": 3}
    assert [row["key"] for row in failures_in(folder)] == ["late 1", "late 2", "late 3"]


def test_a_shard_without_rows(folder):
    write_captions(folder, [])
    table = pq.ParquetFile(folder.local_path / NAME).read()
    assert table.num_rows == 0
    assert table.schema.equals(CAPTIONS)
    assert read_footer(folder, NAME).rows == 0


@pytest.mark.parametrize(
    ("rows", "more", "error", "match"),
    [
        (pa.table({"image_id": ["a"], "text": ["b"]}), {}, ValueError, "field names"),
        (
            pa.Table.from_pylist([{**row, "text": None} for row in many_captions(2)], schema=CAPTIONS),
            *({}, ValueError, r"'text' .*non-nullable but contains nulls"),
        ),
        (CAPTIONS.empty_table(), {"statistics": {"mean": float("nan")}}, ValueError, "not JSON compliant"),
        (CAPTIONS.empty_table(), {"failures": [{"uri": "no key"}]}, KeyError, "key"),
    ],
)
def test_what_cannot_be_stored_writes_nothing(folder, rows, more, error, match):
    with pytest.raises(error, match=match):
        write(folder, [rows], **more)
    assert folder.names() == []


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "dtype", "group_rows"), [(2048, "float32", 512), (2048, "float16", 1024), (4096, "float32", 256)]
)
def test_row_groups_of_features_hold_4_mib(folder, width, dtype, group_rows):
    spec = FeatureSpec(name="pool", shape=(width,), dtype=dtype)
    schema = features_schema(spec)
    count = 2 * group_rows + 100
    values = np.random.default_rng(3).standard_normal((count, width), dtype=np.float32).astype(dtype)
    table = pa.table(
        {
            "image_id": [f"{n:06d}" for n in range(count)],
            "feature": pa.FixedSizeListArray.from_arrays(values.ravel(), type=schema.field("feature").type),
        },
        schema=schema,
    )
    write(folder, table.to_batches(max_chunksize=96), "features", {"feature": spec.to_json()})
    metadata = pq.read_metadata(folder.local_path / NAME)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [group_rows, group_rows, 100]
    column = metadata.row_group(0).column(1)
    assert 4 << 20 <= column.total_uncompressed_size < (4 << 20) * 1.02
    assert column.compression == "UNCOMPRESSED"
    assert not any("DICTIONARY" in encoding for encoding in column.encodings)
    assert pq.ParquetFile(folder.local_path / NAME).read().equals(table)


def test_row_groups_of_regions_hold_64_images_at_least(toys):
    toy = toys["regions"]
    assert {pq.read_metadata(path).num_row_groups for path in toy.path.glob("part-*.parquet")} == {1}


@pytest.mark.parametrize("size", [1, 7, 100, 333, 999])
def test_bytes_of_captions_do_not_depend_on_batches(folder, size):
    rows = many_captions(1000)
    write_captions(folder, rows)
    whole = folder.read(NAME)
    write_captions(folder, rows, size=size)
    assert folder.read(NAME) == whole
    assert pq.ParquetFile(folder.local_path / NAME).read().to_pylist() == rows


def test_bytes_do_not_depend_on_dictionaries(folder):
    # Rows cut from a larger table bring its dictionary along, in the order in which that table met the labels.
    rows = many_captions(1000)
    larger = pa.Table.from_pylist([*reversed(rows), *rows], schema=CAPTIONS)
    assert larger["split"].chunk(0).dictionary.to_pylist() == ["val", "train"]
    write(folder, [larger.slice(1000)])
    cut = folder.read(NAME)
    write_captions(folder, rows)
    assert cut == folder.read(NAME)


def test_bytes_do_not_depend_on_nullability_of_what_arrives(folder):
    rows = many_captions(10)
    loose = pa.schema([pa.field(f.name, f.type) for f in CAPTIONS])
    write(folder, [pa.Table.from_pylist(rows, schema=loose)])
    nullable = folder.read(NAME)
    write_captions(folder, rows)
    assert nullable == folder.read(NAME)


@pytest.mark.parametrize("size", [1, 33, 512, 513, 1023])
def test_bytes_of_features_do_not_depend_on_batches(folder, size):
    spec = FeatureSpec(name="pool", shape=(2048,))
    schema = features_schema(spec)
    values = np.random.default_rng(5).standard_normal((1100, 2048), dtype=np.float32)
    feature = pa.FixedSizeListArray.from_arrays(values.ravel(), type=schema.field("feature").type)
    table = pa.table({"image_id": [f"{n:06d}" for n in range(1100)], "feature": feature}, schema=schema)
    write(folder, [table], "features", {"feature": spec.to_json()})
    whole = folder.read(NAME)
    write(folder, table.to_batches(max_chunksize=size), "features", {"feature": spec.to_json()})
    assert folder.read(NAME) == whole


@pytest.mark.slow
def test_bytes_of_text_do_not_depend_on_batches_over_several_row_groups(folder):
    count = 140_000
    table = pa.table(
        {
            "id": np.arange(count, dtype=np.int32),
            "token": [f"t{n * 7919 % count}" for n in range(count)],
            "count": np.arange(count)[::-1].copy(),
            "counts": [[("en", n)] for n in range(count)],
        },
        schema=VOCABULARY,
    )
    write(folder, [table], "vocabulary", {})
    whole = folder.read(NAME)
    write(folder, table.to_batches(max_chunksize=9_999), "vocabulary", {})
    assert folder.read(NAME) == whole
    metadata = pq.read_metadata(folder.local_path / NAME)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [65_536, 65_536, 8_928]
    assert pq.ParquetFile(folder.local_path / NAME).read().equals(table)


def test_memory_holds_one_row_group(folder):
    # The rows are taken as they are written: when the last ones are asked for, most of the others are in the file.
    spec = FeatureSpec(name="pool", shape=(2048,))
    schema = features_schema(spec)
    sizes = []

    def tables():
        for n in range(0, 2560, 128):
            feature = pa.FixedSizeListArray.from_arrays(np.zeros(128 * 2048, np.float32), type=schema.field("feature").type)
            sizes.append(sum(size for _, size in folder.files()))
            yield pa.table({"image_id": [f"{i:06d}" for i in range(n, n + 128)], "feature": feature}, schema=schema)

    write(folder, tables(), "features", {"feature": spec.to_json()})
    for taken, size in enumerate(sizes):
        assert size >= taken // 4 * (4 << 20)


# --- whole or not at all ---------------------------------------------------------------------------------------------


def failing(rows):
    yield pa.Table.from_pylist(rows, schema=CAPTIONS)
    raise ZeroDivisionError("in the middle")


@pytest.mark.slow
def test_a_writer_that_fails_leaves_nothing(folder):
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        write(folder, failing(many_captions(70_000)))
    assert folder.names() == []


def test_a_writer_that_fails_leaves_the_shard_that_was_there(folder):
    write_captions(folder, many_captions(5))
    before = folder.read(NAME)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        write(folder, failing(many_captions(9)))
    assert folder.names() == [RECORD, NAME]
    assert folder.read(NAME) == before


KILLED = """
import sys
import numpy as np, pyarrow as pa
from schemas.features import FeatureSpec
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard
from schemas.storage.folder import Folder

spec = FeatureSpec(name="pool", shape=(2048,))
output = OutputDataset(Folder(sys.argv[1]), kind="features", parameters={"feature": spec.to_json()})
with open_shard(output, 0) as shard:
    feature = pa.FixedSizeListArray.from_arrays(np.zeros(600 * 2048, np.float32), type=output.schema.field("feature").type)
    shard.write(pa.table({"image_id": [f"{n:06d}" for n in range(600)], "feature": feature}, schema=output.schema))
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_only_temporary_files(folder, blocked_process):
    with blocked_process(KILLED, folder.location) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    (shard,) = folder.files()
    assert re.fullmatch(rf"\.{re.escape(NAME)}\.tmp-\d+", shard[0])
    assert shard[1] > 4 << 20  # It was in the middle, not at the start.
    assert read_footer(folder, NAME) is None


# --- failures --------------------------------------------------------------------------------------------------------


def failures_in(folder):
    """The lines, as anyone would read them."""
    return [json.loads(line) for line in folder.read(FAILED).decode().splitlines()]


def failure(key, reason="truncated"):
    return {"key": key, "uri": f"{key}.jpg", "stage": "decode", "reason": reason, "message": f"«{key}»"}


def test_failures_lie_beside_their_shard(folder):
    failures = [failure("c"), failure("a", "empty"), failure("b")]
    write_captions(folder, many_captions(3), failures=failures)
    assert folder.names() == [RECORD, FAILED, NAME]
    assert failures_name(NAME) == FAILED
    assert failures_in(folder) == sorted(failures, key=lambda row: row["key"])
    assert read_failures(folder, FAILED).to_pylist() == failures_in(folder)
    assert read_failures(folder, FAILED).schema.equals(FAILURES)
    data = folder.read(FAILED)
    entry = FailuresEntry(3, len(data), hashlib.sha256(data).hexdigest(), {"truncated": 2, "empty": 1})
    assert read_footer(folder, NAME).failures == entry


def test_bytes_of_failures_do_not_depend_on_their_order(folder):
    failures = [failure("c"), failure("a", "empty"), failure("b")]
    written = set()
    for order in (failures, failures[::-1], failures[1:] + failures[:1]):
        write_captions(folder, many_captions(3), failures=order)
        written.add(folder.read(FAILED))
    assert len(written) == 1


def test_failures_are_published_before_their_shard_and_its_record_after_it(folder, monkeypatch):
    published = []
    publish = Folder._publish

    def record(self, temporary, name):
        published.append(name)
        publish(self, temporary, name)

    monkeypatch.setattr(Folder, "_publish", record)
    write_captions(folder, many_captions(3), failures=[failure("a")])
    assert published == [FAILED, NAME, RECORD]


def test_a_retry_without_failures_removes_those_of_the_first_try(folder):
    write_captions(folder, many_captions(3), failures=[failure("a")])
    write_captions(folder, many_captions(3), failures=[])
    assert folder.names() == [RECORD, NAME]
    assert read_footer(folder, NAME).failures == FailuresEntry()


# --- a whole dataset -------------------------------------------------------------------------------------------------


def rows_of(toy):
    return lambda number, shard: shard.write(toy.table(toy.shard(number)))


def test_a_dataset_is_written_in_one_call(toys, tmp_path):
    toy = toys["captions"].at(tmp_path / "captions")
    manifest = write_dataset(toy.output, rows_of(toy), libraries=("pytest",))
    assert validate(toy.path) == []
    assert manifest == open_dataset(toy.path).manifest
    assert open_dataset(toy.path).table().to_pylist() == [row for n in range(3) for row in toy.table(toy.shard(n)).to_pylist()]
    assert "pytest" in manifest.libraries


def test_only_missing_shards_are_written_and_nothing_is_checked_for_none(toys, tmp_path):
    toy = toys["features"].at(tmp_path / "features")
    toy.write_shard(1)
    made, checks = [], []

    def make(number, shard):
        made.append(number)
        rows_of(toy)(number, shard)

    for _ in range(2):
        write_dataset(toy.output, make, check=lambda: checks.append(list(made)))
    assert (made, checks) == ([0, 2], [[]])


def test_a_check_that_fails_replaces_nothing(copy_toy):
    toy = copy_toy("features")
    before = {path: path.read_bytes() for path in toy.path.rglob("*.*") if path.is_file()}

    def check():
        raise ZeroDivisionError("unusable")

    with pytest.raises(ZeroDivisionError, match="unusable"):
        write_dataset(
            replace(toy.output, shards=2),
            rows_of(toy),
            ReusePolicy(overwrite=True),
            check=check,
        )
    assert {path: path.read_bytes() for path in toy.path.rglob("*.*") if path.is_file()} == before


def test_statistics_of_shards_are_summed_wherever_they_are_nested(folder):
    def make(number, shard):
        shard.statistics = {"captions": {"de": {"tokens": 3 + number}, f"only {number}": 1}, "failed": 0.5}

    manifest = write_dataset(OutputDataset(folder, "captions", PARAMETERS, shards=2), make)
    assert manifest.statistics == {"captions": {"de": {"tokens": 7}, "only 0": 1, "only 1": 1}, "failed": 1.0}


@pytest.mark.parametrize("lost", [(), (1,)], ids=["complete", "resumed"])
def test_a_run_that_goes_on_reads_each_footer_once(copy_toy, monkeypatch, lost):
    toy = copy_toy("features")
    for number in lost:
        (toy.path / toy.output.name(number)).unlink()
    opened = Counter()
    opening = Folder.open
    monkeypatch.setattr(Folder, "open", lambda self, name: opened.update([name]) or opening(self, name))
    output = toy.output

    def make_missing(finished):
        before = dict(opened)
        assert {name: before.get(name, 0) for name in map(output.name, finished)} == dict.fromkeys(
            map(output.name, finished), 1
        )
        for number in range(3):
            if number not in finished:
                toy.write_shard(number)
        commit(output)

    complete_dataset(output, make_missing)
    # Before the run, and after one that wrote another.
    assert opened["_manifest.json"] == (2 if lost else 1)
    if not lost:
        assert {name: count for name, count in opened.items() if name.startswith("part-")} == {
            output.name(number): 1 for number in range(3)
        }
