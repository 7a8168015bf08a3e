"""A large table that several workers read: the ranges together are the table, and errors are those of the whole."""

from __future__ import annotations

import gzip
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs import tables
from pipelines.inputs.captions.base import EVERYTHING, Part, Selection
from pipelines.inputs.captions.opening import open_captions
from pipelines.inputs.files import read_lines
from pipelines.inputs.tables import InputTable
from schemas.errors import InputError
from schemas.storage.folder import Folder

WORDS = ["a", 'b"c', "", " ", "é", "中文", "\u2028", "NA", "x" * 40]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(tables, "RANGE_BYTES", 300)
    monkeypatch.setattr(tables, "_CHUNK", 7)
    monkeypatch.setattr(tables, "_BATCH_ROWS", 5)
    yield
    tables._table_ranges.cache_clear()


def ranges_of(folder, name: str) -> list[tuple[int, int]]:
    return InputTable(Folder(str(folder)), name, (), ()).ranges()


def rows_of(seed: int, count: int = 150) -> list[dict[str, str]]:
    generator = random.Random(seed)
    return [
        {"image_id": str(generator.randrange(30)), "text": " ".join(["t", *generator.choices(WORDS, k=generator.randrange(6))])}
        for _ in range(count)
    ]


def write(path, rows, *, end="\n", start=""):
    lines = [start]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
        return path
    if path.suffix == ".jsonl":
        lines += [json.dumps(row) + end + (end if number % 9 == 0 else "") for number, row in enumerate(rows)]
    else:
        delimiter = {".csv": ",", ".tsv": "\t"}[path.suffix]
        lines += [f"image_id{delimiter}text{end}", *(f"{row['image_id']}{delimiter}{row['text']}{end}" for row in rows)]
    path.write_bytes("".join(lines).encode())
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet"])
def test_table_ranges_hold_all_rows_in_order(tmp_path, name, start, end):
    rows = rows_of(seed=1)
    source = open_captions("table", write(tmp_path / name, rows, end=end, start=start))
    parts = source.parts(EVERYTHING)
    assert len(parts) > 10
    assert parts == sorted(parts)
    read = [[(row.image_id, row.text) for row in source.read(part, EVERYTHING)] for part in parts]
    assert sum(map(bool, read)) > 10
    assert [row for part in read for row in part] == [(row["image_id"], row["text"]) for row in rows]


@pytest.mark.parametrize("length", [4, 5, 11, 1000])
def test_range_holds_lines_by_their_first_byte(tmp_path, length):
    text = "\ufeffab\n\ncd\r\né" + "x" * 20 + "\nlast"
    (tmp_path / "a").write_bytes(text.encode())
    folder, size = Folder(str(tmp_path)), len(text.encode())
    ranges = [(start, min(start + length, size)) for start in range(0, size, length)]
    lines = [line for start, stop in ranges for line in read_lines(folder, "a", start=start, stop=stop)]
    assert lines == ["ab", "", "cd", "é" + "x" * 20, "last"]


@pytest.mark.parametrize("row", ['"quoted",x\n', '9,"with\nline end"\n'])
def test_table_with_a_quoted_value_is_read_whole(tmp_path, row):
    path = write(tmp_path / "a.csv", rows_of(seed=2))
    plain = path.read_text()
    assert len(ranges_of(tmp_path, "a.csv")) > 10
    for text in (plain + row, plain.replace("image_id", '"image_id"'), "\ufeff" + plain.replace("image_id", '"image_id"')):
        path.write_text(text)
        assert ranges_of(tmp_path, "a.csv") == []


def test_table_ranges_of_small_or_compressed_tables_are_empty(tmp_path):
    path = write(tmp_path / "a.tsv", rows_of(seed=4))
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(path.read_bytes(), 0))
    write(tmp_path / "small.tsv", rows_of(seed=4, count=3))
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" * 200)
    assert [path.name for path in sorted(tmp_path.iterdir()) if ranges_of(tmp_path, path.name)] == ["a.tsv"]
    assert ranges_of(tmp_path, "missing.tsv") == []


def test_parts_with_a_selection_hold_the_whole_table(tmp_path):
    source = open_captions("table", write(tmp_path / "a.tsv", rows_of(seed=5)))
    assert source.parts(Selection(languages=("de",))) == [Part("a.tsv")]


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("a.tsv", "\tx", r"a.tsv', row 151 \(line 152\): the image id is empty"),
        ("a.csv", "1,x,y", r"a.csv', row 151 \(line 152\): 3 columns, expected the 2 of the header"),
        ("a.jsonl", "[1]", r"a.jsonl', line 168: found '\[1\]'"),
        ("a.tsv", b"1\t\xff", r"a.tsv' is not UTF-8: line 152, column 3"),
    ],
)
def test_errors_are_placed_in_the_file(tmp_path, name, line, message):
    path = write(tmp_path / name, rows_of(seed=6))
    path.write_bytes(path.read_bytes() + (line if isinstance(line, bytes) else line.encode()))
    source = open_captions("table", path)
    *good, last = source.parts(EVERYTHING)
    for part in good:
        list(source.read(part, EVERYTHING))
    with pytest.raises(InputError, match=message):
        list(source.read(last, EVERYTHING))


@pytest.mark.parametrize("start", ["", "sep=;\n", "\n\nsep=;\n\n"])
@pytest.mark.parametrize("options", [{}, {"delimiter": ";"}, {"quoting": "none"}])
def test_table_ranges_have_the_delimiter_of_the_head_of_the_table(tmp_path, start, options):
    rows = rows_of(seed=8)
    quote = '"' if options.get("quoting") == "none" else ""
    lines = [f"{row['image_id']};{quote}{row['text']}, {quote}" for row in rows]
    (tmp_path / "a.csv").write_text(start + "image_id;text\n" + "\n".join(lines))
    source = open_captions("table", tmp_path / "a.csv", **options)
    parts = source.parts(EVERYTHING)
    assert len(parts) > 10
    read = [f"{row.image_id};{row.text}" for part in parts for row in source.read(part, EVERYTHING)]
    assert read == lines
    (tmp_path / "a.csv").write_text(start + "image_id;text\n" + "\n".join([*lines, '9;"a"']))
    assert (len(source.parts(EVERYTHING)) > 1) is ("quoting" in options)


def test_quote_behind_a_delimiter_of_several_bytes_counts(tmp_path):
    rows = [f"{row['image_id']}¦{row['text']}" for row in rows_of(seed=9)]
    for shift in range(7):
        (tmp_path / "a.csv").write_text("image_id¦text\n" + "x" * shift + "\n".join([*rows, '9¦"a"']))
        assert open_captions("table", tmp_path / "a.csv", delimiter="¦").parts(EVERYTHING) == [Part("a.csv")]
