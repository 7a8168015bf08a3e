"""Report of 31,000 images and 300,000 captions: what is wrong with them, by name, within bounds of memory and size."""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.features import FeatureSpec
from schemas.kinds import schema_of
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from tests.builders import shard_by_hand
from tests.pages import Page, write_photos

pytestmark = pytest.mark.cluster

IMAGES, FAILURES, PAIRS, CONSTANT, SHARDS = 31_000, 20, 50, 417, 8
LANGUAGES = ("cs", "de", "en", "fr")
ABSENT = ("cs", "fr")  # In the test split.
LAUNCH = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def split_of(number: int) -> str:
    return "test" if number % 10 == 0 else "train"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Datasets of captions and features, a list of duplicates and pictures of 300 images."""
    folder, rng = tmp_path_factory.mktemp("scale"), np.random.default_rng(0)
    ids = [f"image-{number:05}" for number in range(IMAGES + FAILURES)]
    words = [f"word{number}" for number in range(20_000)]
    members = [sorted(n for n in range(IMAGES + FAILURES) if shard_by_hand(ids[n], SHARDS) == shard) for shard in range(SHARDS)]
    spec = FeatureSpec(name="resnet50", shape=(2048,), source="test")

    def write_features(number, shard):
        chosen = [n for n in members[number] if n < IMAGES]
        vectors = rng.standard_normal((len(chosen), 2048), np.float32)
        vectors[:, CONSTANT] = 0.25
        for row, n in enumerate(chosen):
            if n < 2 * PAIRS:  # Two neighbours are one picture.
                vectors[row] = np.random.default_rng(n // 2).standard_normal(2048, np.float32)
                vectors[row, CONSTANT] = 0.25
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 2048)
        shard.write(pa.table([[ids[n] for n in chosen], column], schema=schema_of("features", spec)))
        shard.add_failures(
            {"key": ids[n], "stage": "decode", "reason": "truncated", "uri": f"{ids[n]}.jpg", "message": "cut"}
            for n in members[number]
            if n >= IMAGES
        )

    def write_captions(number, shard):
        rows = []
        for n in (n for n in members[number] if n < IMAGES):
            for language in LANGUAGES:
                if language in ABSENT and split_of(n) == "test":
                    continue
                for index in range(2 if language == "cs" else 3):
                    tokens = [words[int(w)] for w in rng.zipf(1.3, 11) % len(words)]
                    rows.append((ids[n], language, "comparable", index, split_of(n), " ".join(tokens), tokens))
        columns = ("image_id", "language", "portion", "index", "split", "text", "tokens")
        shard.write(pa.Table.from_pylist([dict(zip(columns, row, strict=True)) for row in rows], schema=schema_of("captions")))

    parameters = {"feature": {**vars(spec), "shape": [2048]}}
    write_dataset(OutputDataset(Folder(str(folder / "features")), "features", parameters, (), SHARDS), write_features)
    write_dataset(OutputDataset(Folder(str(folder / "captions")), "captions", {}, (), SHARDS), write_captions)
    with (folder / "duplicates.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("group", "kind", "similarity", "image_id", "split", "language", "portion", "index"))
        rows.writerows((n // 2, "cosine", 1.0, ids[n], split_of(n), "", "", "") for n in range(2 * PAIRS))
    write_photos(folder / "photos", ids[:IMAGES:100])
    return folder


def test_report_names_what_is_wrong_within_its_bounds(folder):
    page, datasets = folder / "report.html", (folder / "captions", folder / "features")
    lists = ("--duplicates", folder / "duplicates.csv", "--images", folder / "photos")
    words = [sys.executable, "-m", "imagepivot", "report", *datasets, *lists, "--output", page]
    launcher = [sys.executable, "-c", LAUNCH, *map(str, words)]  # Else the peak of this process counts.
    done = subprocess.run(launcher, cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True)
    peak = int(done.stdout.splitlines()[-1]) << 10
    text = Page(page).text
    for language in ABSENT:
        assert f"split 'test' has no captions in {language}" in text
    assert f"1 of 2,048 dimensions is constant: {CONSTANT}" in text
    assert "20 failures" in text
    assert all(f"image-{number:05}.jpg" in text for number in range(IMAGES, IMAGES + FAILURES))
    assert "50 groups of duplicates" in text
    assert all(f"image-{2 * group:05}, image-{2 * group + 1:05}" in text for group in range(PAIRS))
    assert peak < 1_000_000_000
    assert page.stat().st_size < 20_000_000
