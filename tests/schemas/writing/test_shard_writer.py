import hashlib
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.failures import FailuresEntry, failures_name, parse_failures
from schemas.features import FeatureSpec
from schemas.fingerprints import canonical_json
from schemas.footers import inspect_shard
from schemas.kinds import CAPTIONS, FAILURES, schema_of
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import open_shard

NAME = "part-00000-of-00001.parquet"
FAILED = "_failures/part-00000-of-00001.jsonl"
RECORD = ".records/part-00000-of-00001.jsonl"
PARAMETERS = {"tokenizer": "moses", "ü": [1, 2.5, None]}


def write(folder, tables, kind="captions", parameters=PARAMETERS, *, statistics=None, failures=()):
    with open_shard(OutputDataset(folder, kind, parameters), 0) as shard:
        for table in tables:
            shard.write(table)
        shard.add_failures(failures)
        shard.statistics = statistics or {}


def write_captions(folder, rows, **kwargs):
    write(folder, [pa.Table.from_pylist(rows, schema=CAPTIONS)], **kwargs)


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


POOL = FeatureSpec(name="pool", shape=(2048,))


def features(spec, count):
    schema = schema_of("features", spec)
    values = np.random.default_rng(3).standard_normal((count, spec.width), dtype=np.float32).astype(spec.dtype)
    feature = pa.FixedSizeListArray.from_arrays(values.ravel(), type=schema.field("feature").type)
    return pa.table({"image_id": [f"{n:06d}" for n in range(count)], "feature": feature}, schema=schema)


# --- what a shard holds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["captions", "encoded", "vocabulary", "features", "regions"])
def test_footer_of_every_kind(toys, kind):
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


@pytest.mark.parametrize(
    ("rows", "more", "error", "match"),
    [
        (
            pa.Table.from_pylist([{**row, "text": None} for row in many_captions(2)], schema=CAPTIONS),
            *({}, ValueError, r"'text' .*non-nullable but contains nulls"),
        ),
        (CAPTIONS.empty_table(), {"statistics": {"mean": float("nan")}}, ValueError, "not JSON compliant"),
    ],
)
def test_open_shard_invalid_rows_write_nothing(folder, rows, more, error, match):
    with pytest.raises(error, match=match):
        write(folder, [rows], **more)
    assert folder.names() == []


# --- layout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [
        *(("features", size, [512, 512, 76]) for size in (1, 33, 512, 513, 999)),
        *(("captions", size, [1000]) for size in (1, 999)),
        pytest.param("many captions", 9_999, [65_536, 4_464], marks=pytest.mark.slow),
    ],
)
def test_bytes_do_not_depend_on_batches(folder, kind, size, groups):
    if kind == "features":
        table, parameters = features(POOL, sum(groups)), {"feature": POOL.to_json()}
    else:
        table, parameters = pa.Table.from_pylist(many_captions(sum(groups)), schema=CAPTIONS), PARAMETERS
    write(folder, [table], kind.split()[-1], parameters)
    whole = folder.read(NAME)
    write(folder, table.to_batches(max_chunksize=size), kind.split()[-1], parameters)
    assert folder.read(NAME) == whole
    metadata = pq.read_metadata(folder.local_path / NAME)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == groups
    stored = pq.ParquetFile(folder.local_path / NAME).read()
    assert stored.unify_dictionaries().equals(table.unify_dictionaries())


def test_bytes_do_not_depend_on_input_dictionaries_and_nullability(folder):
    # Rows cut from a larger table bring its dictionary along, in the order in which that table met the labels.
    rows = many_captions(1000)
    larger = pa.Table.from_pylist([*reversed(rows), *rows], schema=CAPTIONS)
    assert larger["split"].chunk(0).dictionary.to_pylist() == ["val", "train"]
    loose = pa.Table.from_pylist(rows, schema=pa.schema([pa.field(f.name, f.type) for f in CAPTIONS]))
    written = set()
    for table in (larger.slice(1000), loose, pa.Table.from_pylist(rows, schema=CAPTIONS)):
        write(folder, [table])
        written.add(folder.read(NAME))
    assert len(written) == 1


# --- whole or not at all ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_open_shard_failure_keeps_the_old_shard(folder):
    def failing():
        yield pa.Table.from_pylist(many_captions(70_000), schema=CAPTIONS)
        raise ZeroDivisionError("in the middle")

    write_captions(folder, many_captions(5))
    before = folder.read(NAME)
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        write(folder, failing())
    assert folder.names() == [RECORD, NAME]
    assert folder.read(NAME) == before


# --- failures --------------------------------------------------------------------------------------------------------


def failures_in(folder):
    return [json.loads(line) for line in folder.read(FAILED).decode().splitlines()]


def failure(key, reason="truncated"):
    return {"key": key, "uri": f"{key}.jpg", "stage": "decode", "reason": reason, "message": f"«{key}»"}


@pytest.mark.parametrize("order", ["cab", "bac", "abc"])
def test_failures_lie_sorted_beside_their_shard(folder, order):
    failures = [failure(key, "empty" if key == "a" else "truncated") for key in order]
    write_captions(folder, many_captions(3), failures=failures)
    assert folder.names() == [RECORD, FAILED, NAME]
    assert failures_name(NAME) == FAILED
    assert failures_in(folder) == sorted(failures, key=lambda row: row["key"])
    assert parse_failures(folder.read(FAILED), FAILED).to_pylist() == failures_in(folder)
    assert parse_failures(folder.read(FAILED), FAILED).schema.equals(FAILURES)
    data = folder.read(FAILED)
    entry = FailuresEntry(3, len(data), hashlib.sha256(data).hexdigest(), {"truncated": 2, "empty": 1})
    assert inspect_shard(folder, NAME).failures == entry


def test_retry_without_failures_removes_those_of_the_first_try(folder):
    write_captions(folder, many_captions(3), failures=[failure("a")])
    write_captions(folder, many_captions(3), failures=[])
    assert folder.names() == [RECORD, NAME]
    assert inspect_shard(folder, NAME).failures == FailuresEntry()
