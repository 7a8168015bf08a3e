"""Small files that take gigabytes once they are read: each ends within the memory that SECURITY.md states."""

from __future__ import annotations

import ast
import gzip
import hashlib
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

from extractors.images.decoding import decode_image
from pipelines.inputs.dialects import split_rows
from pipelines.inputs.files import iter_json
from schemas import text
from schemas.errors import DatasetError, InputError
from schemas.features import FeatureSpec
from schemas.footers import ShardRows
from schemas.storage.folder import Folder
from schemas.text import MAX_LINE, read_line
from tests.builders import sign, write_rows
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
_TABLE = "from pipelines.inputs.captions.base import EVERYTHING\nfrom pipelines.inputs.captions.opening import open_captions\n"
_TABLE += "def read(source): return sum(1 for part in source.parts(EVERYTHING) for _ in source.read(part, EVERYTHING))"
_CAPTIONS = "read(open_captions('table', path))"
_VECTORS = "from schemas.vector_files import read_vector_file"
_WORDS = "read_vector_file(path, ['a'], expected='').words"
_NO_ENDS = "more than 64 MiB, expected line ends"


def write_gzip(path, head: bytes, mib: int, unit: bytes = b"x", tail: bytes = b"") -> None:
    """Write a gzip file of a head, a unit that fills so many MiB, and a tail."""
    block = gzip.compress(unit * ((16 << 20) // len(unit)), 1)
    path.write_bytes(gzip.compress(head) + block * (mib // 16) + gzip.compress(tail))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "unit", "imports", "call", "message"),
    [
        ("a.en.gz", b"a\nb\n", b"x", _LINES, _LONGEST, f"line 3: {_NO_ENDS}"),
        ("a.vec.gz", b"a 1 2\nb", b" 1", _VECTORS, _WORDS, f"line 2: {_NO_ENDS}"),
        ("c.tsv.gz", b"image_id\tlanguage\ttext\na\ten\t", b"x", _TABLE, _CAPTIONS, f"line 2: {_NO_ENDS}"),
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
_DOTS = "not TOML: a line has more than 500 dots: write lists and tables on several lines"
_PARSED = "len(parse_toml(Path(path).read_text()))"
_JSON = _FOLDER + "from pipelines.inputs.files import iter_json"
_ITEMS = "len(list(iter_json(Folder(str(Path(path).parent)), Path(path).name, prefix='images.item', form='a list')))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a." * 20_000 + "b = 1", _DOTS),
        ("[" + "a." * 20_000 + "b]", _DOTS),
        ("x = {" + "'='." * 20_000 + "b = 1}", _DOTS),
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


@pytest.mark.slow
def test_long_string_of_json_is_an_error(tmp_path):
    with gzip.open(tmp_path / "a.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"images": [{"text": "short"},\n{"text": "')
        for _ in range(80):
            file.write(b"a" * (1 << 20))
        file.write(b'"}]}')
    ended = run_limited(_JSON, _ITEMS, tmp_path / "a.json.gz", mib=256)
    path = str(tmp_path / "a.json.gz")
    assert ended == f"InputError {path!r} has a string of more than 64 MiB after line 2: fetch it again"


def test_brackets_in_strings_are_no_depth(tmp_path):
    texts = ["[[{" * 40, '\\"[', '"{', "\\", '[\\\\"', "]" * 200, "ö[" * 90]
    images = [{"text": texts[number % len(texts)]} for number in range(30_000)]
    nested: list = []
    for _ in range(97):
        nested = [nested]
    (tmp_path / "a.json").write_text(json.dumps({"images": [*images, nested]}))
    assert [item for _, item in iter_json(Folder(str(tmp_path)), "a.json", prefix="images.item", form="a list")] == [
        *images,
        nested,
    ]
    (tmp_path / "a.json").write_text(json.dumps({"images": [*images, [nested]]}))
    with pytest.raises(InputError, match="nests more than 100 lists and objects after line 1: fetch it again"):
        list(iter_json(Folder(str(tmp_path)), "a.json", prefix="images.item", form="a list"))


# --- images ----------------------------------------------------------------------------------------------------------

_IMAGE = (
    "from extractors.images.decoding import decode_image\nfrom PIL import Image, TiffImagePlugin, WebPImagePlugin\nImage.init()"
)
_SIZE = "decode_image(Path(path).read_bytes()).size"


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
    np.testing.assert_array_equal(np.asarray(decode_image(file.getvalue())), np.stack([grey] * 3, axis=-1))


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


# --- shards of datasets ----------------------------------------------------------------------------------------------

_DATASETS = """
from pipelines.datasets.comparison import compare_datasets
from pipelines.jobs import DiffJob
from schemas.dataset import open_dataset
from schemas.errors import ImagepivotError
from schemas.writing.validation import validate

def outcome(call):
    try:
        return str(call())
    except ImagepivotError as error:
        return str(error)
"""
_LABELS = {"language": "de", "portion": "comparable", "index": 0, "split": "train"}
_LONG = "x" * 20_000
_CAPTION = {"image_id": "a", **_LABELS, "text": "x", "tokens": ["x"]}
_REFUSED = "takes more than 256 MiB of memory (256 MiB and 16 times its size): do not use data of an unknown author; split"
_SHARD = "part-00000-of-00001.parquet"


def write_expanding(path, kind, row, spec=None, *, rows, parts, **options):
    """Write a dataset whose shard has rows times parts copies of a row, with the sizes and digests of its manifest."""
    write_rows(path, kind, [row], spec)
    part = pa.concat_tables([pq.read_table(path / _SHARD)] * rows).combine_chunks()
    table = pa.concat_tables([part] * parts)
    options = {"compression": "zstd", "row_group_size": rows * parts, "dictionary_pagesize_limit": 1 << 30, **options}
    pq.write_table(table, path / _SHARD, version="2.6", **options)
    data = (path / _SHARD).read_bytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") :]
    sizes = {"bytes": len(data), "rows": rows * parts, "sha256": hashlib.sha256(data).hexdigest()}
    manifest = json.loads((path / "_manifest.json").read_text())
    manifest["shards"] = [{**manifest["shards"][0], **sizes, "footer_sha256": hashlib.sha256(footer).hexdigest()}]
    (path / "_manifest.json").write_text(json.dumps(sign(manifest)))
    assert len(data) < 2 << 20


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("kind", "row", "spec", "rows", "calls"),
    [
        ("captions", {**_CAPTION, "text": _LONG}, None, 1000, (".table()", ".rows('a')", "[0]")),
        ("captions", {**_CAPTION, "tokens": [_LONG] * 100}, None, 10, (".table()", ".get('a')", ".shard(0, ['tokens'])")),
        ("encoded", {"image_id": _LONG, **_LABELS, "token_ids": [1, 2], "length": 2}, None, 1000, (".table()",)),
        ("vocabulary", {"id": 0, "token": "x", "count": 1, "counts": [(_LONG, 1)]}, None, 1000, (".table()", ".vocabulary()")),
        (
            *("features", {"image_id": _LONG, "feature": np.zeros(1, np.float32)}, FeatureSpec("zeros", (1,)), 1000),
            (".table()", "[0]", ".rows('b')"),
        ),
        (
            *("features", {"image_id": "a", "feature": np.zeros(5000, np.float32)}, FeatureSpec("zeros", (5000,)), 1000),
            (".table()", "[0]", ".rows('a')", ".numpy()"),
        ),
    ],
)
def test_shard_that_expands_is_an_error(tmp_path, kind, row, spec, rows, calls):
    """Dictionaries have one value of 20 KB, and the shards refer to it 50,000 times: 1 GB in some KB."""
    write_expanding(tmp_path / "d", kind, row, spec, rows=rows, parts=50)
    path, data = tmp_path / "d", "open_dataset(path)"
    calls = [*(data + call for call in calls), "validate(path)"]
    calls += ["compare_datasets(DiffJob(path, path))"] if kind == "captions" else []
    outcomes = ", ".join(f"outcome(lambda: {call})" for call in [*calls, f"sum(map(len, {data}.batches()))"])
    *ended, of_batches = ast.literal_eval(run_limited(_DATASETS, f"[{outcomes}]", path, mib=400))
    for call, message in zip(calls, ended, strict=True):
        assert _REFUSED in message or ("numpy" in call and "cannot hold 50,000 rows in" in message), (call, message)
        assert str(path / _SHARD) in message
    assert of_batches == "50000" or _REFUSED in of_batches


@pytest.mark.cluster
def test_shard_at_the_limit_takes_its_stated_memory(tmp_path):
    """Text of 240 MB is read as dictionaries of 10 KB and expanded once."""
    write_expanding(tmp_path, "captions", {**_CAPTION, "text": _LONG}, rows=1000, parts=12)
    assert run_limited(_DATASETS, "open_dataset(path).table().num_rows", tmp_path, mib=768) == "12000"
    assert "comes before" not in run_limited(_DATASETS, "validate(path)", tmp_path, mib=768)


def test_many_row_groups_exceed_the_limit_together(tmp_path, monkeypatch):
    monkeypatch.setattr("schemas.footers._MIN_LIMIT", 64 << 10)
    table = pa.table({"text": ["x" * 10_000 + str(number % 10) for number in range(4000)]})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=40, compression="zstd")
    source = pa.memory_map(str(tmp_path / "x.parquet"))
    shard = ShardRows(source, "x.parquet")
    assert pa.Table.from_batches(shard.batches(batch_size=40)).equals(table)
    assert shard.read(groups=[0]).equals(table[:40])
    with pytest.raises(DatasetError, match=r"x\.parquet takes more than 0 MiB of memory"):
        shard.read()


# --- tables and arrays -----------------------------------------------------------------------------------------------


@pytest.mark.cluster
@pytest.mark.parametrize("column", ["image_id", "text"])
def test_table_that_expands_is_an_error(tmp_path, column):
    """2,048 rows, a batch, refer to a text of 1 MB: 2 GB in some KB."""
    row = {"image_id": "a", "language": "en", "text": "x", column: "x" * 1_000_000}
    part = pa.Table.from_pylist([row] * 20)
    pq.write_table(pa.concat_tables([part] * 200), tmp_path / "c.parquet", dictionary_pagesize_limit=1 << 30)
    ended = run_limited(_TABLE, _CAPTIONS, tmp_path / "c.parquet", mib=400)
    assert ended.startswith(f"DatasetError {tmp_path / 'c.parquet'} takes more than 25")


@pytest.mark.cluster
@pytest.mark.parametrize("has_paths", [False, True])
def test_image_ids_that_expand_are_an_error(tmp_path, has_paths):
    """Ids, or the paths of images, are one text of 1 MB in 4,000 rows."""
    ids = ["x" * 1_000_000] * 20
    part = pa.table({"image_id": ids, "image": [b"x"] * 20})
    if has_paths:
        part = pa.table({"image": [{"bytes": b"x", "path": path} for path in ids]})
    pq.write_table(pa.concat_tables([part] * 200), tmp_path / "x.parquet", dictionary_pagesize_limit=1 << 30)
    ended = run_limited(_PARQUET, "read(path)", tmp_path, mib=400)
    assert ended.startswith(f"DatasetError {tmp_path / 'x.parquet'} takes more than 25")
