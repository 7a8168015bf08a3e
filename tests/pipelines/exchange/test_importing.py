import base64
import csv
import hashlib
import io
import json
import pickle
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from pipelines.exchange import importing
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from schemas.dataset import open_dataset
from schemas.errors import InputError, UsageError
from schemas.writing.validation import validate
from tests.builders import shard_by_hand, tree
from tests.pipelines.inputs.reading import write_tar

IDS = ["1000092795", "bild-ä", "猫", "a.b", "x1", "x2", "x3", "x4", "x5", "x6"]
WIDTH = 6


def make_rows(rows: int, *shape: int, dtype="float32", seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, *shape)).astype(dtype)


def write_pair(folder: Path, stem: str, values: np.ndarray, ids: list[str], *, end=".jpg") -> tuple[str, str]:
    np.save(folder / f"{stem}.npy", values)
    (folder / f"{stem}.txt").write_text("".join(f"{name}{end}\n" for name in ids), encoding="utf-8")
    return str(folder / f"{stem}.npy"), str(folder / f"{stem}.txt")


def npy_job(folder: Path, values: np.ndarray, ids: list[str], *, end=".jpg", **options) -> ImportJob:
    array, list_ = write_pair(folder, "train", values, ids, end=end)
    return ImportJob(
        **{"sources": (array,), "ids": (list_,), "output": str(folder / "out"), "name": "toy", "shards": 3, **options}
    )


def imported(job: ImportJob, **options):
    import_features(job)
    assert validate(job.output) == []
    return open_dataset(job.output, **options)


def tsv_line(image_id, boxes, features, *, width=640, height=480, lxmert=None) -> list:
    text = lambda array, dtype: base64.b64encode(np.asarray(array, dtype).tobytes()).decode()  # noqa: E731
    if lxmert is None:
        return [image_id, width, height, len(boxes), text(boxes, "<f4"), text(features, "<f4")]
    objects, conf, attrs, attrs_conf = lxmert
    middle = [text(objects, "<i8"), text(conf, "<f4"), text(attrs, "<i8"), text(attrs_conf, "<f4")]
    return [image_id, height, width, *middle, len(boxes), text(boxes, "<f4"), text(features, "<f4")]


def write_tsv(path: Path, lines: list[list]) -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows(lines)
    return str(path)


# --- npy -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "shape"), [("float16", (WIDTH,)), ("float32", (WIDTH,)), ("float32", (36, 4))])
def test_rows_of_an_npy_are_kept_bit_for_bit_by_image_id(tmp_path, dtype, shape):
    values = make_rows(len(IDS), *shape, dtype=dtype)
    manifest = import_features(npy_job(tmp_path, values, IDS, source="a tool"))
    dataset = open_dataset(tmp_path / "out", kind="features")
    assert validate(tmp_path / "out") == []
    assert sorted(dataset.image_ids()) == sorted(IDS)
    for number, image_id in enumerate(IDS):
        assert dataset.get(image_id)["feature"].tobytes() == values[number].tobytes()
    for shard in range(3):
        expected = sorted(image_id for image_id in IDS if shard_by_hand(image_id, 3) == shard)
        assert dataset.shard(shard)["image_id"].to_pylist() == expected
    assert manifest.parameters == {
        "feature": {"name": "toy", "shape": list(shape), "dtype": dtype, "source": "a tool"},
        "imported": {"format": "npy", "name": "toy", "dtype": dtype, "id_rule": "name"},
    }
    data = (tmp_path / "train.npy").read_bytes()
    assert manifest.inputs[0] == {"name": "train.npy", "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert [entry["name"] for entry in manifest.inputs] == ["train.npy", "train.txt"]


@pytest.mark.parametrize(("dtype", "order"), [("<f8", "C"), (">f4", "C"), ("<f4", "F")])
def test_other_layouts_of_numbers_become_float32(tmp_path, dtype, order):
    values = make_rows(4, WIDTH).astype(dtype)
    manifest = import_features(npy_job(tmp_path, np.asarray(values, order=order), IDS[:4]))
    assert manifest.parameters["imported"]["dtype"] == ("float64" if dtype == "<f8" else "float32")
    stored = open_dataset(tmp_path / "out")
    np.testing.assert_array_equal(stored.get(IDS[2])["feature"], values[2].astype(np.float32))


def test_array_with_boxes_becomes_regions_with_zero_rows_as_padding(tmp_path):
    values, boxes = make_rows(3, 5, 4), np.abs(make_rows(3, 5, 4, seed=3))
    values[1, 3:], boxes[1, 3:] = 0, 0
    values[2, 1], boxes[2, 1] = 0, 0  # Between others: a region.
    np.save(tmp_path / "boxes.npy", boxes)
    np.save(tmp_path / "sizes.npy", np.array([[640, 480], [500, 375], [3, 4]]))
    job = npy_job(tmp_path, values, IDS[:3], boxes=(str(tmp_path / "boxes.npy"),), sizes=(str(tmp_path / "sizes.npy"),))
    dataset = imported(job, kind="regions")
    assert dataset.spec.shape == (36, 4)
    row = dataset.get(IDS[1])
    assert (row["width"], row["height"], row["num_regions"]) == (500, 375, 3)
    np.testing.assert_array_equal(row["features"][:5], values[1])
    np.testing.assert_array_equal(row["boxes"][:5], boxes[1])
    assert not row["features"][5:].any()
    assert [dataset.get(image_id)["num_regions"] for image_id in (IDS[0], IDS[2])] == [5, 5]


@pytest.mark.parametrize("case", ["ids of rows", "ids of images", "ids of captions"])
def test_repeated_rows_collapse(tmp_path, case):
    values = make_rows(3, WIDTH)
    rows = values if case == "ids of captions" else np.repeat(values, 5, axis=0)
    ids = IDS[:3] if case == "ids of images" else [image_id for image_id in IDS[:3] for _ in range(5)]
    dataset = imported(npy_job(tmp_path, rows, ids, repeats=1 if case == "ids of rows" else 5))
    assert len(dataset) == 3
    for number in range(3):
        np.testing.assert_array_equal(dataset.get(IDS[number])["feature"], values[number])


def test_blocks_do_not_change_a_byte(tmp_path, monkeypatch):
    values = make_rows(len(IDS), WIDTH)
    import_features(npy_job(tmp_path, values, IDS))
    monkeypatch.setattr(importing, "_BLOCK_BYTES", 1)
    import_features(npy_job(tmp_path, values, IDS, output=str(tmp_path / "again")))
    assert tree(tmp_path / "again") == tree(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v, i: (v, i[:-1]), "train.txt has 9 ids but train.npy has 10 rows: they do not belong together$"),
        (lambda v, i: (np.where(v == v[3], np.nan, v), i), r"6 values of 1 images .*'a.b' \(train.npy, row 3"),
        (lambda v, i: (v.astype("float64") * 1e300, i), "not finite as float32, first of image '1000092795'"),
        (lambda v, i: (v.astype(int), i), "holds int64, expected float16, float32 or float64"),
    ],
)
def test_broken_arrays_are_refused_and_nothing_is_written(tmp_path, change, message):
    job = npy_job(tmp_path, *change(make_rows(len(IDS), WIDTH), IDS), end="")
    with pytest.raises(InputError, match=message):
        import_features(job)
    assert not (tmp_path / "out").exists()


def npy_bytes(values) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


OBJECTS = npy_bytes(np.array([{}, {}]))


def header_of(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        (pickle.dumps([1, 2]), "it is a file of another kind"),
        (OBJECTS, "it holds Python objects, which could run code when read; save it again as numbers"),
        (header_of("(2, 6)") + bytes(40), "it is cut off"),
        (header_of(f"({2**64}, 6)") + bytes(48), "its header is damaged"),
    ],
)
def test_invalid_npy_file_is_refused_with_its_flaw(tmp_path, content, flaw):
    """Numpy's advice on many of these is to load them without protection."""
    (tmp_path / "a.npy").write_bytes(content)
    (tmp_path / "a.txt").write_text("a\nb\n")
    job = ImportJob((str(tmp_path / "a.npy"),), output=str(tmp_path / "out"), name="toy")
    with pytest.raises(InputError, match=rf"a\.npy' cannot be read as an npy array of numbers: {flaw}$"):
        import_features(job)


@pytest.fixture
def files(tmp_path) -> Path:
    write_pair(tmp_path, "one", make_rows(2, WIDTH), ["a", "b"])
    write_pair(tmp_path, "two", make_rows(2, WIDTH + 1), ["c", "d"])
    write_pair(tmp_path, "runs", make_rows(2, WIDTH), ["a", "b", "a", "b"])
    write_pair(tmp_path, "r", make_rows(2, 37, 4), ["a", "b"])
    np.save(tmp_path / "boxes.npy", np.zeros((2, 36, 4)))
    write_pair(tmp_path, "s", make_rows(2, 36, 4), ["a", "b"])
    for name, width in (("nan", np.nan), ("minus", -1), ("long", 2**31)):
        np.save(tmp_path / f"{name}.npy", np.array([[width, 9], [9, 9]]))
    return tmp_path


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        (["runs.npy"], {"repeats": 2}, InputError, "runs.txt, line 2: image 'b' among the 2 lines of image 'a'"),
        (["one.npy", "two.npy"], {}, InputError, r"two.npy has rows float32 \(7,\), one.npy has float32 \(6,\)"),
        (["r.npy"], {"boxes": ("boxes.npy",)}, InputError, "has 37 regions per image, .* give --max-regions 37"),
        (["r.npy"], {"boxes": ("boxes.npy",), "max_regions": 37}, InputError, r"boxes.npy .* expected numbers \(2, 37, 4\)"),
        (["one.npy", "two.npy"], {"ids": ("one.txt",)}, UsageError, "2 arrays but 1 files with --ids: give one for each"),
        *(
            (["s.npy"], {"boxes": ("boxes.npy",), "sizes": (f"{name}.npy",)}, InputError, f"{name}.npy holds .* in pixels")
            for name in ("nan", "minus", "long")
        ),
    ],
)
def test_inconsistent_files_are_refused(files, monkeypatch, sources, options, error, message):
    monkeypatch.chdir(files)
    with pytest.raises(error, match=message):
        import_features(ImportJob(tuple(sources), "out", "toy", **options))
    assert not Path("out").exists()


# --- tsv -------------------------------------------------------------------------------------------------------------


def regions_of(image: int, boxes: int, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return np.abs(make_rows(boxes, 4, seed=image)), np.abs(make_rows(boxes, width, seed=image + 100))


@pytest.mark.parametrize("header", [False, True])
def test_bottom_up_tsv_becomes_regions(tmp_path, header):
    numbers = {"image_id": 36, "25": 10, "30": 1, "none": 0}
    images = {image_id: regions_of(n, boxes) for n, (image_id, boxes) in enumerate(numbers.items())}
    names = [["image_id", "image_w", "image_h", "num_boxes", "boxes", "features"]] if header else []
    lines = [tsv_line(image_id, *arrays) for image_id, arrays in images.items()]
    path = write_tsv(tmp_path / "trainval.tsv", [*names, *lines])
    manifest = import_features(ImportJob((path,), output=str(tmp_path / "out"), name="faster-rcnn-36", shards=2))
    assert validate(tmp_path / "out") == []
    assert manifest.inputs[0]["sha256"] == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    dataset = open_dataset(tmp_path / "out", kind="regions")
    assert dataset.spec.shape == (36, 8)
    for image_id, (boxes, features) in images.items():
        row = dataset.get(image_id)
        assert (row["width"], row["height"], row["num_regions"]) == (640, 480, len(boxes))
        assert row["boxes"][: len(boxes)].tobytes() == boxes.tobytes()
        assert row["features"][: len(boxes)].tobytes() == features.tobytes()
        for name in ("boxes", "features"):
            assert not row[name][len(boxes) :].any()
        for name in ("class_ids", "class_scores", "attribute_ids", "attribute_scores"):
            assert not row[name].any()


def test_lxmert_tsv_brings_classes_and_attributes(tmp_path):
    boxes, features = regions_of(1, 3)
    labels = ([7, 1599, 0], [0.5, 0.25, 1], [399, -1, 2], [0.125, 0.5, 0.75])
    path = write_tsv(tmp_path / "a.tsv", [tsv_line("a.jpg", boxes, features, lxmert=labels)])
    import_features(ImportJob((path,), output=str(tmp_path / "out"), name="x", max_regions=4))
    row = open_dataset(tmp_path / "out").get("a")
    assert (row["width"], row["height"]) == (640, 480)
    # argmax over the probabilities without background in the file, so 0 is the first class; here that is 1, and 0 is none.
    assert row["class_ids"].tolist() == [8, 1600, 1, 0]
    assert row["attribute_ids"].tolist() == [400, 0, 3, 0]
    assert row["class_scores"].tolist() == [0.5, 0.25, 1, 0]
    assert row["attribute_scores"].tolist() == [0.125, 0.5, 0.75, 0]


GOOD = tsv_line("a", *regions_of(1, 2))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD[:5]], "t.tsv has 5 columns and lacks image_id, .*expected the 6 columns of bottom-up-attention"),
        ([GOOD, GOOD[:5]], "t.tsv, line 2 has 5 columns, expected 6"),
        ([[*GOOD[:4], "AAAA", GOOD[5]]], "column 'boxes' has 3 bytes, expected 32 for 2 boxes"),
        ([[*GOOD[:5], "AAAA"]], "column 'features' has 3 bytes, expected a multiple of 8 for 2 boxes"),
        ([tsv_line("b", *regions_of(2, 40))], "t.tsv, line 1: an image with 40 regions, .* give --max-regions 40"),
        ([GOOD, tsv_line("b", *regions_of(2, 2, width=9))], "line 2: image 'b' has features of 9 values, those before it 8"),
        ([tsv_line("b", np.full((1, 4), np.inf), np.ones((1, 8)))], "4 values of 1 images are not finite as float32"),
        ([tsv_line("b", np.ones((1, 4)), np.ones((1, 8)), lxmert=([40000], [1], [1], [1]))], "class_ids lie between 40000"),
    ],
)
def test_broken_tsv_files_are_refused(tmp_path, lines, message):
    job = ImportJob((write_tsv(tmp_path / "t.tsv", lines),), output=str(tmp_path / "out"), name="x")
    with pytest.raises(InputError, match=message):
        import_features(job)
    assert not (tmp_path / "out").exists()


# --- hdf5 ------------------------------------------------------------------------------------------------------------


ROW_PER_REGION = {"image_features": np.ones((5, 3), "f4"), "image_bb": np.ones((5, 4), "f4"), "pos_boxes": [[0, 2], [2, 5]]}
XI = {"array": "x", "id_array": "i"}


@pytest.fixture
def hdf5(tmp_path):
    """Write an HDF5 file of named arrays and return a job for it."""

    def write(arrays, **options) -> ImportJob:
        with h5py.File(tmp_path / "f.h5", "w") as file:
            for name, values in arrays.items():
                file[name] = values
        return ImportJob((str(tmp_path / "f.h5"),), output=str(tmp_path / "out"), name="toy", shards=2, **options)

    return write


@pytest.mark.parametrize("ids", [[b"a.jpg", b"b.jpg", b"c.jpg"], [30, 9, 25]])
def test_hdf5_array_with_ids_beside_it(tmp_path, hdf5, ids):
    values = make_rows(3, 2, WIDTH, dtype="float16")
    dataset = imported(hdf5({"train/features": values, "train/ids": ids}, array="train/features", id_array="train/ids"))
    assert dataset.spec.dtype == "float16"
    for number, stored_id in enumerate(ids):
        image_id = stored_id.decode()[0] if isinstance(stored_id, bytes) else str(stored_id)
        assert dataset.get(image_id)["feature"].tobytes() == values[number].tobytes()


def test_hdf5_array_with_a_list_of_ids(tmp_path, hdf5):
    (tmp_path / "ids.txt").write_text("c\nc\na\na\n")
    values = np.repeat(make_rows(2, WIDTH), 2, axis=0)
    import_features(hdf5({"features": values}, array="features", ids=(str(tmp_path / "ids.txt"),)))
    np.testing.assert_array_equal(open_dataset(tmp_path / "out").get("a")["feature"], values[2])


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ({"x": np.ones((2, 3)), "i": [1]}, XI, InputError, "f.h5:i has 1 ids but f.h5:x has 2 rows"),
        ({"x": np.ones((2, 3)), "i": [1, 2]}, {}, InputError, "expected arrays of one shape, one per image"),
        ({"x": np.ones((2, 3)), "i": [b"a", b"\xe4"]}, XI, InputError, r"f.h5:i, row 1: b'\\xe4' is not UTF-8"),
        ({"a": np.ones(3), "b": np.full(3, np.nan)}, {}, InputError, r"3 values of 1 images .* first of image 'b' \(f.h5:b\)"),
        (ROW_PER_REGION, {"array": "image_features"}, InputError, "f.h5 holds 'pos_boxes': .* one row per region,"),
    ],
)
def test_broken_hdf5_files_are_refused(hdf5, arrays, options, error, message):
    with pytest.raises(error, match=message):
        import_features(hdf5(arrays, **options))


def test_unreadable_and_unwritten_hdf5_arrays_are_refused(tmp_path, hdf5):
    values = make_rows(6, 4)
    job = hdf5({"i": list(range(6))}, array="x", id_array="i")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        x = file.create_dataset("x", data=values, chunks=(2, 4), fletcher32=True)
        position = x.id.get_chunk_info(1).byte_offset
    data = bytearray((tmp_path / "f.h5").read_bytes())
    data[position] ^= 255
    (tmp_path / "f.h5").write_bytes(data)
    with pytest.raises(InputError, match=r"f.h5:x cannot be read by HDF5 .*copy the file again"):
        import_features(job)
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["x"]
        file.create_dataset("x", (6, 4), "f4", chunks=(2, 4))[:4] = values[:4]
    with pytest.raises(InputError, match=r"f.h5:x has 2 of 3 chunks, and HDF5 would fill in the others"):
        import_features(job)


@pytest.mark.parametrize("kind", ["raw", "virtual", "link", "group", "soft link", "ids"])
def test_values_of_hdf5_in_other_files_are_refused(tmp_path, hdf5, kind):
    """A stranger's file names any file of the user, whose bytes would become features."""
    secret, private = tmp_path / "secret.txt", tmp_path / "private.h5"
    secret.write_text("password" * 8)
    with h5py.File(private, "w") as file:
        file["g/x"], file["i"] = np.ones((2, 8), np.float32), [1, 2]
    arrays = {"i": [1, 2]} if kind != "ids" else {"x": np.ones((2, 8), np.float32)}
    job = hdf5(arrays, array="g/x" if kind == "group" else "x", id_array="i")
    with h5py.File(tmp_path / "f.h5", "a") as file:
        if kind == "raw":
            file.create_dataset("x", (2, 8), "<f4", external=[(str(secret), 0, 64)])
        elif kind == "virtual":
            layout = h5py.VirtualLayout((2, 8), "f4")
            layout[:] = h5py.VirtualSource(str(private), "g/x", shape=(2, 8))
            file.create_virtual_dataset("x", layout)
        elif kind == "soft link":
            file["out"], file["x"] = h5py.ExternalLink(str(private), "/"), h5py.SoftLink("/out/g/x")
        else:
            name, target = {"link": ("x", "/g/x"), "group": ("g", "/g"), "ids": ("i", "/i")}[kind]
            file[name] = h5py.ExternalLink(str(private), target)
    reason = "its values are in other files" if kind in ("raw", "virtual") else "it is a link to another file"
    with pytest.raises(InputError, match=rf"f\.h5:\w+ is refused: {reason}, which could be any file of yours"):
        import_features(job)
    assert not (tmp_path / "out").exists()


def test_hdf5_links_are_followed_and_dangling_links_and_loops_refused(hdf5, tmp_path):
    job = hdf5({"g/a": np.ones(3)})
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["b"], file["g/c"] = file["g/a"], h5py.SoftLink("/g/a")
    import_features(job)
    assert sorted(open_dataset(tmp_path / "out").image_ids()) == ["b", "g/a", "g/c"]
    with h5py.File(tmp_path / "f.h5", "a") as file:
        file["g/none"] = h5py.SoftLink("/nowhere")
    with pytest.raises(InputError, match=r"f.h5:g/none is a link to something that does not exist"):
        import_features(job)
    with h5py.File(tmp_path / "f.h5", "a") as file:
        del file["g/none"]
        file["g/round"] = file["g"]
    with pytest.raises(InputError, match=r"f.h5:g/round is a link to a group around it: delete the link"):
        import_features(job)


# --- the number of shards --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_number_of_shards_is_that_of_the_dataset_before_or_of_another(tmp_path):
    job = npy_job(tmp_path, make_rows(len(IDS), WIDTH), IDS)
    automatic, like = replace(job, shards="auto"), replace(job, shards=f"like:{job.output}", output=str(tmp_path / "like"))
    jobs = [job, automatic, like, replace(automatic, overwrite=True)]
    assert [len(import_features(job).shards) for job in jobs] == [3, 3, 3, 16]


# --- webdataset ------------------------------------------------------------------------------------------------------


ROW = npy_bytes(np.ones(3, "f4"))
LABELS = "regions.json does not hold labels of regions"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.feature.npy", ROW), ("b.cls", b"1")], "x.tar, sample 'b' has no feature.npy, only cls"),
        ([("a.feature.npy", ROW), ("./a.feature.npy", ROW)], r"x.tar holds '\./a.feature.npy' twice"),
        *(
            ([("a.feature.npy", data)], "x.tar, sample 'a': feature.npy is not an npy array of numbers")
            for data in (ROW[:9], header_of(f"({2**50},)"), OBJECTS)
        ),
        ([("a.feature.npy", ROW), ("b.feature.npy", npy_bytes(np.ones(4, "f4")))], r"sample 'b' has a feature float32 \(4,\)"),
    ],
)
def test_broken_tar_files_are_refused(tmp_path, members, message):
    job = ImportJob((str(tmp_path / "x.tar"),), output=str(tmp_path / "out"), name="x")
    (tmp_path / "x.tar").write_bytes(b"text" * 1000)
    with pytest.raises(InputError, match=r"x.tar' is not a whole tar: at byte 0: .* Copy or write it again"):
        import_features(job)
    write_tar(tmp_path / "x.tar", members)
    with pytest.raises(InputError, match=message):
        import_features(job)
    assert not (tmp_path / "out").exists()


REGION_LABELS = {"width": 4, "height": 4, "num_regions": 2} | {
    name: [0, 0] for name in ("class_ids", "class_scores", "attribute_ids", "attribute_scores")
}


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        *(
            ("regions.json", json.dumps(REGION_LABELS | changed).encode(), LABELS)
            for changed in ({"width": -1}, {"num_regions": 3}, {"class_ids": [2**15, 0]}, {"class_scores": [0]})
        ),
        ("regions.json", json.dumps(REGION_LABELS | {"attribute_ids": [0, -1]}).encode(), LABELS),
        ("regions.json", json.dumps(REGION_LABELS | {"num_regions": 1}).encode(), f"{LABELS} .values beyond the 1 regions"),
        ("regions.json", b"[" * 100_000, LABELS),
        ("feature.npy", npy_bytes(np.zeros((2, 4, 3), "f4")), r"has a feature \(.*\), expected \[R, D\] beside boxes"),
        ("boxes.npy", npy_bytes(np.zeros((3, 4), "f4")), r"has boxes .*, expected numbers \(2, 4\)"),
        ("boxes.npy", npy_bytes(np.zeros((2, 4), "c8")), r"has boxes .*, expected numbers \(2, 4\)"),
    ],
)
def test_regions_in_tars_with_false_counts_are_refused(tmp_path, member, value, message):
    values = npy_bytes(np.ones((2, 4), "f4"))
    members = {"feature.npy": values, "boxes.npy": values, "regions.json": json.dumps(REGION_LABELS).encode()}
    job = ImportJob((str(tmp_path / "x.tar"),), output=str(tmp_path / "out"), name="x")
    write_tar(tmp_path / "x.tar", [(f"a.{name}", data) for name, data in {**members, member: value}.items()])
    with pytest.raises(InputError, match=rf"x\.tar, sample 'a'.* {message}"):
        import_features(job)
    assert not (tmp_path / "out").exists()
    write_tar(tmp_path / "x.tar", [(f"a.{name}", data) for name, data in members.items()])
    assert import_features(job).rows == 1


def test_joined_tar_files_are_imported_whole(tmp_path):
    one, two = (
        write_tar(tmp_path / name, [(f"{name}{n}.feature.npy", npy_bytes(np.full(3, n, "f4"))) for n in range(3)])
        for name in "ab"
    )
    (tmp_path / "x.tar").write_bytes(one.read_bytes() + two.read_bytes())
    dataset = imported(ImportJob((str(tmp_path / "x.tar"),), output=str(tmp_path / "out"), name="x"))
    expected = {f"{name}{n}": [n, n, n] for name in "ab" for n in range(3)}
    assert {row["image_id"]: row["feature"] for row in dataset.table().to_pylist()} == expected


# --- sidecars of exported files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_options_win_over_a_sidecar_and_another_list_has_entries_of_its_own(tmp_path):
    array, list_ = write_pair(tmp_path, "train", make_rows(2, WIDTH), ["x/a", "y/b"])
    (tmp_path / "train.import.json").write_text('{"id_rule": "exact", "ids": "train.txt"}')
    (tmp_path / "other.lst").write_text("x/a.jpg\ny/b.jpg\n")

    def image_ids(**options):
        import_features(ImportJob((array,), output=str(tmp_path / "out"), name="toy", overwrite=True, **options))
        return sorted(open_dataset(tmp_path / "out").image_ids())

    assert image_ids() == image_ids(ids=(list_,)) == ["x/a.jpg", "y/b.jpg"]
    assert image_ids(id_rule="path") == ["x/a", "y/b"]
    assert image_ids(ids=(str(tmp_path / "other.lst"),)) == ["a", "b"]


def test_files_with_different_sidecars_are_refused(tmp_path):
    pairs = [
        write_pair(tmp_path, stem, make_rows(2, WIDTH), ids) for stem, ids in (("train", ["x/a", "y/b"]), ("val", ["c", "d"]))
    ]
    (tmp_path / "train.import.json").write_text('{"id_rule": "exact", "ids": "train.txt"}')
    job = ImportJob(tuple(array for array, _ in pairs), output=str(tmp_path / "out"), name="toy")
    with pytest.raises(UsageError, match=r"train.npy and val.npy were exported with different options .*: give --id-rule"):
        import_features(job)
    import_features(replace(job, id_rule="path"))
    assert sorted(open_dataset(tmp_path / "out").image_ids()) == ["c", "d", "x/a", "y/b"]


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"id_rule": "all"}', '{"boxes": "../b.npy"}', '{"max_regions": 0}', '{"ids": 1}', '{"other": 1}']
)
def test_damaged_sidecars_are_refused(tmp_path, content):
    array, _ = write_pair(tmp_path, "train", make_rows(2, WIDTH), ["a", "b"])
    (tmp_path / "train.import.json").write_text(content)
    with pytest.raises(InputError, match=r"train.import.json' does not hold options as `export` writes them"):
        import_features(ImportJob((array,), output=str(tmp_path / "out"), name="toy"))
