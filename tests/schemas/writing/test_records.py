import dataclasses
import hashlib
import json

import pytest

from schemas.failures import FailuresEntry
from schemas.fingerprints import sha256_of_json
from schemas.footers import Footer
from schemas.manifest import ShardEntry
from schemas.writing.records import Record, Source, read_record, record_name, write_record

SHARD = "part-00001-of-00003.parquet"
STATISTICS = {"rows": 3, "listing": "ab", "names": {"ü": 1.5}}
ENTRY = ShardEntry(SHARD, 4711, "a" * 64, 3, "f" * 64)
FOOTER = Footer("features", "b" * 64, {}, STATISTICS, 3, FailuresEntry(2, 90, "9" * 64, {"truncated": 2}))
RECORD = Record.of(ENTRY, FOOTER)
SOURCES = (
    Source("猫", "photos/猫.jpg", 17, "1700000000000000001", "d" * 64),
    Source("a b", "photos/line\nbreak\u2028.jpg", 0, "", ""),
    Source("a", 'quote".jpg', -1, "etag", "e" * 64),
)
FULL = Record.of(ENTRY, FOOTER, "c" * 64, SOURCES)


def path(folder):
    return folder.local_path / ".records/part-00001-of-00003.jsonl"


def test_record_round_trip(folder):
    write_record(folder, SHARD, FULL)
    record = read_record(folder, SHARD, whole=True)
    assert dataclasses.replace(record, sources=None) == read_record(folder, SHARD)
    assert (record.bytes, record.sha256, record.version_digest) == (4711, "a" * 64, "c" * 64)
    assert record.sources == sorted(SOURCES)
    assert record_name(SHARD) == ".records/part-00001-of-00003.jsonl"
    assert folder.names() == [record_name(SHARD)]


def test_record_file_is_json_lines_sorted_by_image(folder):
    write_record(folder, SHARD, FULL)
    first, *lines = path(folder).read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line)[0] for line in lines] == ["a", "a b", "猫"]
    content = json.loads(first)
    assert content["format"] == "shard record 1"
    assert content["sources_sha256"] == hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    before = path(folder).read_bytes()
    write_record(folder, SHARD, Record.of(ENTRY, FOOTER, FULL.version_digest, SOURCES[::-1]))
    assert path(folder).read_bytes() == before


def test_record_matches_its_shard_alone(folder):
    assert RECORD.matches_shard(4711, STATISTICS)
    assert RECORD.matches_shard(4711, dict(reversed(STATISTICS.items())))
    for size, statistics in ((4712, STATISTICS), (None, STATISTICS), (4711, {**STATISTICS, "rows": 4})):
        assert not RECORD.matches_shard(size, statistics)
    write_record(folder, SHARD, FULL)
    record = read_record(folder, SHARD)
    assert record.as_footer(SHARD, 4711) == (ENTRY, FOOTER)
    for name, size in ((SHARD, 4712), (SHARD, None), ("part-00000-of-00003.parquet", 4711)):
        assert record.as_footer(name, size) is None


def test_long_first_line_is_read_whole(folder):
    long = Record.of(ENTRY, dataclasses.replace(FOOTER, statistics={"names": "x" * 200_000}))
    write_record(folder, SHARD, dataclasses.replace(long, sources=SOURCES))
    whole = read_record(folder, SHARD, whole=True)
    assert read_record(folder, SHARD) == dataclasses.replace(whole, sources=None)


@pytest.mark.slow
@pytest.mark.parametrize("written", [RECORD, FULL], ids=["alone", "with sources"])
@pytest.mark.parametrize("mask", [0x20, *(pytest.param(mask, marks=pytest.mark.cluster) for mask in (0x01, 0x80, 0xFF))])
def test_read_record_damaged_byte_is_none(folder, mask, written):
    write_record(folder, SHARD, written)
    data, record = path(folder).read_bytes(), read_record(folder, SHARD)
    end = data.index(b"\n")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        path(folder).write_bytes(damaged)
        # The first line is read alone where the sources do not matter, and stands for itself.
        assert read_record(folder, SHARD) in ((None, record) if position <= end else (record,)), position
        assert read_record(folder, SHARD, whole=True) is None, position


@pytest.mark.slow
@pytest.mark.parametrize("written", [RECORD, FULL], ids=["alone", "with sources"])
def test_read_record_cut_anywhere_is_none(folder, written):
    write_record(folder, SHARD, written)
    data, record = path(folder).read_bytes(), read_record(folder, SHARD)
    for size in range(len(data)):
        path(folder).write_bytes(data[:size])
        assert read_record(folder, SHARD) == (record if size > data.index(b"\n") else None)
        # Without sources nothing is lost with the last line end.
        whole = dataclasses.replace(record, sources=[]) if size == len(data) - 1 and not written.sources else None
        assert read_record(folder, SHARD, whole=True) == whole


def test_read_record_other_format_is_none(folder):
    write_record(folder, SHARD, RECORD)
    content = {**json.loads(path(folder).read_text(encoding="utf-8")), "format": "shard record 2"}
    del content["record_sha256"]
    path(folder).write_text(json.dumps({**content, "record_sha256": sha256_of_json(content)}) + "\n", encoding="utf-8")
    assert read_record(folder, SHARD) is None
