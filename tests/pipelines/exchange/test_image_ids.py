"""Numbers of Karpathy's ``dataset_*.json`` become names of images, in every layout that is imported."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipelines.exchange.importers.image_ids import read_karpathy_numbers
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from schemas.dataset import open_dataset
from schemas.errors import InputError

NAMES = ["COCO_val2014_000000000042", "COCO_train2014_000000000009", "b.c"]
COCOIDS = [42, 9, 581929]
VALUES = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture
def karpathy(tmp_path) -> str:
    """Three images with two captions each; numbers of one kind are also numbers of another, for other images."""
    images = [
        {"filename": f"{name}.jpg", "imgid": 2 - n, "cocoid": COCOIDS[n], "sentids": [10 * n, 1 + 10 * n], "split": "val"}
        for n, name in enumerate(NAMES)
    ]
    path = tmp_path / "dataset_coco.json"
    path.write_text(json.dumps({"images": images, "dataset": "coco"}))
    return str(path)


def job_of(path: Path, **options) -> ImportJob:
    return ImportJob((str(path),), str(path.parent / "out"), "toy", **{"shards": 2, "overwrite": True, **options})


def stored(job: ImportJob):
    manifest = import_features(job)
    dataset = open_dataset(job.output)
    column = "features" if dataset.kind == "regions" else "feature"
    return {image_id: np.asarray(dataset.get(image_id)[column]).reshape(-1)[:4] for image_id in dataset.image_ids()}, manifest


def check(found: dict[str, np.ndarray]) -> None:
    assert sorted(found) == sorted(NAMES)
    for name, row in zip(NAMES, VALUES, strict=True):
        np.testing.assert_array_equal(found[name], row)


def npy(folder: Path, ids: list[object], values=VALUES, **options) -> ImportJob:
    np.save(folder / "test_ims.npy", values)
    (folder / "test_ids.txt").write_text("".join(f"{number}\n" for number in ids))
    return job_of(folder / "test_ims.npy", **options)


@pytest.mark.parametrize(("key", "ids"), [("imgid", [2, 1, 0]), ("cocoid", COCOIDS), ("sentid", [1, 10, 21])])
def test_arrays_with_numbers_of_each_kind(tmp_path, karpathy, key, ids):
    found, manifest = stored(npy(tmp_path, ids, karpathy=karpathy, karpathy_key=key))
    check(found)
    data = Path(karpathy).read_bytes()
    named = {"name": "dataset_coco.json", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest.inputs[-1] == named
    assert manifest.parameters["imported"]["karpathy_key"] == key
    if key == "sentid":  # The rows of the captions of an image become one.
        check(stored(npy(tmp_path, [0, 1, 10, 11, 20, 21], VALUES.repeat(2, axis=0), karpathy=karpathy, karpathy_key=key))[0])


def test_regions_of_tsv_files(tmp_path, karpathy):
    def text(array) -> str:
        return base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()

    lines = [f"{number}\t9\t8\t1\t{text(np.zeros(4))}\t{text(row)}\n" for number, row in zip(COCOIDS, VALUES, strict=True)]
    (tmp_path / "t.tsv").write_text("".join(lines))
    check(stored(job_of(tmp_path / "t.tsv", max_regions=1, karpathy=karpathy, karpathy_key="cocoid"))[0])


def test_hdf5_files_with_an_array_of_ids_and_with_an_array_per_image(tmp_path, karpathy):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["x"], file["ids"] = VALUES, np.array(COCOIDS)
        for number, row in zip(COCOIDS, VALUES, strict=True):
            file[f"single/{number:012}"] = row
    for options in ({"array": "x", "id_array": "ids"}, {"array": "single"}):
        check(stored(job_of(tmp_path / "f.h5", karpathy=karpathy, karpathy_key="cocoid", **options))[0])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (3, r"test_ids.txt, line 2: '.*' has no imgid 3, only 3 from 0 to 2: .* \(--karpathy-key cocoid or sentid\)\?"),
        ("²", "'²' is not a number"),
    ],
)
def test_unknown_numbers_are_refused_and_nothing_is_written(tmp_path, karpathy, entry, message):
    with pytest.raises(InputError, match=message):
        stored(npy(tmp_path, [0, entry, 1], karpathy=karpathy))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("images", "key", "message"),
    [
        ([{"filename": "a.jpg", "imgid": 0}], "cocoid", r"image number 1: no 'cocoid' in it; the file has 'filename', 'imgid'"),
        ([{"filename": f"{n}.jpg", "imgid": 5} for n in "ab"], "imgid", r"image number 2: imgid 5 is that of 'a' and of 'b'"),
        (
            [{"filename": f"{n}/a.jpg", "imgid": n} for n in (1, 2)],
            "imgid",
            r"number 2: '2/a.jpg' would be the image 'a', as .* 1 is",
        ),
    ],
)
def test_broken_files_are_refused(tmp_path, images, key, message):
    (tmp_path / "d.json").write_text(json.dumps({"images": images}))
    with pytest.raises(InputError, match=message):
        read_karpathy_numbers(tmp_path / "d.json", key)
