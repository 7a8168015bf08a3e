"""Small files that take gigabytes once they are read: each ends within the memory that SECURITY.md states."""

from __future__ import annotations

import ast
import gzip
import io
import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from extractors.images.decoding import decode
from pipelines.inputs.dialects import split_rows
from pipelines.inputs.files import iter_json
from pipelines.inputs.tables import Table
from schemas import text
from schemas.errors import InputError
from schemas.storage.folder import Folder
from schemas.text import MAX_LINE, read_line
from tests.sizes import ROOT

# Imports come first, so that the limit is that of reading.
_LIMITED = """
import resource, sys
from pathlib import Path
{imports}
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + ({mib} << 20), resource.RLIM_INFINITY))
path = sys.argv[1]
try:
    print({call})
except ImagepivotError as error:
    print(type(error).__name__, error)
"""
_IMPORTS = "from schemas.errors import ImagepivotError\n"


def run_limited(imports: str, call: str, path: object, mib: int) -> str:
    """Evaluate a call in a process with so much address space for it, and return its value or its error as text."""
    code = _LIMITED.format(imports=_IMPORTS + imports, call=call, mib=mib)
    environment = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- lines -----------------------------------------------------------------------------------------------------------

_FOLDER = "from schemas.storage.folder import Folder\n"
_LINES = _FOLDER + "from pipelines.inputs.files import read_lines"
_LONGEST = "max(map(len, read_lines(Folder(str(Path(path).parent)), Path(path).name)))"
_TABLE = "from pipelines.inputs.captions.base import EVERYTHING\nfrom pipelines.inputs.captions.opening import open_source\n"
_TABLE += "def read(source): return sum(1 for part in source.parts(EVERYTHING) for _ in source.read(part, EVERYTHING))"
_CAPTIONS = "read(open_source('table', path))"
_VECTORS = "from schemas.vector_files import read_vector_file"
_WORDS = "read_vector_file(path, ['a'], expected='').words"


def write_gzip(path, head: bytes, mib: int, unit: bytes = b"x", tail: bytes = b"") -> None:
    """Write a gzip file of a head, a unit that fills so many MiB, and a tail."""
    block = gzip.compress(unit * ((16 << 20) // len(unit)), 1)
    path.write_bytes(gzip.compress(head) + block * (mib // 16) + gzip.compress(tail))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "unit", "imports", "call", "message"),
    [
        ("a.en.gz", b"a\nb\n", b"x", _LINES, _LONGEST, "line 3: more than 64 MiB, expected line ends"),
        (
            "a.vec.gz",
            b"a 1 2\nb",
            b" 1",
            _VECTORS,
            _WORDS,
            "line 2: more than 64 MiB, expected line ends",
        ),
        (
            *("c.tsv.gz", b"image_id\tlanguage\ttext\na\ten\t", b"x", _TABLE, _CAPTIONS),
            "line 2: more than 64 MiB, expected line ends",
        ),
        (
            *("c.tsv.gz", b'image_id\tlanguage\ttext\na\ten\t"', b"x" * 65535 + b"\n", _TABLE, _CAPTIONS),
            "row 1 (line 2): more than 64 MiB: close quotes or give --quoting none",
        ),
        ("c.jsonl.gz", b'{"image_id": "a"}\n{', b" ", _TABLE, _CAPTIONS, "line 2: more than 64 MiB"),
    ],
)
def test_lines_of_gigabytes_in_small_gzip_are_errors(tmp_path, name, head, unit, imports, call, message):
    write_gzip(tmp_path / name, head, mib=2048, unit=unit)
    assert (tmp_path / name).stat().st_size < 20 << 20
    ended = run_limited(imports, call, tmp_path / name, mib=768)
    assert ended.startswith(f"InputError {str(tmp_path / name)!r}, {message}")


@pytest.mark.slow
def test_longest_line_takes_its_stated_memory(tmp_path):
    """One character beyond 16 bits, so that Python stores four bytes of each."""
    write_gzip(tmp_path / "a.en.gz", "😀".encode(), mib=48, tail=b"x" * ((16 << 20) - 4) + b"\nb\n")
    assert run_limited(_LINES, _LONGEST, tmp_path / "a.en.gz", mib=1024) == str(MAX_LINE - 3)


def test_read_line_of_exactly_the_maximum_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE", 4)
    (tmp_path / "a").write_bytes(b"abc\nabcd")
    with (tmp_path / "a").open("rb") as file:
        assert [read_line(file, 1, "a"), read_line(file, 2, "a"), read_line(file, 3, "a")] == [b"abc\n", b"abcd", b""]
    (tmp_path / "a").write_bytes(b"abc\nabcd\n")
    with (tmp_path / "a").open("rb") as file:
        assert read_line(file, 1, "a") == b"abc\n"
        with pytest.raises(InputError, match="'a', line 2: more than"):
            read_line(file, 2, "a")


def test_rows_over_many_lines_count_their_own_lines_only(monkeypatch):
    monkeypatch.setattr("pipelines.inputs.dialects.MAX_LINE", 14)
    lines = ["id\ttext", *(f'{number}\t"a\nb"' for number in range(9))]
    rows = list(split_rows(enumerate("\n".join(lines).split("\n"), 1), "\t", "rfc4180", "c.tsv"))
    assert rows[1:] == [(2 + 2 * number, [str(number), "a\nb"]) for number in range(9)]
    with pytest.raises(InputError, match=r"'c.tsv', row 1 \(line 2\): more than 0 MiB: close quotes or give --quoting none"):
        list(split_rows(enumerate(["id\ttext", '0\t"a', "", "", *"abcdef"], 1), "\t", "rfc4180", "c.tsv"))


# --- TOML and JSON ---------------------------------------------------------------------------------------------------

_TOML = "from schemas.conversion import parse_toml"
_PARSED = "len(parse_toml(Path(path).read_text()))"
_JSON = _FOLDER + "from pipelines.inputs.files import iter_json"
_ITEMS = "len(list(iter_json(Folder(str(Path(path).parent)), Path(path).name, prefix='images.item')))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a." * 20_000 + "b = 1", "not TOML: a line has more than 500 dots: write lists and tables on several lines"),
        ("[" + "a." * 20_000 + "b]", "not TOML: a line has more than 500 dots: write lists and tables on several lines"),
        (
            "x = {" + "'='." * 20_000 + "b = 1}",
            "not TOML: a line has more than 500 dots: write lists and tables on several lines",
        ),
        ("a = 1\n" * 50_000, "not TOML: it has 300,000 characters, expected at most 262,144: write several files"),
    ],
)
def test_large_toml_is_an_error(tmp_path, content, message):
    (tmp_path / "a.toml").write_text(content)
    assert run_limited(_TOML, _PARSED, tmp_path / "a.toml", mib=512) == f"UsageError {message}"


@pytest.mark.slow
def test_worst_valid_toml_takes_its_stated_memory(tmp_path):
    lines = ["".join([f"b{number}.", "a." * 498, "b = 1"]) for number in range(260)]
    (tmp_path / "a.toml").write_text("\n".join(lines))
    assert run_limited(_TOML, _PARSED, tmp_path / "a.toml", mib=512) == "260"


@pytest.mark.slow
@pytest.mark.parametrize("opening", ["[", '{"":', '["]",', '["\\"]",', '["\\\\",'])
def test_deep_json_is_an_error(tmp_path, opening):
    """Brackets in strings do not hide the depth, also where a chunk ends in a string."""
    head = '{"images": [' + '{"text": "]]]]"},' * 20_000 + "\n"
    (tmp_path / "a.json").write_text(head + opening * 40_000)
    ended = run_limited(_JSON, _ITEMS, tmp_path / "a.json", mib=256)
    assert ended.startswith(f"InputError {str(tmp_path / 'a.json')!r} nests more than 100 lists and objects after line ")


def test_brackets_in_strings_are_no_depth(tmp_path):
    texts = ["[[{" * 40, '\\"[', '"{', "\\", '[\\\\"', "]" * 200, "ö[" * 90]
    images = [{"text": texts[number % len(texts)]} for number in range(30_000)]
    nested: list = []
    for _ in range(97):
        nested = [nested]
    (tmp_path / "a.json").write_text(json.dumps({"images": [*images, nested]}))
    assert list(iter_json(Folder(str(tmp_path)), "a.json", prefix="images.item")) == [*images, nested]
    (tmp_path / "a.json").write_text(json.dumps({"images": [*images, [nested]]}))
    with pytest.raises(InputError, match="nests more than 100 lists and objects after line 1: fetch it again"):
        list(iter_json(Folder(str(tmp_path)), "a.json", prefix="images.item"))


def test_deep_json_line_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"image_id": "a", "text": ' + "[" * 200_000 + "]" * 200_000 + "}\n")
    with pytest.raises(InputError, match=r"a\.jsonl', line 1: not JSON, "):
        list(Table(Folder(str(tmp_path)), "a.jsonl", ("image_id", "text"), ("image_id", "text")).rows())


# --- images ----------------------------------------------------------------------------------------------------------

_IMAGE = "from extractors.images.decoding import decode\nfrom PIL import Image, TiffImagePlugin, WebPImagePlugin\nImage.init()"
_SIZE = "decode(Path(path).read_bytes()).size"


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "mode", "size", "options"),
    [
        ("PNG", "I;16", (13376, 13376), {"compress_level": 1}),
        ("TIFF", "I", (13376, 13376), {"compression": "tiff_deflate"}),
        ("WEBP", "RGB", (16383, 10920), {"method": 0}),
    ],
)
def test_images_at_the_limit_of_pixels_take_their_stated_memory(tmp_path, kind, mode, size, options):
    Image.new(mode, size).save(tmp_path / "image", kind, **options)
    assert (tmp_path / "image").stat().st_size < 4 << 20
    assert run_limited(_IMAGE, _SIZE, tmp_path / "image", mib=3072) == str(size)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 2_000_000), (2_000_000, 3), (1024, 1024), (1025, 1023)])
@pytest.mark.parametrize("inverted", [False, True])
def test_grey_of_16_bits_over_several_blocks_is_rounded_to_the_nearest(shape, inverted):
    values = np.random.default_rng(0).integers(0, 65536, shape, dtype=np.uint16)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "TIFF", tiffinfo={262: int(not inverted)})
    grey = np.rint((65535.0 - values if inverted else values) / 257)
    np.testing.assert_array_equal(np.asarray(decode(file.getvalue())), np.stack([grey] * 3, axis=-1))


# --- Parquet ---------------------------------------------------------------------------------------------------------

_PARQUET = (
    _FOLDER
    + """
from pipelines.inputs.images.archives import ImagesInParquet
from pipelines.inputs.images.base import SkippedFiles

def read(path):
    source, sizes, failed = ImagesInParquet(Folder(path)), set(), 0
    for ref in source.refs():
        try:
            sizes.add(len(source.read(ref)))
        except OSError as error:
            failed += 1
            message = error.strerror
    return sizes, failed, message
"""
)


@pytest.mark.slow
def test_row_group_that_expands_gives_failures(tmp_path):
    """A dictionary has one image of 100 KB, and 20,000 rows that refer to it: 2 GB in 100 KB."""
    column = pa.chunked_array([pa.array([bytes(100_000)] * 1000)] * 20)
    table = pa.table({"image_id": [f"i{number}" for number in range(20_000)], "image": column})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=20_000, dictionary_pagesize_limit=1 << 30)
    assert (tmp_path / "x.parquet").stat().st_size < 1 << 20
    sizes, failed, message = ast.literal_eval(run_limited(_PARQUET, "read(path)", tmp_path, mib=1536))
    assert sizes == {100_000}
    assert 17_000 < failed < 20_000
    assert "a row group is far larger than the file" in message
