"""One test a promise: break it on disk, expect that complaint and no other."""

import hashlib
import re

import numpy as np
import pyarrow as pa
import pytest

from schemas.footers import Footer, footer_metadata
from schemas.writing.validation import validate
from tests.builders import shard_by_hand
from tests.schemas.conftest import make_features, make_toy

FIRST = "part-00000-of-00003.parquet"
VOCABULARY = "part-00000-of-00001.parquet"


def complains(toy, *expected):
    problems = validate(toy.path)
    assert len(problems) == len(expected), problems
    for problem, pattern in zip(problems, expected, strict=True):
        assert re.fullmatch(pattern, problem, flags=re.DOTALL), problem
    return True


def test_shards_without_rows_are_valid(tmp_path):
    make_features(tmp_path / "sparse", image_ids=["a"], shards=5).write()
    make_features(tmp_path / "none", image_ids=[], shards=2).write()
    for kind in ("captions", "encoded"):
        make_toy(tmp_path / kind, kind, [], parameters={"vocabulary_size": 4}, shards=2).write()
    for kind in ("sparse", "none", "captions", "encoded"):
        assert validate(tmp_path / kind) == []


# --- manifest and files ----------------------------------------------------------------------------------------------


def test_damaged_footer(copy_toy, forge):
    toy = copy_toy("features")
    data = bytearray((toy.path / FIRST).read_bytes())
    footer = int.from_bytes(data[-8:-4], "little")
    data[-8 - footer : -8] = bytes(footer)
    (toy.path / FIRST).write_bytes(data)
    assert complains(toy, rf"{FIRST} has SHA-256 .*: its bytes changed")
    digests = {"sha256": hashlib.sha256(data), "footer_sha256": hashlib.sha256(data[-8 - footer :])}
    digests = {name: digest.hexdigest() for name, digest in digests.items()}
    forge.edit_manifest(toy, lambda content: content["shards"][0].update(digests))
    assert complains(toy, rf".*/{FIRST} is damaged \(Couldn't deserialize thrift.*\): copy .*")


EDITS = {
    "another footer": (
        *("features", lambda content: content["shards"][0].update(footer_sha256="0" * 64), "none"),
        rf"{FIRST} has another footer than the manifest says",
    ),
    "more rows": (
        *("captions", lambda content: content["shards"][0].update(rows=1000), "none"),
        rf".*/{FIRST} has \d+ rows, the manifest says 1,000: copy .*",
    ),
    "more failures": (
        *("features", lambda content: content["failure_reasons"].update(truncated=99), "none"),
        r"the manifest counts failures \{.*'truncated': 99\}, the shards hold \{.*'truncated': 2.*\}",
    ),
    "unlisted text": (
        *("vocabulary", lambda content: content["files"].clear(), "_vocabulary.txt"),
        rf"{VOCABULARY}: _vocabulary\.txt is not in the manifest",
    ),
    "unlisted failures": (
        *("captions", lambda content: content.update(failures=[], failure_reasons={}), "_failures/*"),
        r"part-00000-of-00003\.parquet was made with 2 failures, the manifest lists 0, or others",
    ),
}


@pytest.mark.parametrize(("kind", "edit", "deleted", "complaint"), EDITS.values(), ids=EDITS)
def test_edited_manifest(copy_toy, forge, kind, edit, deleted, complaint):
    toy = copy_toy(kind)
    forge.edit_manifest(toy, edit)
    for path in toy.path.glob(deleted):
        path.unlink()
    assert complains(toy, complaint)


@pytest.mark.parametrize(
    ("kind", "name"), [("features", FIRST), ("features", "_failures/part-*"), ("vocabulary", "_vocabulary.txt")]
)
def test_missing_file(copy_toy, kind, name):
    toy = copy_toy(kind)
    path = next(toy.path.glob(name))
    path.unlink()
    assert complains(toy, rf"{re.escape(str(path.relative_to(toy.path)))} is missing")


@pytest.mark.parametrize(
    "name",
    [
        *("part-00000-of-00004.parquet", "copies/part-00000-of-00003.parquet", "copy.parquet", "part-0.csv", ".part-1.tmp-7"),
        *("_failures/part-00000-of-00004.jsonl", ".records/part-00000-of-00004.jsonl", "_vocabulary.txt"),
    ],
)
def test_extra_file(copy_toy, name):
    toy = copy_toy("features")
    (toy.path / name).parent.mkdir(exist_ok=True)
    (toy.path / name).write_bytes(b"")
    assert complains(toy, rf"{re.escape(name)} is in the folder but not in the manifest: delete it, or move it elsewhere")


@pytest.mark.parametrize("name", ["index.json", ".DS_Store", "_failures/notes.txt", "notes/a.txt", "_SUCCESS"])
def test_file_of_another_tool_is_a_remark(copy_toy, name):
    toy, remarks = copy_toy("features"), []
    (toy.path / name).parent.mkdir(exist_ok=True)
    (toy.path / name).write_bytes(b"{}")
    assert validate(toy.path, on_warning=remarks.append) == []
    assert remarks == [f"ignored in {str(toy.path)!r}: {name!r}, not part of the dataset"]
    assert validate(toy.path, strict=True) == [
        f"{name} is in the folder but not in the manifest: delete it, or move it elsewhere"
    ]


# --- footers, schema, counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("footer", "complaint"),
    [
        (footer_metadata(Footer("captions", "ab" * 32, {})), rf"was made for fingerprint '{'ab' * 32}', the dataset has '\w+'"),
        *((footer, "does not say in its footer which .* it was made for") for footer in ({}, {"imagepivot.kind": "captions"})),
    ],
)
def test_footer_of_another_dataset(copy_toy, forge, footer, complaint):
    toy = copy_toy("captions")
    forge.shard(toy, FIRST, lambda table: table, footer=footer)
    assert complains(toy, f"{FIRST} {complaint}")


CHANGES = {
    "a column more": lambda t: t.append_column("more", pa.array(["x"] * len(t))),
    "a column less": lambda t: t.drop_columns(["text"]),
    "another order": lambda t: t.select(list(reversed(t.schema.names))),
    "another type": lambda t: t.set_column(3, "index", t["index"].cast(pa.int32())),
    "nullable": lambda t: t.set_column(5, pa.field("text", pa.string()), t["text"]),
    "no dictionary": lambda t: t.set_column(1, pa.field("language", pa.string(), nullable=False), t["language"].cast("string")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_other_columns(copy_toy, forge, change):
    toy = copy_toy("captions")
    forge.shard(toy, FIRST, change)
    assert complains(toy, rf".*/{FIRST} has the columns .*, expected .*: copy .*")


# --- keys ------------------------------------------------------------------------------------------------------------


KEYED = ("captions", "encoded", "features", "regions", "embeddings")


@pytest.mark.parametrize("kind", KEYED)
def test_row_in_the_wrong_shard(copy_toy, forge, kind):
    toy = copy_toy(kind)
    stray = next(f"龍-{n}" for n in range(99) if shard_by_hand(f"龍-{n}", 3) == 2)
    forge.value(toy, FIRST, -1, image_id=stray)
    assert complains(toy, rf"{FIRST}: image '{stray}' belongs to shard 2")


@pytest.mark.parametrize(
    ("kind", "change", "complaint"),
    [
        *(
            (kind, lambda t: t.take([1, 0, *range(2, len(t))]), r"key \('.*'.*\) comes before \('.*'.*\), though it is larger")
            for kind in KEYED
        ),
        *((kind, lambda t: t.take([0, 0, *range(1, len(t))]), r"key \('.*\) occurs twice") for kind in KEYED),
        (  # Within one image, too; and by code point, not by the order of a dictionary.
            *("captions", lambda t: t.take([*range(len(t) - 2), len(t) - 1, len(t) - 2])),
            r"key \('(.*)', 'en', .*\) comes before \('\1', 'en', .*\), though it is larger",
        ),
    ],
)
def test_rows_in_another_order_or_twice(copy_toy, forge, kind, change, complaint):
    toy = copy_toy(kind)
    forge.shard(toy, FIRST, change)
    assert complains(toy, rf"{FIRST}: {complaint}")


# --- values ----------------------------------------------------------------------------------------------------------


def with_value(column, value):
    def change(row):
        values = row[column].ravel().copy()
        values[3] = value
        return {column: values}

    return change


VALUES = [
    *(
        ("regions", (0,), with_value(column, np.nan), f"column '{column}' holds values that are not finite")
        for column in ("boxes", "features", "class_scores", "attribute_scores")
    ),
    *(
        (kind, (1,), with_value("feature", value), "column 'feature' holds values that are not finite")
        for kind in ("features", "features16")
        for value in (np.nan, np.inf, -np.inf)
    ),
    *(("regions", (0,), {"num_regions": n}, "num_regions is .*, expected 0 to 36") for n in (-1, 37)),
    ("captions", (0,), {"index": -1}, "an index is negative"),
    *(
        (kind, (0,), {"image_id": image_id}, "an image id is empty or has a control character")
        for kind in ("features", "captions")
        for image_id in ("\nb", "0\x00", "a\x9f")  # Of this shard.
    ),
    ("captions", (0, 3), {"tokens": []}, "2 captions have no tokens"),
    *(("encoded", (row,), {"length": 99}, "a length is not the number of ids") for row in (0, -1)),
    *(  # Ten words and four specials.
        ("encoded", (2,), {"token_ids": [1, wrong, 2], "length": 3}, r"ids are -?\d+ to \d+, expected 0 to 13")
        for wrong in (-1, 14, 2**31 - 1)
    ),
]


@pytest.mark.parametrize(("kind", "rows", "values", "complaint"), VALUES)
def test_invalid_values(copy_toy, forge, kind, rows, values, complaint):
    toy = copy_toy(kind)
    for row in rows:
        forge.value(toy, FIRST, row, **(values(toy.shard(0)[row]) if callable(values) else values))
    assert complains(toy, rf"{FIRST}: {complaint}")


@pytest.mark.parametrize("column", ["boxes", "features", "class_ids", "class_scores", "attribute_ids", "attribute_scores"])
def test_unused_regions_not_zero(copy_toy, forge, column):
    toy = copy_toy("regions")
    number = shard_by_hand("image-00", 3)  # It has 20 regions.
    position = [row["image_id"] for row in toy.shard(number)].index("image-00")
    values = toy.shard(number)[position][column].copy()
    values[20, ...] = 1
    name = f"part-0000{number}-of-00003.parquet"
    forge.value(toy, name, position, **{column: values.ravel()})
    assert complains(toy, rf"{name}: column '{column}' is not zero beyond num_regions of image 'image-00'")


@pytest.mark.parametrize("row", [0, 2, -1, None])
@pytest.mark.parametrize("ids", [[], [1], [2], [5], [1, 5], [5, 2], [2, 5, 1], [5, 6, 7]])
def test_caption_without_start_or_end(copy_toy, forge, row, ids):
    toy = copy_toy("encoded")
    for number in range(len(toy.shard(0))) if row is None else [row]:
        forge.value(toy, FIRST, number, token_ids=ids, length=len(ids))
    assert complains(toy, rf"{FIRST}: a caption does not begin with <start> and end with <end>")


def swap(rows):
    assert rows[4]["count"] > rows[-1]["count"]
    rows[4], rows[-1] = {**rows[-1], "id": 4}, {**rows[4], "id": len(rows) - 1}


@pytest.mark.parametrize(
    ("change", "complaints"),
    [
        (lambda rows: rows[0].update(token="<PAD>"), [r"the first tokens are not \('<pad>', '<start>', '<end>', '<unk>'\)"]),
        (lambda rows: rows[-1].update(id=99), [r"the ids are not 0, 1, 2, \.\.\."]),
        (swap, ["the tokens are not in the order of count descending, then token"]),
        (lambda rows: rows[4].update(count=999), ["the count of token '.*' is not the sum of its counts by language"]),
        (lambda rows: rows.append({**rows[-1], "id": len(rows)}), ["a token occurs twice"]),
        (lambda rows: rows[-1].update(id=rows[-2]["id"]), [r"key \(\d+,\) occurs twice", r"the ids are not 0, 1, 2, \.\.\."]),
    ],
)
def test_wrong_vocabulary(copy_toy, forge, change, complaints):
    toy = copy_toy("vocabulary")

    def rewrite(table):
        rows = table.to_pylist()
        change(rows)
        (toy.path / "_vocabulary.txt").write_text("".join(f"{row['token']}\n" for row in rows), encoding="utf-8")
        return pa.Table.from_pylist(rows, schema=table.schema)

    forge.shard(toy, VOCABULARY, rewrite)
    forge.relist(toy, "_vocabulary.txt")
    assert complains(toy, *(f"{VOCABULARY}: {complaint}" for complaint in complaints))


@pytest.mark.parametrize("data", [b"<pad>\n<start>\n<end>\n<unk>\n", b"", b"\xff\xfe\n"])
def test_another_vocabulary_text(copy_toy, forge, data):
    toy = copy_toy("vocabulary")
    (toy.path / "_vocabulary.txt").write_bytes(data)
    forge.relist(toy, "_vocabulary.txt")
    assert complains(toy, rf"{VOCABULARY}: _vocabulary\.txt does not hold the same tokens")


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.fixture
def failed(copy_toy):
    """A dataset with failures, the path of a file of them, and that of the shard they belong to."""
    toy = copy_toy("features")
    path = sorted((toy.path / "_failures").iterdir())[0]
    return toy, f"_failures/{path.name}", path.with_suffix(".parquet").name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[0].update(reason="tired"), "NAME: reason 'tired' is not in the closed list"),
        (
            lambda rows: rows[0].update(reason="too_large"),
            "the manifest counts failures .*, the shards hold .*'too_large': 1.*",
        ),
        (
            lambda rows: rows[0].pop("uri"),
            r".*/NAME is damaged \(a line is not an object of key, uri, stage, reason, message, all of them text\): .*",
        ),
    ],
)
def test_invalid_failures(failed, forge, change, complaint):
    toy, name, _ = failed
    forge.failures(toy, name, change)
    assert complains(toy, complaint.replace("NAME", name))


def test_image_with_failure_and_row(failed, forge):
    toy, name, shard = failed
    number = int(shard[5:10])
    image_id = toy.shard(number)[0]["image_id"]
    forge.failures(toy, name, lambda rows: rows[0].update(key=image_id))
    assert complains(toy, rf"{name}: image '{image_id}' failed and has a row as well")
