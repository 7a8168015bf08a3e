"""The loaders here read the layouts as their code bases do, with numpy, csv, base64 and tarfile only."""

import base64
import csv
import io
import json
import re
import sys
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipelines.exchange.exporters import arrays
from pipelines.exchange.exporting import export_dataset
from pipelines.exchange.jobs import ExportJob
from schemas import kinds
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError, UsageError
from schemas.features import FeatureSpec
from schemas.writing.made_from import MADE_FROM_NAME
from tests.builders import region_row, write_rows

IMAGES = ["30", "9", "1000092795", "bild-ä", "猫", "x"]
SPLITS = {"30": "train", "9": "val", "1000092795": "train", "bild-ä": "val", "猫": "train", "x": "train"}
WIDTH, REGIONS, SHARDS = 6, 4, 3


def write_dataset(path: Path, kind: str, rows: list[dict], spec: FeatureSpec | None = None, shards: int = SHARDS) -> Path:
    write_rows(path, kind, rows, spec, shards=shards)
    return path


@pytest.fixture
def features(tmp_path):
    """Features of all images: the folder, and the vectors by image id."""
    return make_features(tmp_path / "features")


def make_features(path: Path, *shape: int, dtype: str = "float32", scale: float = 1.0, images=IMAGES):
    shape = shape or (WIDTH,)
    rng = np.random.default_rng(3)
    values = {image_id: (scale * rng.standard_normal(shape)).astype(dtype) for image_id in images}
    rows = [{"image_id": image_id, "feature": value} for image_id, value in values.items()]
    return write_dataset(path, "features", rows, FeatureSpec("toy", shape, dtype)), values


def export(tmp_path: Path, dataset: Path, layout: str, **options) -> list[Path]:
    return export_dataset(ExportJob(str(dataset), str(tmp_path / "out"), layout, **options))


@pytest.fixture
def regions(tmp_path):
    """Regions of all images, with 0 to 4 of them in use: the folder, and the rows by image id."""
    rng = np.random.default_rng(5)
    rows = []
    for number, image_id in enumerate(IMAGES):
        boxes, values = (rng.random((REGIONS, width)).astype("float32") for width in (4, WIDTH))
        labels = {f"{name}_ids": rng.integers(1, 400, REGIONS).astype("int16") for name in ("class", "attribute")}
        labels |= {f"{name}_scores": rng.random(REGIONS).astype("float32") for name in ("class", "attribute")}
        used = number % (REGIONS + 1)
        rows.append(region_row(image_id, boxes, values, used, width=640 + number, height=480 - number, **labels))
    path = write_dataset(tmp_path / "regions", "regions", rows, FeatureSpec("toy", (REGIONS, WIDTH)))
    return path, {row["image_id"]: row for row in rows}


def make_captions(path: Path, counts: dict[str, int] | None = None, *, extra: list[dict] = (), shards: int = SHARDS) -> Path:
    rows = []
    for image_id, count in (counts or dict.fromkeys(IMAGES, 5)).items():
        for index in range(count):
            row = {"image_id": image_id, "language": "de", "portion": "comparable", "index": index, "split": SPLITS[image_id]}
            tokens = ["ein", "hund", image_id, str(index)]
            rows.append({**row, "text": f"Ein Hund\n, {image_id} {index}", "tokens": tokens})
    return write_dataset(path, "captions", [*rows, *extra], shards=shards)


@pytest.fixture
def captions(tmp_path):
    return make_captions(tmp_path / "captions")


class PrecompLoader:
    """A split read as the loaders of VSE++ and SCAN read it: by line and row number."""

    def __init__(self, folder: Path, split: str) -> None:
        self.captions = [line.strip().decode() for line in (folder / f"{split}_caps.txt").open("rb")]
        self.images = np.load(folder / f"{split}_ims.npy")
        self.ids = [line.strip().decode() for line in (folder / f"{split}_ids.txt").open("rb")]
        self.im_div = 5 if self.images.shape[0] != len(self.captions) else 1

    def __getitem__(self, index: int) -> tuple[np.ndarray, str, str]:
        image = index // self.im_div
        return self.images[image], self.captions[index], self.ids[image]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != MADE_FROM_NAME)


# --- scan ------------------------------------------------------------------------------------------------------------


def scan_job(tmp_path, features, captions, **options) -> ExportJob:
    return ExportJob(str(features), str(tmp_path / "out"), "scan", captions=str(captions), **options)


@pytest.mark.parametrize("text", ["text", "tokens"])
def test_scan_files_pair_images_with_their_captions(tmp_path, features, captions, text):
    path, values = features
    written = export_dataset(scan_job(tmp_path, path, captions, split_names={"val": "dev"}, text=text))
    assert sorted(path.name for path in written) == files_of(tmp_path / "out")
    assert files_of(tmp_path / "out") == [f"{s}_{e}" for s in ("dev", "train") for e in ("caps.txt", "ids.txt", "ims.npy")]
    for split, name in (("train", "train"), ("val", "dev")):
        loader = PrecompLoader(tmp_path / "out", name)
        images = sorted(image_id for image_id in IMAGES if SPLITS[image_id] == split)
        assert loader.ids == images
        assert loader.images.dtype == np.float32
        assert len(loader.captions) == 5 * len(images)
        for number, image_id in enumerate(images):
            for index in range(5):
                image, caption, listed_id = loader[5 * number + index]
                assert listed_id == image_id
                assert image.tobytes() == values[image_id].tobytes()
                expected = f"Ein Hund , {image_id} {index}" if text == "text" else f"ein hund {image_id} {index}"
                assert caption == expected


def test_scan_of_regions_and_l2(tmp_path, regions, captions):
    path, rows = regions
    export_dataset(scan_job(tmp_path, path, captions, l2=True))
    loader = PrecompLoader(tmp_path / "out", "train")
    assert loader.images.shape == (4, REGIONS, WIDTH)
    for image_id, image in zip(loader.ids, loader.images, strict=True):
        for vector, stored in zip(image, rows[image_id]["features"], strict=True):
            norm = np.linalg.norm(stored)
            np.testing.assert_allclose(vector, stored / norm if norm else stored, rtol=1e-6)


def test_one_caption_an_image_and_the_first_of_several(tmp_path, features):
    path, _ = features
    captions = make_captions(tmp_path / "uneven", {"30": 5, "1000092795": 2, "猫": 3, "9": 1})
    with pytest.raises(DatasetError, match=r"images of split 'train' have 2 to 5 captions, image '1000092795' has 2"):
        export_dataset(scan_job(tmp_path, path, captions))
    with pytest.raises(UsageError, match="have 2 captions each, but the loaders of this layout take 5, or 1"):
        export_dataset(scan_job(tmp_path, path, captions, captions_per_image=2, splits=("train",)))
    with pytest.raises(DatasetError, match="this layout needs 5 of each; give --captions-per-image 1"):
        export_dataset(scan_job(tmp_path, path, captions, captions_per_image=5, splits=("train",)))
    with pytest.raises(UsageError, match="two splits would both be called 'train'"):
        export_dataset(scan_job(tmp_path, path, captions, captions_per_image=1, split_names={"val": "train"}))
    export_dataset(scan_job(tmp_path, path, captions, captions_per_image=1))
    loader = PrecompLoader(tmp_path / "out", "train")
    assert [loader[number][1:] for number in range(3)] == [(f"Ein Hund , {image_id} 0", image_id) for image_id in loader.ids]


def test_scan_needs_one_language_and_portion(tmp_path, features):
    row = {"image_id": "30", "language": "en", "portion": "comparable", "index": 0, "split": "train"}
    row |= {"text": "a", "tokens": ["a"]}
    extra = [row, {**row, "portion": "translation"}]
    captions = make_captions(tmp_path / "two", extra=extra)
    with pytest.raises(UsageError, match=r"several values of language \(de, en\): choose one with --language"):
        export_dataset(scan_job(tmp_path, features[0], captions))
    with pytest.raises(UsageError, match=r"several values of portion \(comparable, translation\): choose one with --portion"):
        export_dataset(scan_job(tmp_path, features[0], captions, language="en"))
    export_dataset(scan_job(tmp_path, features[0], captions, language="en", portion="translation"))
    assert PrecompLoader(tmp_path / "out", "train").captions == ["a"]


@pytest.mark.parametrize("split", ["/../evil", "a\0b"])
def test_split_that_is_no_file_name_is_refused(tmp_path, features, split):
    """The captions may be of a stranger: an export writes below its folder only."""
    row = {"image_id": "30", "language": "de", "portion": "other", "index": 0, "split": split, "text": "a", "tokens": ["a"]}
    job = scan_job(tmp_path, features[0], make_captions(tmp_path / "captions", extra=[row]), portion="other")
    with pytest.raises(UsageError, match="cannot be part of a file name: choose others with --splits"):
        export_dataset(job)
    assert not list(tmp_path.glob("evil*"))


def test_images_without_features_are_named(tmp_path, captions):
    path, _ = make_features(tmp_path / "few", images=["30", "9", "bild-ä"])
    with pytest.raises(DatasetError, match=r"3 of 4 images of split 'train' .*few', e.g. '1000092795', 'x', '猫'"):
        export_dataset(scan_job(tmp_path, path, captions))
    assert not (tmp_path / "out").exists()
    export_dataset(scan_job(tmp_path, path, captions, splits=("val",)))


# --- mulisera and npy ------------------------------------------------------------------------------------------------


def test_mulisera_rows_follow_the_lists(tmp_path, features):
    path, values = features
    (tmp_path / "train.txt").write_text("x.jpg\n30.jpg\n")
    (tmp_path / "test_2016_flickr.txt").write_text("9.jpg#11\n猫.jpg\n9.jpg#12\n", encoding="utf-8")
    lists = tuple(str(tmp_path / name) for name in ("train.txt", "test_2016_flickr.txt"))
    names = {"test_2016_flickr": "test_2016"}
    export_dataset(ExportJob(str(path), str(tmp_path / "imgfeats"), "mulisera", lists=lists, split_names=names))
    expected = [f"{split}-resnet50-avgpool.{end}" for split in ("test_2016", "train") for end in ("ids", "npy")]
    assert [name for name in files_of(tmp_path / "imgfeats") if "import" not in name] == expected
    for split, images in (("train", ["x", "30"]), ("test_2016", ["9", "猫", "9"])):
        array = np.load(tmp_path / "imgfeats" / f"{split}-resnet50-avgpool.npy")
        assert array.dtype == np.float16
        expected = np.stack([values[image_id].astype(np.float16) for image_id in images])
        np.testing.assert_array_equal(array.astype("float32"), expected.astype("float32"))


def test_mulisera_refuses_absent_images_and_large_values(tmp_path, features):
    (tmp_path / "train.txt").write_text("30\nnot-there\n")
    lists = (str(tmp_path / "train.txt"),)
    with pytest.raises(DatasetError, match=r"1 of 2 images of split 'train' have no row in .*'not-there'"):
        export(tmp_path, features[0], "mulisera", lists=lists)
    with pytest.raises(UsageError, match="two of the lists are for the same split"):
        export(tmp_path, features[0], "mulisera", lists=lists * 2)
    large, _ = make_features(tmp_path / "large", scale=1e6)
    (tmp_path / "train.txt").write_text("30\n")
    with pytest.raises(DatasetError, match="a value of image '30' is too large for float16"):
        export(tmp_path, large, "mulisera", lists=lists)
    assert files_of(tmp_path / "out") == []


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_npy_holds_the_vectors_in_their_shape_and_type(tmp_path, dtype):
    path, values = make_features(tmp_path / "features", 2, 3, dtype=dtype)
    written = export(tmp_path, path, "npy")
    assert [path.name for path in written] == ["features.npy", "ids.txt"]
    array, ids = np.load(written[0]), written[1].read_text(encoding="utf-8").splitlines()
    assert (array.dtype, array.shape) == (np.dtype(dtype), (6, 2, 3))
    for image_id, row in zip(ids, array, strict=True):
        assert row.tobytes() == values[image_id].tobytes()


# --- tsv -------------------------------------------------------------------------------------------------------------

TSV = ["image_id", "image_w", "image_h", "num_boxes", "boxes", "features"]
LABELS = ["objects_id", "objects_conf", "attrs_id", "attrs_conf"]
TSV_LXMERT = ["img_id", "img_h", "img_w", *LABELS, "num_boxes", "boxes", "features"]


@pytest.mark.parametrize("columns", ["bottom-up", "lxmert"])
def test_tsv_is_read_as_the_projects_read_it(tmp_path, regions, columns, request):
    path, rows = regions
    file, _ = export(tmp_path, path, "tsv", columns=columns)
    request.addfinalizer(partial(csv.field_size_limit, csv.field_size_limit(sys.maxsize)))
    fields = TSV if columns == "bottom-up" else TSV_LXMERT
    with file.open(encoding="utf-8") as stream:
        items = list(csv.DictReader(stream, fields, delimiter="\t"))
    assert sorted(item[fields[0]] for item in items) == sorted(IMAGES)
    names = {"boxes": "boxes", "features": "features"}
    if columns == "lxmert":
        names |= dict(zip(LABELS, ("class_ids", "class_scores", "attribute_ids", "attribute_scores"), strict=True))
    for item in items:
        row, boxes = rows[item[fields[0]]], int(item["num_boxes"])
        prefix = "image" if columns == "bottom-up" else "img"
        assert (int(item[f"{prefix}_w"]), int(item[f"{prefix}_h"]), boxes) == (row["width"], row["height"], row["num_regions"])
        for theirs, ours in names.items():
            values = np.frombuffer(base64.b64decode(item[theirs]), np.int64 if theirs.endswith("_id") else np.float32)
            if theirs.endswith("_id"):
                values = values + 1  # Theirs count from 0.
            np.testing.assert_array_equal(
                values.reshape(boxes, -1) if boxes else values, row[ours][:boxes].reshape(boxes, -1) if boxes else []
            )


# --- webdataset ------------------------------------------------------------------------------------------------------


def samples_of(folder: Path) -> dict[str, dict[str, bytes]]:
    """Group the files of tar files as WebDataset does: by the name before the first dot."""
    samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (0, 0, 0, "", 0o644)
                key, _, extension = member.name.partition(".")
                samples.setdefault(key, {})[extension] = tar.extractfile(member).read()
    return samples


@pytest.mark.parametrize("shards", [SHARDS, 2])
def test_webdataset_samples_hold_feature_and_captions(tmp_path, features, shards, monkeypatch):
    path, values = features
    monkeypatch.setattr(kinds, "_BATCH_BYTES", 1)
    captions = make_captions(tmp_path / "captions", shards=shards)
    written = export(tmp_path, path, "webdataset", captions=str(captions))
    assert [path.name for path in written] == [f"part-{n:05d}.tar" for n in range(SHARDS)]
    samples = samples_of(tmp_path / "out")
    assert set(samples) == set(IMAGES)
    for image_id, sample in samples.items():
        assert list(sample) == ["captions.json", "feature.npy"]
        assert np.load(io.BytesIO(sample["feature.npy"])).tobytes() == values[image_id].tobytes()
        texts = json.loads(sample["captions.json"])
        assert [caption["index"] for caption in texts] == [0, 1, 2, 3, 4]
        assert texts[2] == {
            "language": "de",
            "portion": "comparable",
            "index": 2,
            "split": SPLITS[image_id],
            "text": f"Ein Hund\n, {image_id} 2",
            "tokens": ["ein", "hund", image_id, "2"],
        }
    first = {path.name: path.read_bytes() for path in written}
    export_dataset(ExportJob(str(path), str(tmp_path / "again"), "webdataset", captions=str(captions)))
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").glob("*.tar")} == first


def test_webdataset_takes_images_with_a_row_and_a_chosen_caption(tmp_path, features, captions):
    notes = []
    job = ExportJob(str(features[0]), str(tmp_path / "out"), "webdataset", captions=str(captions), splits=("val",))
    export_dataset(job, on_warning=notes.append)
    assert set(samples_of(tmp_path / "out")) == {"9", "bild-ä"}
    few, _ = make_features(tmp_path / "few", images=["30", "9"])
    job = ExportJob(str(few), str(tmp_path / "few out"), "webdataset", captions=str(captions))
    export_dataset(job, on_warning=notes.append)
    assert notes == [
        "skipped 4 images without a chosen caption",
        f"skipped 4 images with a chosen caption and without a row in {str(few)!r}",
    ]


def test_webdataset_holds_dots_in_folders(tmp_path):
    """Its readers split a name as `^((?:.*/|)[^.]+)[.]([^/]*)$`."""
    image_id = "v1.2/train 2014/Bild"
    path, values = make_features(tmp_path / "features", images=[image_id])
    export(tmp_path, path, "webdataset")
    members = [(tar, member) for tar in map(tarfile.open, (tmp_path / "out").glob("*.tar")) for member in tar]
    ((tar, member),) = members
    assert re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name).groups() == (image_id, "feature.npy")
    assert np.load(io.BytesIO(tar.extractfile(member).read())).tobytes() == values[image_id].tobytes()


def test_webdataset_of_regions(tmp_path, regions):
    path, rows = regions
    export(tmp_path, path, "webdataset")
    for image_id, sample in samples_of(tmp_path / "out").items():
        assert list(sample) == ["boxes.npy", "feature.npy", "regions.json"]
        np.testing.assert_array_equal(np.load(io.BytesIO(sample["boxes.npy"])), rows[image_id]["boxes"])
        np.testing.assert_array_equal(np.load(io.BytesIO(sample["feature.npy"])), rows[image_id]["features"])
        boxes = json.loads(sample["regions.json"])
        assert (boxes["width"], boxes["num_regions"]) == (rows[image_id]["width"], rows[image_id]["num_regions"])
        assert boxes["class_ids"] == rows[image_id]["class_ids"].tolist()


@pytest.mark.parametrize("image_id", ["a.b", "/etc/x", "a//b", "../x", "x/", "a/./b"])
def test_webdataset_refuses_ids_with_dots(tmp_path, image_id):
    path, _ = make_features(tmp_path / "features", images=["30", image_id])
    with pytest.raises(DatasetError, match=rf"image id {image_id!r} holds a dot or is not a relative path"):
        export(tmp_path, path, "webdataset")
    assert files_of(tmp_path / "out") == []


def test_fewer_tar_files_leave_none_of_the_old(tmp_path, features):
    export(tmp_path, features[0], "webdataset")
    rows = [{"image_id": "30", "feature": np.zeros(WIDTH, "float32")}]
    small = write_dataset(tmp_path / "small", "features", rows, FeatureSpec("toy", (WIDTH,)), shards=1)
    with pytest.raises(DatasetError, match=r"holds 'part-00000.tar' already"):
        export(tmp_path, small, "webdataset")
    export(tmp_path, small, "webdataset", overwrite=True)
    assert files_of(tmp_path / "out") == ["part-00000.tar"]


# --- all -------------------------------------------------------------------------------------------------------------


def test_files_are_not_overwritten_unasked_and_never_half(tmp_path, features, monkeypatch):
    job = {"dataset": str(features[0]), "output": str(tmp_path / "out")}
    export_dataset(ExportJob(format="npy", **job))
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(DatasetError, match=r"holds 'features.npy' already \(l2: was False, now True\): .*--overwrite"):
        export_dataset(ExportJob(format="npy", l2=True, **job))

    def fail(path, image_ids):
        raise DatasetError("stopped on the way")

    with monkeypatch.context() as patch:
        patch.setattr(arrays, "write_ids", fail)
        with pytest.raises(DatasetError, match="stopped"):
            export_dataset(ExportJob(overwrite=True, format="npy", l2=True, **job))
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    export_dataset(ExportJob(overwrite=True, format="npy", l2=True, **job))
    np.testing.assert_allclose(np.linalg.norm(np.load(tmp_path / "out" / "features.npy"), axis=1), 1, rtol=1e-6)


def test_same_export_writes_nothing_and_a_killed_one_continues(tmp_path, features):
    output, notes = tmp_path / "out", []
    job = ExportJob(str(features[0]), str(output), "npy")
    paths = export_dataset(job, on_warning=notes.append)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()}
    assert export_dataset(job, on_warning=notes.append) == paths
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in output.iterdir()} == before
    assert notes == ["up to date: nothing was written"]
    (output / "ids.txt").unlink()  # As a process leaves it that was killed between two files.
    assert export_dataset(job, on_warning=notes.append) == paths
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {name: data for name, (data, _) in before.items()}
    (output / MADE_FROM_NAME).unlink()
    with pytest.raises(DatasetError, match=r"holds 'features.npy' already: nothing was written"):
        export_dataset(job)


def test_export_killed_before_it_replaced_an_array_of_the_same_size_continues(tmp_path, features, monkeypatch):
    after = make_features(tmp_path / "after", scale=2.0)[0]
    old = export(tmp_path, features[0], "npy")[0].read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda path, to: ("features" in str(to) and pytest.fail("killed")) or path.rename(to))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            export(tmp_path, after, "npy", overwrite=True)
    new = export(tmp_path, after, "npy")[0].read_bytes()
    assert (len(new), new == old) == (len(old), False)


def test_sidecars_are_written_if_import_defaults_do_not_suffice(tmp_path, features, regions):
    """Plain ids of features need none; `test_hostile_keys.py` reads them back."""
    export(tmp_path, features[0], "npy")
    assert files_of(tmp_path / "out") == ["features.npy", "ids.txt"]
    path, _ = make_features(tmp_path / "folders", images=["a/b", "c/b"])
    export(tmp_path, path, "npy", overwrite=True)
    assert json.loads((tmp_path / "out" / "features.import.json").read_text()) == {"id_rule": "exact", "ids": "ids.txt"}
    with pytest.raises(DatasetError, match=r"holds 'features.npy' already"):
        export(tmp_path, features[0], "npy")
    export(tmp_path, features[0], "npy", overwrite=True)
    assert files_of(tmp_path / "out") == ["features.npy", "ids.txt"]
    path, rows = regions
    array, _, boxes, *_ = export(tmp_path, path, "npy", overwrite=True)
    for file, name in ((array, "features"), (boxes, "boxes")):
        np.testing.assert_array_equal(np.load(file), np.stack([rows[key][name] for key in open_dataset(path).image_ids()]))
    assert json.loads((tmp_path / "out" / "features.import.json").read_text()) == {
        "id_rule": "name",
        "max_regions": REGIONS,
        "ids": "ids.txt",
        "boxes": "boxes.npy",
        "sizes": "sizes.npy",
    }


def test_list_entries_match_by_id_path_or_file_for_any_batch_size(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "_BATCH_BYTES", 1)
    path, values = make_features(tmp_path / "features", images=["train/a", "b", "c.jpg"])
    (tmp_path / "order.txt").write_text("photos/b.png\nc.jpg\ntrain/a.jpg#0\ntrain/a.jpg#1\n")
    array, *_ = export(tmp_path, path, "npy", lists=(str(tmp_path / "order.txt"),))
    np.testing.assert_array_equal(np.load(array), np.stack([values[key] for key in ("b", "c.jpg", "train/a", "train/a")]))
    (tmp_path / "order.txt").write_text("x/b.png\ny/b.png\n")
    with pytest.raises(InputError, match=r"order.txt, line 2: 'x/b.png' and 'y/b.png' are both the image 'b' of the dataset"):
        export_dataset(ExportJob(str(path), str(tmp_path / "out2"), "npy", lists=(str(tmp_path / "order.txt"),)))
