from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.footers import FOREIGN, inspect_shard
from tests.schemas.writing.test_shard_writer import NAME, many_captions, write_captions


def test_truncated_shard_and_other_files_have_no_footer(folder):
    write_captions(folder, many_captions(100))
    data = folder.read(NAME)
    cut = (data[:size] for size in (0, 1, 4, len(data) // 2, -8, -4, -1))
    for content in (*cut, b"hello", b"PAR1" * 100, bytes(500)):
        folder.put(NAME, content)
        assert inspect_shard(folder, NAME) is None
    pq.write_table(pa.table({"a": [1]}), folder.local_path / NAME)
    assert inspect_shard(folder, NAME) is FOREIGN


@pytest.mark.slow
def test_inspect_shard_any_footer_damage_returns_none(folder):
    write_captions(folder, many_captions(3))
    data = folder.read(NAME)
    footer = int.from_bytes(data[-8:-4], "little")
    outcomes = Counter()
    for position in range(len(data) - 8 - footer, len(data), 5):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        (folder.local_path / NAME).write_bytes(damaged)
        outcomes[inspect_shard(folder, NAME) in (None, FOREIGN)] += 1
    assert outcomes[True] > 100  # Where it is found; a byte of a description, say, does no harm.


def test_changed_footer_version_is_damage(folder):
    write_captions(folder, many_captions(3))
    data = folder.read(NAME)
    position = data.index(b"2", data.index(b"imagepivot.version"))
    for version in b"0134":
        damaged = bytearray(data)
        damaged[position] = version
        (folder.local_path / NAME).write_bytes(damaged)
        assert pq.read_metadata(folder.local_path / NAME).metadata[b"imagepivot.version"] == bytes([version])
        assert inspect_shard(folder, NAME) is None
