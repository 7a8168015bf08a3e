"""Inputs that hold nothing are errors, and leave nothing behind."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.features import FeatureSpec
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


def captions(source, output, kind, *arguments):
    return ("captions", source, output, "--format", kind, "--workers", "1", "--shards", "2", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_table_with_a_header_alone(fails, tmp_path, name):
    (tmp_path / name).write_text("image_id,text\n".replace(",", "," if name == "a.csv" else "\t"))
    fails(*captions(tmp_path / name, tmp_path / "out", "table"), says=f"{name}' has no rows below its header")


@pytest.mark.slow
def test_a_parquet_table_without_rows(fails, tmp_path):
    pq.write_table(pa.table({"image_id": pa.array([], pa.string()), "text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    fails(*captions(tmp_path / "a.parquet", tmp_path / "out", "table"), says="a.parquet' has no rows")


def test_a_table_of_images_with_a_header_alone(fails, tmp_path):
    (tmp_path / "a.csv").write_text("image_id,uri\n")
    fails("features", tmp_path / "a.csv", tmp_path / "out", "--weights", "random:0", says="a.csv' has no rows below its header")


@pytest.mark.slow
def test_coco_without_annotations(fails, tmp_path):
    path = tmp_path / "captions_train.json"
    path.write_text(json.dumps({"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": []}))
    fails(*captions(path, tmp_path / "out", "coco"), says="captions_train.json' has no 'annotations'")


@pytest.mark.slow
def test_karpathy_without_sentences(fails, tmp_path):
    path = tmp_path / "dataset_x.json"
    path.write_text(json.dumps({"images": [{"filename": "a.jpg", "split": "train", "sentences": []}]}))
    fails(*captions(path, tmp_path / "out", "karpathy"), says="dataset_x.json' holds no captions")


@pytest.mark.slow
def test_multi30k_without_lines(fails, tmp_path):
    (tmp_path / "m" / "task1" / "raw").mkdir(parents=True)
    (tmp_path / "m" / "task1" / "image_splits").mkdir()
    (tmp_path / "m" / "task1" / "raw" / "train.en.gz").write_bytes(gzip.compress(b""))
    (tmp_path / "m" / "task1" / "image_splits" / "train.txt").write_text("")
    fails(*captions(tmp_path / "m", tmp_path / "out", "multi30k"), says="train.en.gz' holds no captions")


def test_hdf5_without_images(fails, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((0, 4), np.float32))
        file.create_dataset("ids", data=np.array([], dtype="S4"))
    arguments = ("--name", "x", "--array", "x", "--id-array", "ids")
    imported = ("import", tmp_path / "x.h5", tmp_path / "out", *arguments)
    fails(*imported, says="x.h5")


def test_tsv_without_lines(fails, tmp_path):
    (tmp_path / "x.tsv").write_text("")
    fails("import", tmp_path / "x.tsv", tmp_path / "out", "--name", "x", says="x.tsv")


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


@pytest.mark.slow
def test_captions_without_a_token(fails, tmp_path):
    write_captions(tmp_path / "captions", ["", ""])
    fails("vocabulary", tmp_path / "captions", tmp_path / "out", says="hold no tokens: prepare the captions again")


@pytest.mark.slow
def test_encoding_no_captions(fails, imagepivot, tmp_path):
    write_captions(tmp_path / "full", ["a a a a"])
    write_captions(tmp_path / "captions", [])
    imagepivot("vocabulary", tmp_path / "full", tmp_path / "vocabulary")
    arguments = ("encode", tmp_path / "captions", tmp_path / "vocabulary", tmp_path / "out")
    fails(*arguments, says="holds no captions, so there is nothing to encode")


def test_a_folder_without_images(fails, tmp_path):
    (tmp_path / "photos").mkdir()
    fails("features", tmp_path / "photos", tmp_path / "out", "--weights", "random:0", says="no images found in")


def test_datasets_that_may_be_empty_still_are(imagepivot, tmp_path):
    """Writing and reading a dataset of no rows stays possible: only the inputs of commands must hold something."""
    write_rows(tmp_path / "f", "features", [], FeatureSpec("x", (4,)))
    assert "0 in 1 shards" in imagepivot("inspect", tmp_path / "f").stdout
