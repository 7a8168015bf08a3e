"""Files of users, damaged at random: all readers give values or a message, within limits of memory, and touch no other file.

Cases run in a process of their own: ``python -m tests.integration.test_fuzz_inputs TARGETS FOLDER SEED CASES``. ``make cluster``
runs a fixed set of cases. ``IMAGEPIVOT_FUZZ_MINUTES=10`` goes on with others for ten minutes; ``IMAGEPIVOT_FUZZ_SEED`` is the
first, to see one again.
"""

import base64
import gzip
import io
import itertools
import json
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import tarfile
import time
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from extractors.images.decoding import DecodeError, decode_image
from extractors.weights.caffemodel import read_layers
from extractors.weights.checkpoints import read_state_dict
from pipelines.exchange.importing import import_features
from pipelines.exchange.jobs import ImportJob
from pipelines.inputs.captions.base import EVERYTHING
from pipelines.inputs.captions.opening import open_captions
from pipelines.inputs.images.opening import open_images
from pipelines.plans.plan import read_plan
from schemas.dataset import open_dataset
from schemas.errors import ImagepivotError
from schemas.storage.folder import Folder
from schemas.vector_files import read_vector_file
from schemas.writing.repair import repair
from schemas.writing.validation import validate
from tests.builders import tree
from tests.extractors.weights.test_caffemodel import LAYERS, net
from tests.integration.damage import Files, damage, limited, tar
from tests.pipelines.exchange.test_importing import REGION_LABELS
from tests.pipelines.plans.conftest import PLAN
from tests.pipelines.plans.test_plan import LINE
from tests.schemas.conftest import (
    FAILED_IMAGES,
    make_captions,
    make_encoded,
    make_features,
    make_token_features,
    make_vocabulary,
)
from tests.sizes import ROOT
from tests.train.runs.test_checkpoints import CHECKPOINT
from tests.train.trainings import CONFIG
from train.config.sections import load_config
from train.runs.checkpoints import read_checkpoint, write_checkpoint

pytestmark = pytest.mark.cluster

MEMORY = 1 << 30  # Address space that a process may take for all cases, beyond its modules and intact files.
PIXELS = 1 << 22  # Maximum size of an image here, so that `MEMORY` is far above its pixels.
SECONDS = 60  # No case takes so long; one that does is taken for one that never ends.
CASES = 200  # Of a target.


# --- intact files ----------------------------------------------------------------------------------------------------


def images() -> Iterator[Files]:
    """Pictures of all formats, in their modes and compressions."""
    import pillow_heif

    pillow_heif.register_heif_opener()
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), np.uint8))
    grey16 = Image.fromarray(np.arange(32 * 24, dtype=np.uint16).reshape(24, 32) * 80)
    several = {"save_all": True, "append_images": [noise.rotate(180)]}
    choices = [
        *(("JPEG", mode, {}) for mode in ("RGB", "L", "CMYK")),
        ("JPEG", "RGB", {"progressive": True, "exif": b"Exif\0\0MM\0*\0\0\0\x08\0\0"}),
        *(("PNG", mode, {}) for mode in ("RGB", "RGBA", "LA", "P", "1", "I;16")),
        *(("WEBP", "RGB", options) for options in ({}, {"lossless": True}, several)),
        *(("GIF", "P", options) for options in ({}, several)),
        *(("BMP", mode, {}) for mode in ("RGB", "P", "1")),
        *(("TIFF", "RGB", {"compression": name}) for name in (None, "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")),
        *(("TIFF", mode, {"compression": name}) for mode, name in (("1", "group4"), ("CMYK", None), ("I;16", None))),
        *(("AVIF", mode, {}) for mode in ("RGB", "RGBA")),
        *(("JPEG2000", mode, {}) for mode in ("RGB", "L", "I;16")),
        ("JPEG2000", "RGB", {"no_jp2": True}),
        *(("PPM", mode, {}) for mode in ("RGB", "L", "1")),
        *(("ICO", "RGBA", options) for options in ({"sizes": [(16, 16), (24, 24)]}, {"bitmap_format": "bmp"})),
        ("HEIF", "RGB", {}),
        *(("TGA", mode, {"compression": name}) for mode in ("RGB", "P", "L") for name in (None, "tga_rle")),
    ]
    for kind, mode, options in choices:
        file = io.BytesIO()
        (grey16 if mode == "I;16" else noise.convert(mode)).save(file, kind, **options)
        yield {"image": file.getvalue()}


def tars() -> Iterator[Files]:
    """Images in tars of all header formats, with long and other names, and two tars that are joined."""
    picture = next(images())["image"]
    parts = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        names = ("a.jpg", "b/c.jpg", "b/c.txt", *(("d" * 150 + "é.jpg",) if form != tarfile.USTAR_FORMAT else ()))
        parts.append(tar(dict.fromkeys(names, picture), form))
        yield {"images.tar": parts[-1]}
    yield {"images.tar": parts[0] + tar({"e.jpg": picture})}


def npy(values: np.ndarray, version: tuple[int, int] = (1, 0)) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, values, version)
    return file.getvalue()


VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


def webdatasets() -> Iterator[Files]:
    """Features and regions in tars."""
    yield {"features.tar": tar({f"{number}.feature.npy": npy(row) for number, row in enumerate(VECTORS)})}
    text = json.dumps(REGION_LABELS).encode()
    members = {"a.feature.npy": npy(VECTORS[:2]), "a.boxes.npy": npy(VECTORS[:2], (2, 0)), "a.regions.json": text}
    yield {"regions.tar": tar(members)}


def arrays() -> Iterator[Files]:
    """Arrays of each version of the format with their ids, and a table of regions."""
    for version in ((1, 0), (2, 0), (3, 0)):
        yield {"features.npy": npy(VECTORS, version), "features.ids": b"a\nb\nc\n"}
    coded = [base64.b64encode(row.tobytes()).decode() for row in (VECTORS[:2], VECTORS)]
    yield {"regions.tsv": f"a\t4\t5\t2\t{coded[0]}\t{coded[0]}\nb\t4\t5\t3\t{coded[1]}\t{coded[1]}\n".encode()}


def hdf5_files() -> Iterator[Files]:
    """One array with ids, and one array per image."""
    for libver in ("earliest", "latest"):
        for is_group in (False, True):
            file = io.BytesIO()
            with h5py.File(file, "w", libver=libver) as stored:
                if is_group:
                    for number, row in enumerate(VECTORS):
                        stored.create_dataset(f"features/b/{number}", data=row, compression="gzip" if number else None)
                    stored["features/link"] = h5py.SoftLink("/features/b/0")
                else:
                    stored.create_dataset("features", data=VECTORS, chunks=(1, 2), compression="gzip", shuffle=True)
                    stored["ids"] = np.array([b"a", b"b", b"c"])
            yield {"group.h5" if is_group else "array.h5": file.getvalue()}


def checkpoints() -> Iterator[Files]:
    """State dicts of all formats."""
    state = OrderedDict({"module.a.weight": torch.arange(6.0).reshape(2, 3), "module.b": torch.ones(3, dtype=torch.int64)})
    for is_zip in (True, False):
        file = io.BytesIO()
        torch.save({"state_dict": state, "epoch": 3}, file, _use_new_zipfile_serialization=is_zip)
        yield {"state.pth": file.getvalue()}
    yield {"state.safetensors": save(dict(state))}
    for protocol in (2, 4, 5):
        entries = {name: tensor.numpy() for name, tensor in state.items()}
        yield {"state.pkl": pickle.dumps({"model": entries, "remark": b"x", "step": np.float64(3)}, protocol)}
    for is_old in (False, True):
        yield {"net.caffemodel": net(LAYERS, old=is_old, legacy=is_old, packed=not is_old, double=is_old)}
    write_checkpoint(Folder("."), "best.pt", CHECKPOINT)
    yield {"best.pt": Path("best.pt").read_bytes()}


def vectors() -> Iterator[Files]:
    """Vectors of words as text."""
    yield {"words.vec": b"2 3\na 1 2 3\nb 4 5e-1 6\n"}
    yield {"words.vec.gz": gzip.compress(b"a 1 2 3\nb 4 5e-1 6\n" * 50)}


def plans() -> Iterator[Files]:
    """A plan and one that extends it."""
    yield {"plan.toml": PLAN.encode()}
    yield {"base.toml": PLAN.encode(), "plan.toml": b'extends = "base.toml"\noutput = "other"\n[paths]\nmore = "x"\n'}


def configurations() -> Iterator[Files]:
    """A configuration and one that extends a preset."""
    yield {"config.toml": CONFIG.encode()}
    yield {"config.toml": b'extends = "vsepp"\ndescription = "x"\n[model]\nembed_dim = 8\n[schedule]\nmax_epochs = 2\n'}


def captions() -> Iterator[Files]:
    """Captions in JSON, tables and Parquet."""
    image = {"filename": "a.jpg", "imgid": 0, "cocoid": 1, "split": "train", "sentids": [0, 1], "filepath": "x"}
    sentences = [{"raw": "a dog", "sentid": 0, "imgid": 0, "tokens": ["a"]}, {"raw": "ein Hünd", "sentid": 1, "imgid": 0}]
    yield {"karpathy.json": json.dumps({"images": [image | {"sentences": sentences}], "dataset": "coco"}).encode()}
    content = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"id": 1, "image_id": 1, "caption": "a dog"}]}
    yield {"captions_train2017.json": json.dumps(content).encode()}
    rows = [{"image_id": "a", "language": "en", "text": "a dog"}, {"image_id": "b", "language": "de", "text": "ein Hünd"}]
    yield {"table.jsonl": "\n".join(map(json.dumps, rows)).encode()}
    yield {"table.csv": b'image_id,language,text\na,en,"a ""dog"""\nb,de,x\n'}
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file)
    yield {"table.parquet": file.getvalue()}


def datasets() -> Iterator[Files]:
    """Datasets of all kinds but regions, with manifests, records and failures."""
    root = Path("datasets")
    texts = make_captions(root / "captions", shards=2)
    vocabulary = make_vocabulary(root / "vocabulary", texts)
    toys = [texts, vocabulary, make_encoded(root / "encoded", texts, vocabulary, shards=2)]
    toys += [make_features(root / "features", failures=FAILED_IMAGES, shards=2), make_token_features(root / "tokens", texts)]
    for toy in toys:
        toy.write()
        yield {f"dataset/{name}": data for name, data in tree(Path(toy.output.folder.location)).items()}


# --- readers ---------------------------------------------------------------------------------------------------------


def read_image(folder: Path) -> None:
    try:
        decode_image((folder / "image").read_bytes(), max_pixels=PIXELS)
    except DecodeError as error:
        if isinstance(error.__cause__, MemoryError):
            raise error.__cause__ from None
        raise


def read_images(folder: Path) -> None:
    source = open_images(folder / "images.tar")
    for ref in source.refs():
        with suppress(OSError):  # A row of failures.
            source.read(ref)


def import_any(folder: Path) -> None:
    (path,) = (path for path in folder.iterdir() if path.suffix in (".tar", ".h5", ".npy", ".tsv"))
    options = {"array": {"array": "features", "id_array": "ids"}, "group": {"array": "features"}}.get(path.stem, {})
    import_features(ImportJob((str(path),), str(folder / "out"), name="x", **options))


def read_weights(folder: Path) -> None:
    (path,) = folder.iterdir()
    if path.suffix == ".caffemodel":
        read_layers(path)
    elif path.name == "best.pt":
        read_checkpoint(Folder(str(folder)), path.name)
    else:
        read_state_dict(path)


def read_vectors(folder: Path) -> None:
    (path,) = folder.iterdir()
    read_vector_file(str(path), {"a", "b"}, expected="")


def read_captions(folder: Path) -> None:
    (path,) = folder.iterdir()
    form = {"karpathy": "karpathy", "captions_train2017": "coco"}.get(path.stem, "table")
    source = open_captions(form, path)
    for part in source.parts(EVERYTHING):
        for table in source.tables(part, EVERYTHING):
            table.validate(full=True)
    if form == "table":
        list(open_images(path, columns={"uri": "text"}).refs())


def read_dataset(folder: Path) -> None:
    path = folder / "dataset"
    problems = validate(path, on_warning=lambda text: None)
    try:
        dataset = open_dataset(path)
        for _ in dataset.batches():
            pass
    finally:
        repair(path)
    assert problems or validate(path) == []


@dataclass(frozen=True)
class Target:
    """Intact files, and their reader in a folder."""

    files: Callable[[], Iterator[Files]]
    read: Callable[[Path], object]


TARGETS = {
    "images": Target(images, read_image),
    "tars": Target(tars, read_images),
    "webdataset": Target(webdatasets, import_any),
    "arrays": Target(arrays, import_any),
    "hdf5": Target(hdf5_files, import_any),
    "checkpoints": Target(checkpoints, read_weights),
    "vectors": Target(vectors, read_vectors),
    "plans": Target(plans, lambda folder: read_plan(str(folder / "plan.toml"), LINE)),
    "configurations": Target(configurations, lambda folder: load_config(str(folder / "config.toml"))),
    "captions": Target(captions, read_captions),
    "datasets": Target(datasets, read_dataset),
}


# --- a process of cases ----------------------------------------------------------------------------------------------


def write_files(folder: Path, files: Files) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def run_cases(name: str, folder: Path, seed: int, cases: int) -> tuple[Counter[str], list[str]]:
    """Read damaged files of a target, and return counts and faults."""
    target = TARGETS[name]
    counts: Counter[str] = Counter()
    faults: list[str] = []
    intact = list(target.files())
    for files in intact:
        write_files(folder / "case", files)
        target.read(folder / "case")
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))
    for number in range(seed, seed + cases):
        (folder / "last").write_text(f"{name} {number}")  # Should the process itself end.
        rng = random.Random(f"{name} {number}")
        write_files(folder / "case", damage(rng.choice(intact), rng))
        try:
            with limited(SECONDS):
                target.read(folder / "case")
            counts[f"{name}, read"] += 1
        except ImagepivotError:
            counts[f"{name}, refused"] += 1
        except BaseException:  # noqa: BLE001 -- Hang, too
            faults.append(f"IMAGEPIVOT_FUZZ_SEED={number}: {name}: {traceback.format_exc()}")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    return counts, faults


def main(names: str, folder: str, seed: str, cases: str) -> None:
    """Run cases of targets, and print counts and faults as JSON."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    total: Counter[str] = Counter()
    all_faults: list[str] = []
    for name in names.split(","):
        counts, faults = run_cases(name, Path(folder), int(seed), int(cases))
        total += counts
        all_faults += faults
    print(json.dumps({"counts": total, "faults": all_faults}))


def run(names: Iterable[str], folder: Path, seed: int, cases: int) -> Counter[str]:
    """Run cases in a process, and compare the files around its folder before and after."""
    for part in ("work", "decoy", "home"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for part in ("decoy", "home"):
        (folder / part / "a.txt").write_text("keep this")
    before = tree(folder / "decoy"), tree(folder / "home")
    words = [",".join(names), str(folder / "work"), str(seed), str(cases)]
    command = [sys.executable, "-m", "tests.integration.test_fuzz_inputs", *words]
    environment = {**os.environ, "HOME": str(folder / "home"), "ARROW_DEFAULT_MEMORY_POOL": "system"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = folder / "work/last"
    assert done.returncode == 0, f"{last.read_text() if last.exists() else names}: {done.returncode}: {done.stderr}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert not result["faults"], f"{len(result['faults'])} cases failed:\n" + "\n".join(result["faults"])
    assert (tree(folder / "decoy"), tree(folder / "home")) == before
    assert sorted(path.name for path in folder.iterdir()) == ["decoy", "home", "work"]
    return Counter(result["counts"])


@pytest.mark.timeout(0)
def test_damaged_inputs_are_read_or_refused(tmp_path):
    first = int(os.environ.get("IMAGEPIVOT_FUZZ_SEED", "0"))
    end = time.monotonic() + 60 * float(os.environ.get("IMAGEPIVOT_FUZZ_MINUTES", "0"))
    for seed in itertools.count(first, CASES):
        counts = run(TARGETS, tmp_path / str(seed), seed, CASES)
        for name in TARGETS:
            assert min(counts[f"{name}, read"], counts[f"{name}, refused"]) > CASES // 50, name
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    main(*sys.argv[1:])
