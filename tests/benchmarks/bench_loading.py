"""Measure time and peak memory of loading the data of the bilingual model of Kádár et al. 2018, in a fresh process.

This is the comparable portion of Multi30K in English and German, 290,000 encoded captions, with 29,000 features of 2048 values in
float32. The features are random, since their values make no difference here. Needs the Multi30K text.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
from aims import floor
from measuring import machine, test_data

from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter

SHARDS, WIDTH, RUNS = 16, 2048, 5
SECONDS, GIGABYTES = floor("loading data"), floor("memory of loading data")

CHILD = """
import json, sys, time
from pathlib import Path
started = time.perf_counter()
from train.data.splits import open_data
from train.data.captions import caption_pairs
imported, before = time.perf_counter(), time.process_time()
data = open_data(*sys.argv[1:], split="train", portions={"en": ["comparable"], "de": ["comparable"]})
loaded, cpu = time.perf_counter(), time.process_time() - before
pairs = caption_pairs(data.captions)
enumerated = time.perf_counter()
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({
    "import": imported - started, "load": loaded - imported, "cpu": cpu, "pairs": enumerated - loaded,
    "peak": int(peak.split()[1]) * 1024, "captions": len(data.captions), "images": len(data.features), "caption pairs": len(pairs),
}))
"""


def main() -> None:
    """Print the times and the peak memory."""
    source = test_data("multi30k")
    if source is None:
        sys.exit("needs the Multi30K text: set IMAGEPIVOT_TEST_DATA")
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        captions, vocabulary, encoded, features = (
            str(Path(folder) / name) for name in ("captions", "vocabulary", "ids", "features")
        )
        chosen = ("--languages", "en,de", "--portions", "comparable", "--splits", "train")
        _imagepivot("captions", str(source), captions, "--format", "multi30k", *chosen)
        _imagepivot("vocabulary", captions, vocabulary)
        _imagepivot("encode", captions, vocabulary, encoded)
        _write_features(features, sorted(set(open_dataset(encoded).image_ids())))
        folders = (encoded, features, vocabulary)
        _load(folders)  # From here on the files are in the page cache.
        runs = [_load(folders) for _ in range(RUNS)]
    counts = ", ".join(f"{runs[0][name]:,} {name}" for name in ("captions", "images", "caption pairs"))
    seconds = sorted(run["load"] for run in runs)
    imported, cpu, pairs = (median(run[name] for run in runs) for name in ("import", "cpu", "pairs"))
    peak, array = max(run["peak"] for run in runs), runs[0]["images"] * WIDTH * 4
    print(
        f"loading {counts}: {median(seconds):.2f} s (aim: under {SECONDS}), from {seconds[0]:.2f} to {seconds[-1]:.2f} in {RUNS} "
        f"runs, {cpu:.2f} s of them CPU; imports before it {imported:.2f} s, caption pairs after it {pairs:.2f} s; peak memory "
        f"{peak / 1e9:.2f} GB (aim: under {GIGABYTES}), of which features {array / 1e9:.2f}"
    )


def _imagepivot(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("imagepivot")), *arguments], check=True, capture_output=True)


def _load(folders: tuple[str, ...]) -> dict[str, float]:
    return json.loads(subprocess.run([sys.executable, "-c", CHILD, *folders], check=True, capture_output=True).stdout)


def _write_features(folder: str, image_ids: list[str]) -> None:
    spec = FeatureSpec(name="random", shape=(WIDTH,))
    parameters = {"feature": {"name": spec.name, "shape": [WIDTH], "dtype": spec.dtype, "source": ""}}
    output = OutputDataset(Folder(folder), "features", parameters, shards=SHARDS)

    def write_feature_shard(number: int, shard: ShardWriter) -> None:
        chosen = [image_id for image_id in image_ids if shard_of(image_id, SHARDS) == number]
        flat = pa.array(np.random.default_rng(number).random(len(chosen) * WIDTH, np.float32))
        vectors = pa.FixedSizeListArray.from_arrays(flat, type=output.schema.field("feature").type)
        shard.write(pa.Table.from_arrays([pa.array(chosen), vectors], schema=output.schema))

    write_dataset(output, write_feature_shard)


if __name__ == "__main__":
    main()
