"""Records with hostile keys in every format of captions and images: what is read is what was written, or an error.

A key is a path, with dots, spaces, capitals, characters in either Unicode form, of up to 10,000 characters. `SOURCES` says what
each format can hold. An error is right only where two records would get one id, or an id is empty or has a control character.
"""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.captions.opening import open_captions
from pipelines.inputs.images.opening import open_images
from pipelines.text.caption_shards import blocks_of
from schemas.errors import InputError
from tests.pipelines.inputs.reading import write, write_structs, write_table, write_tar
from tests.pipelines.text.captions import sort_captions

NAMES = [
    *("a", "A", "0", "00", "a.b", "a..", "a .", " a", "a ", "a#1", 'a"b', '"a"', "a,b", "a\u202eb", "a\u2028b"),
    *("\u00e9", "e\u0301", "\u00c5", "A\u030a", "\u212b", "\u4e2d", "\U0001f600"),
]
KEYS = [*NAMES, *(f"{name}/{name}/{number}{name}" for number, name in enumerate(NAMES, start=1))]
CONTROLS = ["\n", "\t", "\x1b", "\x85", "\r"]
REPEATED = "belongs to two|would both be|are both|occurs twice"
INVALID = "control character|is empty|is ''|a CR outside quotes"
SUFFIXES = (".csv", ".tsv", ".jsonl", ".parquet")
LONGEST_NAME = 200  # Bytes of a file's name on a disk, well below the limit.


@dataclass(frozen=True)
class Source:
    """A format, written and read back.

    Attributes:
        read: writes keys to a folder, and returns the pairs of id and value that are read.
        paths: ids are made from paths, and their extensions are dropped.
        on_disk: keys are names of files.
        lines: a key is a line of text, which cannot hold a line end.
        groups: a key that occurs twice is one image with two captions.
    """

    read: Callable[[Path, list[str], str], list[tuple[str, str]]]
    paths: bool = False
    on_disk: bool = False
    lines: bool = False
    groups: bool = False


def _captions(format_: str, path: Path, **options: str) -> list[tuple[str, str]]:
    source = open_captions(format_, path, **options)
    blocks = [
        block
        for number, part in enumerate(source.parts(EVERYTHING))
        for block in blocks_of(source.tables(part, EVERYTHING), number)
    ]
    rows = sort_captions(blocks)
    return list(zip(rows["image_id"].to_pylist(), rows["text"].to_pylist(), strict=True))


def _images(path: Path, **options: str) -> list[tuple[str, str]]:
    source = open_images(path, **options)
    refs = sorted(source.refs())
    source.check_ids(refs)
    return [(ref.image_id, source.read(ref).decode()) for ref in refs]


def _coco(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    images = [{"id": number, "file_name": f"{key}.jpg"} for number, key in enumerate(keys)]
    annotations = [{"id": number, "image_id": number, "caption": str(number)} for number in range(len(keys))]
    path = folder / "captions_x.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations}))
    return _captions("coco", path, id_rule=ids)


def _karpathy(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    images = []
    for number, key in enumerate(keys):
        parent, _, name = f"{key}.jpg".rpartition("/")
        sentences = [{"raw": str(number), "imgid": number, "sentid": number}]
        image = {"filename": name, "imgid": number, "sentids": [number], "split": "x", "sentences": sentences}
        images.append({**image, "filepath": parent} if parent else image)
    path = folder / "dataset_x.json"
    path.write_text(json.dumps({"images": images}))
    return _captions("karpathy", path, id_rule=ids)


def _lines(path: Path, lines: list[str]) -> None:
    write(path, "".join(f"{line}\n" for line in lines))


def _scan(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    _lines(folder / "x_caps.txt", [str(number) for number in range(len(keys)) for _ in "ab"])
    _lines(folder / "x_ids.txt", keys)
    rows = _captions("scan", folder)
    assert rows[::2] == rows[1::2]
    return rows[::2]


def _multi30k(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    _lines(folder / "task1/raw/x.en", [str(number) for number in range(len(keys))])
    # Behind # is the caption's id.
    _lines(folder / "task1/image_splits/x.txt", [f"{key}.jpg#7" for key in keys])
    return _captions("multi30k", folder, id_rule=ids)


def _table(path: Path, keys: list[str], values: str = "text") -> Path:
    return write_table(path, [{"image_id": key, values: str(number)} for number, key in enumerate(keys)])


def _table_of_captions(suffix: str) -> Callable[[Path, list[str], str], list[tuple[str, str]]]:
    return lambda folder, keys, ids: _captions("table", _table(folder / f"t{suffix}", keys))


def _table_of_images(suffix: str) -> Callable[[Path, list[str], str], list[tuple[str, str]]]:
    def read(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
        for number in range(len(keys)):
            (folder / str(number)).write_text(str(number))
        return _images(_table(folder / f"t{suffix}", keys, "uri"), id_rule=ids)

    return read


def _folder(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    for number, key in enumerate(keys):
        write(folder / "f" / (f"{key}.jpg" if keys.index(key) == number else f"{key}.png"), str(number))
    return _images(folder / "f", id_rule=ids)


def _tar(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    members = [(f"{key}.jpg", str(number).encode()) for number, key in enumerate(keys)]
    write_tar(folder / "t" / "0.tar", members[::2], tarfile.GNU_FORMAT)
    write_tar(folder / "t" / "1.tar", members[1::2], tarfile.PAX_FORMAT)
    return _images(folder / "t", id_rule=ids)


def _parquet_keys(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    pq.write_table(pa.table({"key": keys, "jpg": [str(n).encode() for n in range(len(keys))]}), folder / "p.parquet")
    return _images(folder / "p.parquet", id_rule=ids)


def _parquet_paths(folder: Path, keys: list[str], ids: str) -> list[tuple[str, str]]:
    rows = [(str(number).encode(), f"{key}.jpg") for number, key in enumerate(keys)]
    return _images(write_structs(folder / "p.parquet", rows), id_rule=ids)


SOURCES = {
    "coco": Source(_coco, paths=True),
    "karpathy": Source(_karpathy, paths=True),
    "multi30k": Source(_multi30k, paths=True, lines=True),
    "scan": Source(_scan, lines=True),
    **{f"captions{suffix}": Source(_table_of_captions(suffix), groups=True) for suffix in SUFFIXES},
    **{f"images{suffix}": Source(_table_of_images(suffix)) for suffix in SUFFIXES},
    "folder": Source(_folder, paths=True, on_disk=True),
    "tar": Source(_tar, paths=True),
    "parquet keys": Source(_parquet_keys),
    "parquet paths": Source(_parquet_paths, paths=True),
}


CASES = [(name, ids) for name, source in SOURCES.items() for ids in ("name", "path")[: 1 + source.paths]]


@pytest.mark.parametrize(("name", "ids"), CASES)
def test_hostile_keys_are_read_back(name, ids, tmp_path):
    source = SOURCES[name]
    keys = [*KEYS, *["z" * (LONGEST_NAME if source.on_disk else 10_000)] * (1 + source.groups)]
    if name == "multi30k":
        keys = [key for key in keys if "#" not in key]
    expected = [key.split("/")[-1] if source.paths and ids == "name" else key for key in keys]
    rows = source.read(tmp_path, keys, ids)
    assert Counter(rows) == Counter((image_id, str(number)) for number, image_id in enumerate(expected))


@pytest.mark.parametrize(("name", "ids"), CASES)
def test_repeated_and_invalid_keys_are_refused(name, ids, tmp_path):
    source = SOURCES[name]
    repeated = [] if source.groups else [["b", "a", "a"]]
    repeated += [["x/a", "y/a"]] if source.paths and ids == "name" else []
    invalid = [["b", f"a{control}x"] for control in (CONTROLS[1:4] if source.lines else CONTROLS)]
    invalid += [] if source.paths else [["b", ""]]
    for number, keys in enumerate([*repeated, *invalid]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(InputError, match=REPEATED if keys in repeated else INVALID):
            source.read(folder, keys, ids)
