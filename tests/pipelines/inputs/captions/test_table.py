from __future__ import annotations

import csv
import gzip
import json
import pickle
import random

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs import tables
from pipelines.inputs.captions.base import CAPTION_COLUMNS, EVERYTHING, RawCaption, Selection
from pipelines.inputs.captions.opening import open_captions
from schemas.errors import InputError, UsageError
from tests.pipelines.inputs.reading import read, write, write_table

COLUMNS = ["image_id", "text", "language", "portion", "index", "split"]


def _random_rows(seed: int, count: int) -> list[dict]:
    rng = random.Random(seed)
    words = ["NA", "None", "null", "nan", "1", " a ", "é", "中", '"', '""']
    words += [",", "\t", "\n", "\r\n", ";", "\u2028", "\ufeff", "'"]
    return [
        {
            "image_id": f"{rng.randrange(10**6)}.{number}",
            "text": "".join(rng.choices(words, k=rng.randint(0, 6))),
            "language": rng.choice(["en", "de", "pt-BR"]),
            "portion": rng.choice(["comparable", "translation"]),
            "index": rng.choice([0, 1, 32767]),
            "split": rng.choice(["train", "val", "test 2016"]),
        }
        for number in range(count)
    ]


def _save(path, rows, columns):
    return write_table(path, [{column: row[column] for column in columns} for row in rows])


NAMES = ["a.csv", "a.tsv", "a.jsonl", "a.ndjson", "a.csv.gz", "a.tsv.gz", "a.jsonl.gz", "a.parquet", "A.CSV"]


@pytest.mark.parametrize("batch", [7, 500, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_every_value_as_written(tmp_path, monkeypatch, name, batch):
    monkeypatch.setattr(tables, "_BATCH_ROWS", batch)
    rows = _random_rows(seed=1, count=500)
    path = tmp_path / name
    _save(tmp_path / name.lower(), rows, [*COLUMNS[::-1], "image_id"][:6]).rename(path)
    # Escaped in JSON lines, CR LF is two characters; within quotes in CSV and TSV it is a line end.
    ends = "\n" if path.name.lower().removesuffix(".gz").endswith(("csv", "tsv")) else "\r\n"
    expected = [RawCaption(**{**row, "text": row["text"].replace("\r\n", ends)}) for row in rows]
    source = open_captions("table", path)
    assert read(source) == expected
    selection = Selection(("de", "pt-br"), ("translation",), ("train", "val"))
    chosen = [row for row in expected if selection.takes(row.language, row.portion, row.split)]
    assert 50 < len(chosen) < 200
    assert read(source, selection) == chosen
    assert pickle.loads(pickle.dumps(source)) == source


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.parquet"])
def test_other_names_and_defaults(tmp_path, name):
    rows = [{"img": "1", "caption": "one", "index": 3, "extra": "x"}, {"img": "2", "caption": "NA", "index": 4, "extra": "y"}]
    path = _save(tmp_path / name, rows, ["extra", "img", "index", "caption"])
    source = open_captions("table", path, language="fr", columns={"image_id": "img", "text": "caption", "split": "extra"})
    assert read(source) == [
        RawCaption("1", "fr", "comparable", 3, "x", "one"),
        RawCaption("2", "fr", "comparable", 4, "y", "NA"),
    ]
    path = _save(tmp_path / name, rows, ["img", "caption"])
    source = open_captions("table", path, columns={"image_id": "img", "text": "caption"})
    assert read(source) == [
        RawCaption("1", "en", "comparable", -1, "train", "one"),
        RawCaption("2", "en", "comparable", -1, "train", "NA"),
    ]


def _text_table(path, text):
    return open_captions("table", write(path, text))


def _pairs(source):
    return [(row.image_id, row.text) for row in read(source)]


def test_csv_quoting(tmp_path):
    text = 'text,image_id\r\n"He said ""hi"",\r\nand\nleft",1\r\n a "b" c ,2\r\n,3\r\n""," 4"\r\n\r\n"x"," "\r\n'
    assert _pairs(_text_table(tmp_path / "a.csv", text)) == [
        ("1", 'He said "hi",\nand\nleft'),
        ("2", ' a "b" c '),
        ("3", ""),
        (" 4", ""),
        (" ", "x"),
    ]
    # Without a last line end, and with lines before the header.
    source = _text_table(tmp_path / "b.csv", "\n\nimage_id,text\n\n1,a\u2028b\x0bc\x1c\n2,None")
    assert [row.text for row in read(source)] == ["a\u2028b\x0bc\x1c", "None"]


def test_numbers_as_image_ids_are_taken(tmp_path):
    rows = read(_text_table(tmp_path / "a.jsonl", '{"image_id": 391895, "text": "a"}\n\n  \n{"image_id": "007", "text": "b"}'))
    assert [row.image_id for row in rows] == ["391895", "007"]
    pq.write_table(pa.table({"image_id": [391895], "text": ["a"]}), tmp_path / "a.parquet")
    assert [row.image_id for row in read(open_captions("table", tmp_path / "a.parquet"))] == ["391895"]


GOOD = '{"image_id": "1", "text": "a"}\n'

BROKEN_CSV = [
    ("", r"a.csv' is empty: expected a line with the names of the columns"),
    ("image_id,text\n", r"a.csv' has no rows below its header"),
    ('image_id,text\n1,"a\nb"\n2,a,b\n', r"row 2 \(line 4\): 3 columns"),
    ("image_id,text\n1,a\n" + '2,"' + "x\n" * 100_000, r"row 2 \(line 3\): unexpected end of data"),
    ('image_id,text\n1,"a" b\n', r"row 1 \(line 2\): .*expected after.*give --quoting none"),
    ("image_id,text\n1,a\rb\n", r"row 1 \(line 2\): a CR outside quotes"),
    ("image_id,text\n,a\n", r"row 1 \(line 2\): the image id is empty"),
    ('image_id,text\n"1\n2",a\n', r"row 1 \(line 2\): the image id '1\\n2' has the control character '\\n'"),
    ("\ufeff\ufeffimage_id,text\n1,a\n", r"has no column 'image_id'; its columns are '\\ufeffimage_id', 'text'"),
    ("image_id,text,split\n1,a,\n", r"row 1 \(line 2\): 'split' is '', expected a name"),
    ("image_id,text,portion\n1,a,\x07\n", r"'portion' is '\\x07', expected a name"),
    ("image_id,text,portion\n1,a,task1/raw\n", r"'portion' is 'task1/raw', expected a name"),
    ("image_id,text,text\n1,a,b\n", r"has 2 columns 'text': rename all but one"),
    ("image_id,text,language\n1,a,en\n2,b,english\n", r"row 2 \(line 3\): the language 'english' is not a language tag"),
    ("image_id;text\n1;a;b\n", r"row 1 \(line 2\): 3 columns, expected the 2 of the header, with ';' as the delimiter"),
]
BROKEN_LINES = [
    ("", r"a.jsonl' is empty: expected one JSON object per line"),
    (GOOD + "[1]\n", r"line 2: found '\[1\]', expected a JSON object"),
    (GOOD + "\ufeff" + GOOD, r"line 2: not JSON, .*BOM"),
    (GOOD + '{"image_id": "2"}\n', r"line 2: lacks 'text', unlike the first line"),
    (GOOD + '{"image_id": "2", "text": "b", "split": "val"}\n', r"line 2: has 'split', unlike the first line"),
    (GOOD + '{"image_id": null, "text": "b"}\n', r"line 2: 'image_id' is missing"),
    (GOOD + '{"image_id": "2", "text": ["a", "b"]}\n', r"line 2: 'text' is \['a', 'b'\], .*; write a row"),
    (GOOD + '{"image_id": "2", "text": 5}\n', r"line 2: 'text' is 5, expected a string"),
    (GOOD + '{"image_id": true, "text": "b"}\n', r"line 2: the image id is True, expected a string"),
    (GOOD + '{"image_id": 1.5, "text": "b"}\n', r"line 2: the image id is 1.5, expected a string"),
    (GOOD + '{"image_id": "2", "text": "\\ud800"}\n', r"line 2: the text '\\ud800' has half a surrogate pair"),
]
BROKEN_PARQUET = [
    ({"text": [b"a", b"b"]}, r"row 1: 'text' is b'a', expected a string"),
    ({"text": [["a", "b", "c"], ["d"]]}, r"row 1: 'text' is \['a', 'b', 'c'\], .*explode"),
    ({"image_id": ["1", None]}, r"a.parquet', row 2: 'image_id' is missing"),
    ({"index": [0, 40_000]}, r"row 2: 'index' is 40000"),
    ({"index": [0.0, 1.0]}, r"row 1: 'index' is 0.0, expected an integer"),
    ({"language": ["en", None]}, r"row 2: 'language' is missing"),
]
INDICES = {"tsv": ["-1", "32768", "1.0", "", " 1", "one", "१", "9" * 5000], "jsonl": ["-1", "32768", "1.0", "true", "[]"]}
WRONG_INDEX = r"line [12]\)?: 'index' is .*, expected an integer from 0 to 32767"


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        *(("a.csv", text, {}, message) for text, message in BROKEN_CSV),
        ("a.csv", "image_id,text\n1,a\n", {"delimiter": ";"}, r"a single column, 'image_id,text', with ';' as the delimiter"),
        ("a.csv", "image_id,text\n1,a\n", {"columns": {"split": "fold"}}, r"has no column 'fold'; its columns are"),
        *(("a.jsonl", text, {}, message) for text, message in BROKEN_LINES),
        *(("a.tsv", f"image_id\ttext\tindex\n1\ta\t{index}\n", {}, WRONG_INDEX) for index in INDICES["tsv"]),
        *(("a.jsonl", f'{{"image_id": "1", "text": "a", "index": {index}}}\n', {}, WRONG_INDEX) for index in INDICES["jsonl"]),
        *(("a.parquet", columns, {}, message) for columns, message in BROKEN_PARQUET),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_broken_tables_are_refused(tmp_path, name, content, options, message):
    if name == "a.parquet":
        pq.write_table(pa.table({"image_id": ["1", "2"], "text": ["a", "b"], **content}), tmp_path / name)
    else:
        write(tmp_path / name, content)
    with pytest.raises(InputError, match=message):
        read(open_captions("table", tmp_path / name, **options))


@pytest.mark.parametrize("text_type", [pa.large_string(), pa.string_view()])
def test_parquet_types(tmp_path, text_type):
    table = pa.table(
        {
            "image_id": pa.array(["1", "2"]).dictionary_encode(),
            "my.text": pa.array(["a", "None"], text_type),
            "language": pa.array(["en", "de"]).dictionary_encode(),
            "index": pa.array([0, 1], pa.int16()),
            "feature": pa.array([[1.0], [2.0]]),
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(open_captions("table", tmp_path / "a.parquet", columns={"text": "my.text"})) == [
        RawCaption("1", "en", "comparable", 0, "train", "a"),
        RawCaption("2", "de", "comparable", 1, "train", "None"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "image_id,text\n1,a\n2,b\n3,c\n4\n", r"row 4 \(line 5\): 1 columns"),
        ("a.csv", 'image_id,text\n1,a\n2,b\n3,c\n4,"d', r"row 4 \(line 5\): unexpected end of data"),
        ("a.csv", "image_id,text\n1,a\n2,b\n3,c\n\n,d\n5\n", r"row 4 \(line 6\): the image id is empty"),
        ("a.csv", b"image_id,text\n1,a\n2,b\n3,c\n4,\xff\n", r"not UTF-8: line 5, column 3"),
        ("a.csv", b"image_id,text\n1,a\n2,b\n3,c\n,d\n5,\xff\n", r"row 4 \(line 5\): the image id is empty"),
        ("a.jsonl", GOOD * 3 + "[1]\n", r"line 4: found"),
        ("a.jsonl", GOOD * 3 + '\n{"image_id": "", "text": "d"}\n[1]\n', r"line 5: the image id is empty"),
    ],
)
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 100])
def test_tables_raises_the_first_error_of_a_file(tmp_path, monkeypatch, name, text, message, batch):
    monkeypatch.setattr(tables, "_BATCH_ROWS", batch)
    source, seen = _text_table(tmp_path / name, text), []

    def read_all() -> None:
        for table in source.tables(source.parts(EVERYTHING)[0], EVERYTHING):
            seen.extend(table["image_id"].to_pylist())

    with pytest.raises(InputError, match=message):
        read_all()
    assert len(seen) == (3 if "empty" not in message else 3 // batch * batch)


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_tables_with_unusual_rows_checks_rows_one_by_one(tmp_path, monkeypatch, batch):
    """A number and text as image ids make the rows of a batch be looked at one by one."""
    monkeypatch.setattr(tables, "_BATCH_ROWS", batch)
    lines = [{"image_id": n if n % 4 else str(n), "text": f"t{n}", "index": n} for n in range(10)]
    source = _text_table(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read(source) == [RawCaption(str(n), "en", "comparable", n, "train", f"t{n}") for n in range(10)]
    found = pa.concat_tables(source.tables(source.parts(EVERYTHING)[0], EVERYTHING))
    assert found.schema.equals(CAPTION_COLUMNS)
    assert found["text"].to_pylist() == [f"t{n}" for n in range(10)]


def test_non_utf8_string_names_column_and_row(tmp_path):
    captions = pa.array([b"a"] * 8_500 + [b"\xff"]).view(pa.string())
    pq.write_table(pa.table({"image_id": ["1"] * 8_501, "caption": captions}), tmp_path / "a.parquet", row_group_size=1_000)
    with pytest.raises(InputError, match=r"column 'caption', row 8501: not UTF-8"):
        read(open_captions("table", tmp_path / "a.parquet", columns={"text": "caption"}))


def test_broken_parquet_file(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"a.parquet' is not a whole Parquet file \(after 0 rows\)"):
        read(open_captions("table", path))
    pq.write_table(pa.table({"image_id": ["1"], "text": ["a"]}), path)
    source = open_captions("table", path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"is not a whole Parquet file"):
        read(source)
    path.unlink()
    with pytest.raises(InputError, match=r"a.parquet' does not exist"):
        read(source)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {}, f"the table '{name}': expected") for name in ("a.txt", "a", "a.gz", "a.parquet.gz", "a.xlsx")),
        ("a.csv", {"delimiter": "ab"}, "--delimiter is 'ab', expected one character"),
        ("a.csv", {"quoting": "minimal"}, "--quoting is 'minimal', expected one of 'auto', 'rfc4180', 'none'"),
        *((name, {"delimiter": ";"}, f"but the table is '{name}'") for name in ("a.jsonl", "a.parquet")),
    ],
)
def test_open_captions_refuses_other_tables_and_dialects(tmp_path, name, options, message):
    (tmp_path / name).touch()
    with pytest.raises(UsageError, match=message):
        open_captions("table", tmp_path / name, **options)
    with pytest.raises(InputError, match=rf"is a folder, expected one table; it holds '{name}': name the file to read"):
        open_captions("table", tmp_path)


def test_selection_without_captions_is_refused(tmp_path):
    source = _text_table(tmp_path / "a.csv", "image_id,text,language,split\n1,a,en,train\n2,b,de,val\n")
    with pytest.raises(InputError, match=r"no captions in language 'it' in '.*/a.csv': there are de, en;"):
        read(source, Selection(languages=("en", "it")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_null_caption_is_a_row_without_text(tmp_path, name):
    texts = ["a", None, "b", None, None, "c"]
    rows = [{"image_id": str(n), "text": text, "index": 1} for n, text in enumerate(texts, start=1)]
    source = open_captions("table", _save(tmp_path / name, rows, ["image_id", "text"]))
    assert _pairs(source) == list(zip("123456", texts, strict=True))
    source = _text_table(tmp_path / "b.jsonl", '{"image_id": 1, "text": null}\n{"image_id": "2", "text": "b"}\n')
    assert _pairs(source) == [("1", None), ("2", "b")]  # Read one by one.


@pytest.mark.parametrize("name", NAMES)
def test_value_may_have_any_length(tmp_path, name):
    text = 'é,"\t' * 50_000
    row = {"image_id": "1" * 200_000, "text": text, "language": "en", "portion": "comparable", "index": 0, "split": "train"}
    path = _save(tmp_path / name.lower(), [row], COLUMNS)
    assert read(open_captions("table", path)) == [RawCaption(**row)]


@pytest.mark.parametrize("texts", [['["a dog", "b"]', "['c d', \"it's\"]"], ["['a',\n 'b']"]])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_lists_as_text_are_refused(tmp_path, name, texts):
    rows = [{"image_id": str(n), "caption": text, "index": 0} for n, text in enumerate(texts)]
    path = _save(tmp_path / name, rows, ["image_id", "caption"])
    options = {"columns": {"text": "caption"}}
    with pytest.raises(InputError, match=r"column 'caption': every text is a list, such as .*literal_eval.*explode"):
        read(open_captions("table", path, **options))
    path = _save(tmp_path / name, [*rows, {"image_id": "9", "caption": "[sic] a dog", "index": 0}], ["image_id", "caption"])
    assert [row.text for row in read(open_captions("table", path, **options))] == [*texts, "[sic] a dog"]


# --- dialects --------------------------------------------------------------------------------------------------------

BOYS = "".join(f"i{n}\ta boy number {n}\n" for n in range(2, 9))
QUOTES = f'image_id\ttext\ni1\t"A sign that opens\n{BOYS}i9\tcloses"\ni10\tlast\n'
"""A value that begins with an ordinary quote, and a later one that ends with one."""


def _pandas(path, **options):
    frame = pandas.read_csv(path, dtype=str, keep_default_na=False, **options)
    return list(zip(frame["image_id"], frame["text"], strict=True))


@pytest.mark.parametrize("kind", ["tsv", "csv"])
def test_quoted_value_over_rows_is_refused(tmp_path, kind):
    text = QUOTES if kind == "tsv" else QUOTES.replace("\t", ",")
    delimiter = "\t" if kind == "tsv" else ","
    path = tmp_path / f"a.{kind}"
    with pytest.raises(InputError, match=r"row 1 \(line 2\): a value in quotes holds .* 9 lines .* 9 rows .* --quoting none"):
        read(_text_table(path, text))
    lines = _pairs(open_captions("table", path, quoting="none"))
    assert len(lines) == 10
    assert lines == _pandas(path, sep=delimiter, quoting=csv.QUOTE_NONE)
    assert (lines[0], lines[8]) == (("i1", '"A sign that opens'), ("i9", 'closes"'))
    values = _pairs(open_captions("table", path, quoting="rfc4180"))
    assert len(values) == 2
    if kind == "tsv":  # Lines without as many values do not hide it.
        odd = QUOTES.replace("a boy number 5", "a boy\tnumber 5").replace("i7\t", "\ni7\t")
        with pytest.raises(InputError, match=r"row 1 \(line 2\): .* 10 lines .* 8 rows"):
            read(_text_table(tmp_path / "b.tsv", odd))
    assert values == _pandas(path, sep=delimiter)


@pytest.mark.parametrize(
    "value",
    ["Two dogs, a cat,\nand a bird", "a dog\nruns", "one\n\ntwo, three", "a, b\nc, d, e\nf", 'He said "hi",\nand\nleft'],
)
def test_quoted_prose_over_several_lines(tmp_path, value):
    path = write_table(tmp_path / "a.csv", [{"image_id": "1", "text": value}, {"image_id": "2", "text": "b"}])
    assert _pairs(open_captions("table", path)) == [("1", value), ("2", "b")]
    assert _pandas(path) == [("1", value), ("2", "b")]


@pytest.mark.parametrize("quoting", ["auto", "rfc4180", "none"])
@pytest.mark.parametrize(
    ("name", "delimiter", "stated"),
    [
        ("a.csv", ";", ""),
        ("a.csv", "\t", ""),
        ("a.csv", ":", ":"),
        ("a.csv.gz", "¦", "¦"),
        ("a.csv", "\t", "tab"),
    ],
)
def test_delimiters(tmp_path, name, delimiter, stated, quoting):
    rows = [("image_id", "split", "text"), ("1", "train", "a, b"), ("2", "val", "c' d\" e"), ("3", "test", "")]
    text = "\r\n".join(delimiter.join(row) for row in rows) if delimiter != "," else "image_id,split,text\n1,train,a\n"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    found = [
        (row.image_id, row.split, row.text)
        for row in read(open_captions("table", tmp_path / name, delimiter=stated, quoting=quoting))
    ]
    assert found == (rows[1:] if delimiter != "," else [("1", "train", "a")])
    frame = pandas.read_csv(
        tmp_path / name, sep=delimiter, dtype=str, keep_default_na=False, engine="python", quoting=csv.QUOTE_NONE
    )
    assert found == list(frame.itertuples(index=False, name=None))


@pytest.mark.parametrize("line", ["sep=;", '"sep=;"', "\ufeffsep=;", "\n\nsep=;\n"])
@pytest.mark.parametrize("stated", ["", ";"])
def test_sep_line_names_the_delimiter(tmp_path, line, stated):
    path = tmp_path / "a.csv"
    path.write_text(f'{line}\nimg;caption\n1;"a; b"\n2;c, d\n')
    source = open_captions("table", path, columns={"image_id": "img", "text": "caption"}, delimiter=stated)
    assert _pairs(source) == [("1", "a; b"), ("2", "c, d")]


def test_parameters_hold_dialects_with_an_effect(tmp_path):
    (tmp_path / "a.csv").touch()
    plain = {"default_language": "en", "columns": {}}
    assert open_captions("table", tmp_path / "a.csv").parameters() == plain
    assert open_captions("table", tmp_path / "a.csv", quoting="rfc4180").parameters() == plain
    stated = open_captions("table", tmp_path / "a.csv", delimiter="tab", quoting="none")
    assert stated.parameters() == {**plain, "delimiter": "\t", "quoting": "none"}
