"""Records with hostile keys, written in every exchange format and read back.

`HOLDS` says which keys the file of a layout can hold; each of these comes back without an option. Files of other tools are written
with numpy and h5py alone: as many rows as keys arrive, or the error names two keys and the option that keeps them apart.
"""

import base64
import random
import re
from functools import partial

import h5py
import numpy as np
import pytest

from pipelines.exchange.exporting import export_dataset
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ExportJob, ImportJob
from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.captions.opening import open_captions
from schemas.dataset import open_dataset
from schemas.errors import DatasetError, InputError
from schemas.features import FeatureSpec
from tests.builders import region_row, write_rows

WIDTH, REGIONS = 3, 2
# A name in NFC and NFD, cases, dots, extensions, caption numbers, spaces, a byte order mark, a line separator, other scripts.
PIECES = ["a", "A", "ß", "caf\u00e9", "cafe\u0301", "İ", "猫", "a.b", ".", "..", "x.jpg", "x.JPG", "x.png", "a#1", "a#2"]
PIECES += [" a", "a ", "\ufeffa", "a\u2028b", "image_id", "7", "07", "\\", "%2F", "'", "~"]
LONG = "long/" + "0123456789" * 1000

HOLDS = {
    "tsv": lambda key: '"' not in key,
    # A relative path, and the name of a sample ends at the first dot behind the last slash.
    "webdataset": lambda key: not {"", ".", ".."} & set(key.split("/")) and "." not in key.rpartition("/")[2],
    # As HDF5 has it: no empty component, and "." is the group itself.
    "hdf5": lambda key: not {"", "."} & set(key.split("/")),
}


PAIRS = list(zip(PIECES, PIECES[5:] + PIECES[:5], strict=True))
KEYS = {LONG, *PIECES, *(f"{one}{join}{other}" for one, other in PAIRS for join in ("", "."))}
KEYS |= {f"{folder}/{name}" for folder in ("a", "..", "caf\u00e9", " a", "\\") for name in PIECES}
KEYS = random.Random(0).sample(sorted(KEYS), k=len(KEYS))
KEYS.sort(key=lambda key: key != "\ufeffa")  # Comes first, where readers take it for the byte order mark of the list.


def make_values(keys: list[str], *shape: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(len(keys))
    return {key: rng.standard_normal(shape or (WIDTH,)).astype(np.float32) for key in keys}


def write_features(path, values, dtype="float32"):
    rows = [{"image_id": key, "feature": value.astype(dtype)} for key, value in values.items()]
    write_rows(path, "features", rows, FeatureSpec("toy", (WIDTH,), dtype), shards=2)
    return path


def write_regions(path, values):
    rows = []
    for key, value in values.items():
        used = 1 + len(key) % REGIONS
        labels = {f"{name}_ids": np.ones(REGIONS, "int16") for name in ("class", "attribute")}
        labels |= {f"{name}_scores": np.ones(REGIONS, "float32") for name in ("class", "attribute")}
        rows.append(region_row(key, np.ones((REGIONS, 4), "float32"), value, used, **labels))
    write_rows(path, "regions", rows, FeatureSpec("toy", (REGIONS, WIDTH)), shards=2)
    return path


def write_captions(path, keys):
    same = {"language": "en", "portion": "comparable", "index": 0, "tokens": []}
    rows = [
        {"image_id": key, "split": split, "text": f"of {key}", **same}
        for key, split in zip(keys, ["train", "val"] * len(keys), strict=False)
    ]
    write_rows(path, "captions", rows, shards=2)
    return str(path)


def write_list(path, keys) -> str:
    path.write_text("\ufeff" + "".join(f"{key}\n" for key in keys), encoding="utf-8", newline="")
    return str(path)


def export(tmp_path, dataset, layout, **options):
    return export_dataset(ExportJob(str(dataset), str(tmp_path / "files"), layout, **options))


def import_(tmp_path, *paths, **options):
    import_features(ImportJob(tuple(map(str, paths)), str(tmp_path / "back"), "toy", shards=2, **options))
    return open_dataset(tmp_path / "back")


def assert_same_rows(back, dataset, columns=None):
    before = [open_dataset(dataset).shard(number).select(columns or back.schema.names) for number in range(2)]
    assert [back.shard(number).select(columns or back.schema.names) for number in range(2)] == before


# --- what export writes ----------------------------------------------------------------------------------------------


WITHOUT_LABELS = ["image_id", "width", "height", "num_regions", "boxes", "features"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options", "columns"),
    [("npy", {}, WITHOUT_LABELS), ("tsv", {}, WITHOUT_LABELS), ("tsv", {"columns": "lxmert"}, None), ("webdataset", {}, None)],
)
def test_regions_come_back(tmp_path, layout, options, columns):
    keys = holdable(layout, KEYS)
    dataset = write_regions(tmp_path / "regions", make_values(keys, REGIONS, WIDTH))
    paths = export(tmp_path, dataset, layout, **options)
    assert_same_rows(import_(tmp_path, *(paths if layout == "webdataset" else paths[:1])), dataset, columns)


def test_features_come_back_in_any_order(tmp_path):
    dataset = write_features(tmp_path / "features", make_values(KEYS))
    array, *_ = export(tmp_path, dataset, "npy")
    assert_same_rows(import_(tmp_path, array), dataset)
    write_list(tmp_path / "order.txt", KEYS)
    array, *_ = export(tmp_path, dataset, "npy", lists=(str(tmp_path / "order.txt"),), overwrite=True)
    assert np.load(array).tobytes() == np.stack(list(make_values(KEYS).values())).tobytes()
    assert_same_rows(import_(tmp_path, array, overwrite=True), dataset)


def test_scan_comes_back_with_its_captions(tmp_path):
    dataset = write_features(tmp_path / "features", make_values(KEYS))
    paths = export(tmp_path, dataset, "scan", captions=write_captions(tmp_path / "captions", KEYS))
    arrays = (path for path in paths if path.name.endswith("_ims.npy"))
    assert_same_rows(import_(tmp_path, *arrays), dataset)
    source = open_captions("scan", tmp_path / "files", language="en")
    read = {row.image_id: (row.split, row.text) for part in source.parts(EVERYTHING) for row in source.read(part, EVERYTHING)}
    assert read == {key: (split, f"of {key}") for key, split in zip(KEYS, ["train", "val"] * len(KEYS), strict=False)}


def test_mulisera_comes_back(tmp_path):
    dataset = write_features(tmp_path / "features", make_values(KEYS), "float16")
    lists = (write_list(tmp_path / "train.txt", KEYS[::2]), write_list(tmp_path / "val.txt", KEYS[1::2]))
    paths = export(tmp_path, dataset, "mulisera", lists=lists)
    arrays = (path for path in paths if path.suffix == ".npy")
    assert_same_rows(import_(tmp_path, *arrays), dataset)


@pytest.mark.parametrize("layout", ["npy", "tsv"])
@pytest.mark.parametrize("key", ["", "a\nb", "a\rb"])
def test_lists_refuse_unsupported_keys(tmp_path, layout, key):
    values = make_values(["a", key], REGIONS, WIDTH)
    dataset = write_regions(tmp_path / "regions", values)
    with pytest.raises(DatasetError, match=rf"image id {re.escape(repr(key))} (is empty|contains a line break|holds)"):
        export(tmp_path, dataset, layout)


# --- files of other tools --------------------------------------------------------------------------------------------


def write_npy(folder, keys, values):
    np.save(folder / "x.npy", np.stack([values[key] for key in keys]))
    write_list(folder / "x.ids", keys)
    return partial(import_, folder, folder / "x.npy")


def write_tsv(folder, keys, values):
    def text(array):
        return base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()

    lines = ["image_id\timage_w\timage_h\tnum_boxes\tboxes\tfeatures\n"]
    lines += [f"{key}\t640\t480\t1\t{text(np.ones(4))}\t{text(values[key])}\n" for key in keys]
    (folder / "x.tsv").write_text("".join(lines), encoding="utf-8", newline="")
    return partial(import_, folder, folder / "x.tsv", max_regions=1)


def write_hdf5(folder, keys, values):
    with h5py.File(folder / "x.h5", "w") as file:
        for key in keys:
            file[key] = values[key]
    return partial(import_, folder, folder / "x.h5")


def write_hdf5_array(folder, keys, values):
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"], file["ids"] = np.stack([values[key] for key in keys]), [key.encode() for key in keys]
    return partial(import_, folder, folder / "x.h5", array="x", id_array="ids")


WRITERS = {"npy": write_npy, "tsv": write_tsv, "hdf5": write_hdf5, "hdf5 array": write_hdf5_array}


def holdable(layout: str, keys: list[str]) -> list[str]:
    keys = [key for key in keys if HOLDS.get(layout, lambda key: True)(key)]
    if layout != "hdf5":
        return keys
    parents = {key[:position] for key in keys for position, letter in enumerate(key) if letter == "/"}
    return [key for key in keys if key not in parents]


@pytest.mark.parametrize("layout", WRITERS)
def test_each_key_is_a_row_or_the_error_names_the_option(tmp_path, layout):
    keys = holdable(layout, KEYS)
    values = make_values(keys)
    import_them = WRITERS[layout](tmp_path, keys, values)
    with pytest.raises(InputError) as failure:
        import_them()
    rule = re.search(
        r"(?s): ('.*'|\".*\") and .* would both be the image .*: give --id-rule (path|exact) to keep", str(failure.value)
    )
    assert rule, failure.value
    assert not (tmp_path / "back").exists()
    back = import_them(id_rule="exact")
    assert sorted(back.image_ids()) == sorted(keys)
    column = "feature" if back.kind == "features" else "features"
    for key in keys:
        assert np.asarray(back.get(key)[column]).tobytes() == values[key].tobytes()


@pytest.mark.parametrize("layout", ["npy", "tsv", "hdf5 array"])
def test_duplicates_are_one_row_if_they_are_equal_and_an_error_otherwise(tmp_path, layout):
    keys, values = ["a", "b/c.d", "b/c.d", "a"], make_values(["a", "b/c.d"])
    assert len(WRITERS[layout](tmp_path, keys, values)()) == 2

    class Rows(dict):
        rows = iter([values["a"], values["b/c.d"], values["a"], values["a"]])

        def __getitem__(self, key):
            return next(self.rows)

    import_them = WRITERS[layout](tmp_path, keys, Rows())
    with pytest.raises(InputError, match=r"image 'c\.d' occurs at .* and again, with other values, at .*--id-rule exact"):
        import_them(overwrite=True)
    assert len(open_dataset(tmp_path / "back")) == 2
