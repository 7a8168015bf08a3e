"""Inputs that hold nothing are errors, and leave nothing behind."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.builders import write_rows


@pytest.fixture
def fails(imagepivot, tmp_path):
    """Run a command whose output is ``out``, and check what it says."""

    def run(*arguments, says: str, code: int = 1):
        done = imagepivot(*arguments, code=code)
        assert done.stderr.startswith("Error: ")
        assert done.stderr.count("\n") == 1
        assert says in done.stderr
        assert not (tmp_path / "out").exists()

    return run


def parquet_without_rows() -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table({"image_id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), data)
    return data.getvalue()


def hdf5_without_images() -> bytes:
    data = io.BytesIO()
    with pytest.importorskip("h5py").File(data, "w") as file:
        file.create_dataset("x", data=np.zeros((0, 4), np.float32))
        file.create_dataset("ids", data=np.array([], dtype="S4"))
    return data.getvalue()


COCO = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": []}
KARPATHY = {"images": [{"filename": "a.jpg", "split": "train", "sentences": []}]}
CAPTIONS = "--workers 1 --shards 2 --format"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name", "content", "options", "says"),
    [
        ("captions", "a.parquet", parquet_without_rows, f"{CAPTIONS} table", "a.parquet' has no rows"),
        ("captions", "captions_train.json", json.dumps(COCO).encode(), f"{CAPTIONS} coco", "train.json' has no 'annotations'"),
        ("captions", "dataset_x.json", json.dumps(KARPATHY).encode(), f"{CAPTIONS} karpathy", "_x.json' holds no captions"),
        ("features", "a.csv", b"image_id,uri\n", "--weights random:0", "a.csv' has no rows below its header"),
        ("import", "x.h5", hdf5_without_images, "--name x --array x --id-array ids", "x.h5"),
        ("import", "x.tsv", b"", "--name x", "x.tsv"),
    ],
)
def test_file_without_rows(fails, tmp_path, command, name, content, options, says):
    (tmp_path / name).write_bytes(content() if callable(content) else content)
    fails(command, tmp_path / name, tmp_path / "out", *options.split(), says=says)


def caption(image_id: str, text: str) -> dict:
    key = {"image_id": image_id, "language": "en", "portion": "comparable", "index": 0, "split": "train"}
    return {**key, "text": text, "tokens": text.split()}


def write_captions(folder, texts):
    rows = [caption(f"i{number}", text) for number, text in enumerate(texts)]
    statistics = {"captions": {"comparable/train/en": {"captions": len(rows), "tokens": sum(len(r["tokens"]) for r in rows)}}}
    write_rows(folder, "captions", rows, statistics=statistics if rows else {})


@pytest.mark.slow
@pytest.mark.parametrize(("scope", "noun"), [("language", "one language"), ("joint", "all languages together")])
def test_no_token_reaches_the_threshold(fails, imagepivot, tmp_path, scope, noun):
    write_captions(tmp_path / "captions", ["a b", "a c", "<unk> <unk> <unk> a"])
    arguments = ("vocabulary", tmp_path / "captions", tmp_path / "out", "--count-scope", scope)
    says = (
        f"no token reaches --min-count 4, so the vocabulary would be empty: the most frequent in {noun}, 'a', occurs 3 times. "
        "Give --min-count 3 or less"
    )
    fails(*arguments, says=says)
    done = imagepivot(*arguments, "--min-count", "3")
    assert "vocabulary: 5 rows" in done.stdout
