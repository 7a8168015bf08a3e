"""A byte order mark and CR LF change nothing in any text that a user brings, and UTF-16 is named in each."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.datasets.region_names import read_names
from pipelines.exchange.importers.image_ids import ImageIds
from pipelines.exchange.importers.tsv import open_tsv
from pipelines.exchange.jobs import ImportJob
from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.captions.opening import open_source
from pipelines.inputs.ids import read_skipped
from pipelines.inputs.images.opening import open_images
from pipelines.text.truecasing import load_truecasers, truecaser_inputs
from schemas.duplicates import read_duplicates
from schemas.errors import ImagepivotError
from schemas.vector_files import read_vector_file
from train.config.sections import resolve
from train.evaluation.relevance_files import read_relevance


def captions(format_: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        source = open_source(format_, path)
        return [row for part in source.parts(EVERYTHING) for row in source.read(part, EVERYTHING)]

    return read


def multi30k(kind: str) -> Callable[[Path], Any]:
    def read(path: Path) -> Any:
        for name, text in {"raw/train.en": "a\nb\n", "image_splits/train.txt": "1.jpg\n2.jpg\n"}.items():
            file = path.parent / "m" / "task1" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(path.read_bytes() if name.startswith(kind) else text.encode())
        return captions("multi30k")(path.parent / "m")

    return read


def regions(path: Path) -> Any:
    files = open_tsv(ImportJob((str(path),), "out", "toy", "tsv"))
    columns = files.columns([0, 1])
    return list(files.image_ids), columns["width"].tolist(), columns["features"][:, 0].tolist()


def region_lines(header: str = "") -> str:
    box, feature = (base64.b64encode(np.arange(width, dtype="<f4").tobytes()).decode() for width in (4, 6))
    return header + "".join(f"{name}\t640\t480\t1\t{box}\t{feature}\n" for name in ("ä", "b"))


def right_items(path: Path) -> Any:
    if path.name != "a_image_to_caption.json":
        (path.parent / "a_image_to_caption.json").write_text('{"1": [2]}')
    (path.parent / "a_caption_to_image.json").write_text('{"2": [1]}')
    (path.parent / "captions.json").write_text(COCO_IDS)
    annotations = path if path.name == "dataset_x.json" else path.parent / "captions.json"
    return replace(read_relevance([str(path.parent / "a_image_to_caption.json")], str(annotations), ())["a"], location="")


def word_vectors(path: Path) -> Any:
    found = read_vector_file(str(path), {"ä", "b"}, expected="")
    return found.words, {word: vector.tolist() for word, vector in found.vectors.items()}


COCO = {
    "images": [{"id": 1, "file_name": "a.jpg"}],
    "annotations": [{"image_id": 1, "caption": "Größe"}, {"image_id": 1, "caption": "b"}],
}
KARPATHY = {"images": [{"filename": "a.jpg", "split": "train", "sentences": [{"raw": "Größe"}, {"raw": "b"}]}]}
COCO_IDS = json.dumps(
    {"annotations": [{"image_id": 1, "id": 2, "caption": "a dog"}, {"image_id": 1, "id": 3, "caption": "ein Käse"}]}, indent=1
)
HEADER = "image_id\timage_w\timage_h\tnum_boxes\tboxes\tfeatures\n"
TRUECASER = "dog (3/4) Dog (1)\nthe (2/2)\n"
CONFIG = 'extends = "demo"\ndescription = """two\nlines"""\n[schedule]\nmax_steps = 7\n'

DUPLICATES = 'group,kind,similarity,image_id,split,language,portion,index\n0,hash,0.9,ä,train,,,\n0,hash,0.9,b,"test,val",,,\n'

# Name of the file, its text with LF, and what reads it.
INPUTS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "captions of multi30k": ("train.en", "Größe\nb\n", multi30k("raw")),
    "image list of multi30k": ("train.txt", "é.jpg\nb.jpg#7\n", multi30k("image_splits")),
    "captions csv": ("t.csv", 'image_id,text\n1,"two\nlines"\n2,b\n', captions("table")),
    "captions tsv": ("t.tsv", "text\timage_id\nGröße\t1\nb\t2\n", captions("table")),
    "captions jsonl": ("t.jsonl", '{"image_id": "1", "text": "Größe"}\n\n{"image_id": "2", "text": "b"}\n', captions("table")),
    "coco": ("captions_train.json", json.dumps(COCO, indent=1) + "\n", captions("coco")),
    "karpathy": ("dataset_x.json", json.dumps(KARPATHY, indent=1, ensure_ascii=False), captions("karpathy")),
    "images csv": ("t.csv", "image_id,uri\na,a.jpg\nb,b.jpg\n", lambda path: list(open_images(path).refs())),
    "images jsonl": ("t.jsonl", '{"image_id": "a", "uri": "a.jpg"}\n', lambda path: list(open_images(path).refs())),
    "image ids": ("ids.txt", "ä.jpg#1\nb.avif\n", lambda path: ImageIds("name").read_list(path)),
    "skipped images": ("skip.txt", "ä.jpg\nb\n", lambda path: read_skipped((f"@{path}",))),
    "exact image ids": ("ids.txt", "ä.jpg#1\nb", lambda path: ImageIds("exact").read_list(path)),
    "regions with a header": ("r.tsv", region_lines(HEADER), regions),
    "regions without a header": ("r.tsv", region_lines(), regions),
    "class names": ("names.txt", "Käse\ngray,grey\n", lambda path: read_names(path, 2)),
    "configuration": ("c.toml", CONFIG, lambda path: resolve(str(path))),
    "word vectors": ("a.vec", "2 2\nä 1 2\nb 3 4\n", word_vectors),
    "correct items": ("a_image_to_caption.json", '{"1": [2]}', right_items),
    "ids of captions": ("dataset_x.json", COCO_IDS, right_items),
    "duplicates": ("d.csv", DUPLICATES, lambda path: read_duplicates(str(path))[0]),
    "truecaser": ("en.model", TRUECASER, lambda path: truecaser_inputs(load_truecasers(str(path.parent)))),
}


@pytest.fixture(params=INPUTS)
def text_input(request, tmp_path):
    """A path, its text, and a function that writes the path in an encoding and reads it."""
    name, text, read = INPUTS[request.param]
    path = tmp_path / name

    def reading(data: bytes) -> Any:
        path.write_bytes(data)
        return read(path)

    return text, reading


def test_mark_and_crlf_change_nothing(text_input):
    text, reading = text_input
    plain = reading(text.encode())
    assert plain
    assert "\ufeff" not in repr(plain)
    assert r"\r" not in repr(plain)
    for mark in ("", "\ufeff"):
        for ends in ("\n", "\r\n"):
            assert reading((mark + text).replace("\n", ends).encode()) == plain


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_named(text_input, encoding):
    text, reading = text_input
    with pytest.raises(ImagepivotError, match=r"is UTF-16 \((little|big) endian.*\), expected UTF-8: convert the file: iconv"):
        reading(text.encode(encoding))
