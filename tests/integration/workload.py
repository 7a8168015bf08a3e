"""Every command that runs pipelines, on captions, photos and weights that are small."""

import shutil
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from schemas.dataset import open_dataset
from tests.builders import tree

MODEL = "timm:test_resnet.r160_in1k"

OUTPUTS = ("plain", "true", "given", "vocabulary", "encoded", "features")
"""The datasets that the commands make, in their order."""

CODES = (0, 0, 0, 0, 0, 3)
"""The exit codes of the commands: a photo is broken."""


def make_inputs(folder: Path) -> Path:
    """Write captions, photos, of which one is broken, and weights of a small model into a folder."""
    import timm
    import torch

    rows = [f"i{number}\t{language}\tThe Dog of Anna runs {number}" for number in range(20) for language in ("en", "de")]
    (folder / "captions.tsv").write_text("\n".join(["image_id\tlanguage\ttext", *rows]) + "\n")
    (folder / "photos").mkdir()
    for number in range(5):
        Image.new("RGB", (60 + number, 50), (200, 30 * number, 20)).save(folder / "photos" / f"i{number}.png")
    (folder / "photos" / "broken.jpg").write_bytes(b"no image")
    torch.save(timm.create_model("test_resnet.r160_in1k", num_classes=0).state_dict(), folder / "w.pth")
    return folder


def commands(*options: str, at: str = "") -> list[tuple[str, ...]]:
    """Return the commands.

    Args:
        options: further options of each.
        at: what stands before each location, such as ``gs://bucket/``; by default they are relative.
    """
    captions = ("--format", "table", "--shards", "2", *options)
    weights = ("--extractor", MODEL, "--weights", f"{at}w.pth")
    truecased = (*captions, "--recipe", "moses-truecase")
    return [
        ("captions", f"{at}captions.tsv", f"{at}plain", *captions),
        ("captions", f"{at}captions.tsv", f"{at}true", *truecased),
        ("captions", f"{at}captions.tsv", f"{at}given", *truecased, "--truecaser", f"{at}true"),
        ("vocabulary", f"{at}true", f"{at}vocabulary", "--min-count", "1", *options),
        ("encode", f"{at}true", f"{at}vocabulary", f"{at}encoded", *options),
        ("features", f"{at}photos", f"{at}features", *weights, "--shards", "2", *options),
    ]


UNIQUE = ("true", "vocabulary", "encoded", "features")
"""The datasets without those of `captions` in other ways, which one engine need not repeat after another."""


def run_locally(imagepivot: Callable[..., object], inputs: Path, folder: Path) -> dict[str, bytes]:
    """Run the commands in a new folder; return all files there, also those that they read: the truth for other runners."""
    shutil.copytree(inputs, folder)
    for command, code in zip(commands("--workers", "1"), CODES, strict=True):
        imagepivot(*command, cwd=folder, code=code)
    assert open_dataset(folder / "features").manifest.rows == 5
    return tree(folder)


def one_line(done) -> str:
    """The error: one line on standard error besides that which names the job, no trace."""
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith("submitted: job ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("Error: ")
    return lines[0]
