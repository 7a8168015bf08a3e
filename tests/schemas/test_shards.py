import json
import os
import signal
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.features import FeatureSpec
from schemas.fingerprints import Identity, canonical_json
from schemas.kinds import CAPTIONS, FAILURES, VOCABULARY, features_schema
from schemas.shards import failures_name, finished_shard, read_footer, shard_entry, write_shard
from schemas.storage import Folder

NAME = "part-00000-of-00001.parquet"
IDENTITY = Identity(kind="captions", parameters={"tokenizer": "moses", "ü": [1, 2.5, None]})


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path / "data"))


def write_captions(folder, rows, *, size=None, name=NAME, **kwargs):
    size = size or max(1, len(rows))
    tables = (pa.Table.from_pylist(rows[i : i + size], schema=CAPTIONS) for i in range(0, len(rows), size))
    write_shard(folder, name, tables, schema=CAPTIONS, identity=IDENTITY, **kwargs)


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
        assert ours == {
            "imagepivot.version": "1",
            "imagepivot.kind": toy.kind,
            "imagepivot.fingerprint": toy.identity.fingerprint,
            "imagepivot.parameters": canonical_json(toy.identity.parameters),
            "imagepivot.statistics": f'{{"rows_written":{len(toy.shard(number))}}}',
        }


def test_a_footer_is_read_again(folder):
    write_captions(folder, many_captions(5), statistics={"tokens": {"de": 3}})
    footer = read_footer(folder, NAME)
    assert (footer.kind, footer.fingerprint, footer.rows) == ("captions", IDENTITY.fingerprint, 5)
    assert footer.parameters == {"tokenizer": "moses", "ü": [1, 2.5, None]}
    assert footer.statistics == {"tokens": {"de": 3}}


def test_statistics_may_be_filled_while_rows_are_written(folder):
    statistics = Counter()

    def tables():
        for _ in range(3):
            statistics["tables"] += 1
            yield pa.Table.from_pylist(many_captions(2), schema=CAPTIONS)

    write_shard(folder, NAME, tables(), schema=CAPTIONS, identity=IDENTITY, statistics=statistics)
    assert read_footer(folder, NAME).statistics == {"tables": 3}


def test_statistics_that_json_cannot_hold_write_nothing(folder):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_captions(folder, many_captions(2), statistics={"mean": float("nan")})
    assert folder.names() == []


def test_a_shard_without_rows(folder):
    write_captions(folder, [])
    table = pq.ParquetFile(folder.local_path / NAME).read()
    assert table.num_rows == 0
    assert table.schema.equals(CAPTIONS)
    assert finished_shard(folder, NAME, IDENTITY).rows == 0


def test_rows_of_another_schema_write_nothing(folder):
    rows = pa.table({"image_id": ["a"], "text": ["b"]})
    with pytest.raises(ValueError, match="field names"):
        write_shard(folder, NAME, [rows], schema=CAPTIONS, identity=IDENTITY)
    assert folder.names() == []


def test_nulls_write_nothing(folder):
    rows = pa.Table.from_pylist([{**row, "text": None} for row in many_captions(2)], schema=CAPTIONS)
    with pytest.raises(ValueError, match=r"'text' .*non-nullable but contains nulls"):
        write_shard(folder, NAME, [rows], schema=CAPTIONS, identity=IDENTITY)
    assert folder.names() == []


# --- layout ----------------------------------------------------------------------------------------------------------


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
    write_shard(folder, NAME, table.to_batches(max_chunksize=96), schema=schema, identity=IDENTITY)
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
    write_captions(folder, rows, name="whole")
    write_captions(folder, rows, size=size, name="parts")
    assert folder.read("parts") == folder.read("whole")
    assert pq.ParquetFile(folder.local_path / "parts").read().to_pylist() == rows


def test_bytes_do_not_depend_on_dictionaries(folder):
    # Rows cut from a larger table bring its dictionary along, in the order in which that table met the labels.
    rows = many_captions(1000)
    larger = pa.Table.from_pylist([*reversed(rows), *rows], schema=CAPTIONS)
    assert larger["split"].chunk(0).dictionary.to_pylist() == ["val", "train"]
    write_shard(folder, "cut", [larger.slice(1000)], schema=CAPTIONS, identity=IDENTITY)
    write_captions(folder, rows, name="whole")
    assert folder.read("cut") == folder.read("whole")


def test_bytes_do_not_depend_on_nullability_of_what_arrives(folder):
    rows = many_captions(10)
    loose = pa.schema([pa.field(f.name, f.type) for f in CAPTIONS])
    write_shard(folder, "loose", [pa.Table.from_pylist(rows, schema=loose)], schema=CAPTIONS, identity=IDENTITY)
    write_captions(folder, rows, name="strict")
    assert folder.read("loose") == folder.read("strict")


@pytest.mark.parametrize("size", [1, 33, 512, 513, 1023])
def test_bytes_of_features_do_not_depend_on_batches(folder, size):
    spec = FeatureSpec(name="pool", shape=(2048,))
    schema = features_schema(spec)
    values = np.random.default_rng(5).standard_normal((1100, 2048), dtype=np.float32)
    feature = pa.FixedSizeListArray.from_arrays(values.ravel(), type=schema.field("feature").type)
    table = pa.table({"image_id": [f"{n:06d}" for n in range(1100)], "feature": feature}, schema=schema)
    write_shard(folder, "whole", [table], schema=schema, identity=IDENTITY)
    write_shard(folder, "parts", table.to_batches(max_chunksize=size), schema=schema, identity=IDENTITY)
    assert folder.read("parts") == folder.read("whole")


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
    for name, size in (("whole", count), ("parts", 9_999)):
        write_shard(folder, name, table.to_batches(max_chunksize=size), schema=VOCABULARY, identity=IDENTITY)
    assert folder.read("parts") == folder.read("whole")
    metadata = pq.read_metadata(folder.local_path / "parts")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [65_536, 65_536, 8_928]
    assert pq.ParquetFile(folder.local_path / "parts").read().equals(table)


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

    write_shard(folder, NAME, tables(), schema=schema, identity=IDENTITY)
    for taken, size in enumerate(sizes):
        assert size >= taken // 4 * (4 << 20)


# --- whole or not at all ---------------------------------------------------------------------------------------------


def failing(rows):
    yield pa.Table.from_pylist(rows, schema=CAPTIONS)
    raise ZeroDivisionError("in the middle")


def test_a_writer_that_fails_leaves_nothing(folder):
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        write_shard(folder, NAME, failing(many_captions(70_000)), schema=CAPTIONS, identity=IDENTITY, failures=[])
    assert folder.names() == []


def test_a_writer_that_fails_leaves_the_shard_that_was_there(folder):
    write_captions(folder, many_captions(5))
    before = folder.read(NAME)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        write_shard(folder, NAME, failing(many_captions(9)), schema=CAPTIONS, identity=IDENTITY)
    assert folder.names() == [NAME]
    assert folder.read(NAME) == before


KILLED = """
import sys
import numpy as np, pyarrow as pa
from schemas.features import FeatureSpec
from schemas.fingerprints import Identity
from schemas.kinds import features_schema
from schemas.shards import write_shard
from schemas.storage import Folder

schema = features_schema(FeatureSpec(name="pool", shape=(2048,)))

def tables():
    feature = pa.FixedSizeListArray.from_arrays(np.zeros(600 * 2048, np.float32), type=schema.field("feature").type)
    yield pa.table({"image_id": [f"{n:06d}" for n in range(600)], "feature": feature}, schema=schema)
    print("ready", flush=True)
    sys.stdin.read()

write_shard(Folder(sys.argv[1]), sys.argv[2], tables(), schema=schema, identity=Identity(kind="features", parameters={}))
"""


def test_a_killed_writer_leaves_only_a_temporary_file(folder, blocked_process):
    with blocked_process(KILLED, folder.location, NAME) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert folder.names() == [f".{NAME}.tmp-{process.pid}"]
    assert dict(folder.files())[f".{NAME}.tmp-{process.pid}"] > 4 << 20  # It was in the middle, not at the start.
    assert read_footer(folder, NAME) is None


# --- finished or not -------------------------------------------------------------------------------------------------


def test_a_shard_is_finished_for_its_own_identity_only(folder):
    write_captions(folder, many_captions(3))
    assert finished_shard(folder, NAME, IDENTITY).rows == 3
    assert finished_shard(folder, NAME, Identity(kind="captions", parameters={})) is None
    assert finished_shard(folder, "part-00001-of-00002.parquet", IDENTITY) is None


@pytest.mark.parametrize("kept", [0, 1, 4, 0.5, -8, -4, -1])
def test_a_truncated_shard_is_not_finished(folder, kept):
    write_captions(folder, many_captions(100))
    data = folder.read(NAME)
    size = round(len(data) * kept) if isinstance(kept, float) else kept
    (folder.local_path / NAME).write_bytes(data[:size])
    assert read_footer(folder, NAME) is None
    assert finished_shard(folder, NAME, IDENTITY) is None


@pytest.mark.parametrize("data", [b"hello", b"PAR1" * 100, bytes(500), b'{"format": "imagepivot"}'])
def test_other_bytes_are_no_shard(folder, data):
    folder.write(NAME, data)
    assert read_footer(folder, NAME) is None


def test_a_parquet_file_of_someone_else_is_no_shard(folder):
    folder.local_path.mkdir()
    pq.write_table(pa.table({"a": [1]}), folder.local_path / NAME)
    assert read_footer(folder, NAME) is None


def test_any_damage_to_a_footer_is_survived(folder):
    write_captions(folder, many_captions(3))
    data = folder.read(NAME)
    footer = int.from_bytes(data[-8:-4], "little")
    outcomes = Counter()
    for position in range(len(data) - 8 - footer, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        (folder.local_path / NAME).write_bytes(damaged)
        outcomes[read_footer(folder, NAME) is None] += 1
    assert outcomes[True] > 100  # Where it is found; a byte of a description, say, does no harm.


def test_an_entry_is_of_the_stored_bytes(folder):
    write_captions(folder, many_captions(3))
    entry = shard_entry(folder, NAME, read_footer(folder, NAME))
    assert (entry.path, entry.rows, entry.bytes) == (NAME, 3, (folder.local_path / NAME).stat().st_size)


# --- failures --------------------------------------------------------------------------------------------------------


def failure(key, reason="truncated"):
    return {"key": key, "uri": f"{key}.jpg", "stage": "decode", "reason": reason, "message": f"«{key}»"}


def test_failures_lie_beside_their_shard(folder):
    failures = [failure("c"), failure("a", "empty"), failure("b")]
    write_captions(folder, many_captions(3), failures=failures)
    assert folder.names() == [f"failures/{NAME}", NAME]
    assert failures_name(NAME) == f"failures/{NAME}"
    table = pq.ParquetFile(folder.local_path / "failures" / NAME).read()
    assert table.schema.equals(FAILURES)
    assert table.to_pylist() == sorted(failures, key=lambda row: row["key"])
    footer = pq.read_metadata(folder.local_path / "failures" / NAME).metadata
    assert footer[b"imagepivot.fingerprint"].decode() == IDENTITY.fingerprint
    assert json.loads(footer[b"imagepivot.statistics"]) == {"reasons": {"truncated": 2, "empty": 1}}


def test_bytes_of_failures_do_not_depend_on_their_order(folder):
    failures = [failure("c"), failure("a", "empty"), failure("b")]
    written = set()
    for order in (failures, failures[::-1], failures[1:] + failures[:1]):
        write_captions(folder, many_captions(3), failures=order)
        written.add(folder.read(f"failures/{NAME}"))
    assert len(written) == 1


def test_failures_are_published_before_their_shard(folder, monkeypatch):
    published = []
    publish = Folder._publish

    def record(self, temporary, name):
        published.append(name)
        publish(self, temporary, name)

    monkeypatch.setattr(Folder, "_publish", record)
    write_captions(folder, many_captions(3), failures=[failure("a")])
    assert published == [f"failures/{NAME}", NAME]


def test_no_shard_without_its_failures(folder):
    with pytest.raises(KeyError, match="key"):
        write_captions(folder, many_captions(3), failures=[{"uri": "no key"}])
    assert folder.names() == []


def test_a_retry_without_failures_removes_those_of_the_first_try(folder):
    write_captions(folder, many_captions(3), failures=[failure("a")])
    write_captions(folder, many_captions(3), failures=[])
    assert folder.names() == [NAME]


def test_failures_may_be_found_while_rows_are_written(folder):
    failures = []

    def tables():
        yield pa.Table.from_pylist(many_captions(2), schema=CAPTIONS)
        failures.append(failure("late"))

    write_shard(folder, NAME, tables(), schema=CAPTIONS, identity=IDENTITY, failures=failures)
    assert pq.ParquetFile(folder.local_path / "failures" / NAME).read()["key"].to_pylist() == ["late"]
