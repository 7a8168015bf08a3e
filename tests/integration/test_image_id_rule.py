"""One rule for image ids, whichever command reads them: control characters are errors that name their place, other text is kept."""

import csv
import io
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.exchange.image_lists import ImageIds, make_image_id
from pipelines.inputs.captions import open_source
from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.images import open_images
from schemas.errors import InputError

ODD = [" a ", "cafe\u0301", "caf\u00e9", "a\u2028b", "\u202eb", "A.b", "x" * 200]
CONTROLS = ["\x00", "\t", "\n", "\x1b", "\x7f", "\x85", "\x9b"]


def _captions_csv(folder, ids):
    with (folder / "captions.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("image_id", "text"), *((image_id, "a") for image_id in ids)])
    return _captions(folder / "captions.csv")


def _captions_jsonl(folder, ids):
    path = folder / "captions.jsonl"
    path.write_text("".join(json.dumps({"image_id": image_id, "text": "a"}) + "\n" for image_id in ids))
    return _captions(path)


def _captions_parquet(folder, ids):
    pq.write_table(pa.table({"image_id": ids, "text": ["a"] * len(ids)}), folder / "captions.parquet")
    return _captions(folder / "captions.parquet")


def _captions(path):
    source = open_source("table", str(path), language="en")
    return [row.image_id for part in source.parts(EVERYTHING) for row in source.read(part, EVERYTHING)]


def _images(path):
    return [ref.image_id for ref in open_images(str(path)).refs()]


def _image_folder(folder, ids):
    for image_id in ids:
        (folder / "photos").mkdir(exist_ok=True)
        (folder / "photos" / f"{image_id}.jpg").write_bytes(b"")
    return sorted(_images(folder / "photos"), key=ids.index)


def _image_table(folder, ids):
    path = folder / "images.jsonl"
    path.write_text("".join(json.dumps({"image_id": image_id, "uri": "a.jpg"}) + "\n" for image_id in ids))
    return _images(path)


def _image_tar(folder, ids):
    with tarfile.open(folder / "images.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for image_id in ids:
            tar.addfile(tarfile.TarInfo(f"{image_id}.jpg"), io.BytesIO(b""))
    return _images(folder / "images.tar")


def _image_parquet(folder, ids):
    pq.write_table(pa.table({"image_id": ids, "bytes": [b"1"] * len(ids)}), folder / "images.parquet")
    return _images(folder / "images.parquet")


def _image_paths(folder, ids):
    values = [{"bytes": b"1", "path": f"{image_id}.jpg"} for image_id in ids]
    pq.write_table(pa.table({"image": values}), folder / "images.parquet")
    return _images(folder / "images.parquet")


def _import_list(folder, ids):
    (folder / "ids.txt").write_text("".join(f"{image_id}\n" for image_id in ids), encoding="utf-8", newline="")
    return ImageIds("exact").read_list(folder / "ids.txt")


def _import_entry(folder, ids):
    return [make_image_id(image_id, "exact", place="'here'") for image_id in ids]


READERS = [
    _captions_csv,
    _captions_jsonl,
    _captions_parquet,
    _image_folder,
    _image_table,
    _image_tar,
    _image_parquet,
    _image_paths,
    _import_list,
    _import_entry,
]
IMPOSSIBLE = {(_import_list, "\n"), (_image_folder, "\x00"), (_image_tar, "\x00")}


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__.strip("_"))
def test_odd_ids_are_read_unchanged(read, tmp_path):
    assert read(tmp_path, ODD) == ODD


@pytest.mark.parametrize(
    ("read", "control"),
    [
        pytest.param(read, control, id=f"{read.__name__.strip('_')}-{control!a}")
        for read in READERS
        for control in CONTROLS
        if (read, control) not in IMPOSSIBLE
    ],
)
def test_control_characters_in_ids_are_refused(read, control, tmp_path):
    place = r"'.*', (row|line|file|member)|^(ids.txt, line 2|'here')"
    with pytest.raises(InputError, match=f"({place}).*the image id .* has the control character"):
        read(tmp_path, ["fine", f"a{control}b"])
