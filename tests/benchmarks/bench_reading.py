"""Reading features: all of them against ``pyarrow.parquet.read_table`` plus one copy, and random rows against Lance."""

import tempfile
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measuring import rate_of, ratio
from processor import machine
from targets import floor

from schemas.dataset import open_dataset
from schemas.features import FeatureSpec
from schemas.keys import shard_of
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.shard_writer import ShardWriter

IMAGES, WIDTH, SHARDS = 30_000, 2048, 16
BATCH, BATCHES = 64, 200


def main() -> None:
    """Print the ratio."""
    print(machine())
    spec = FeatureSpec(name="resnet50-pool", shape=(WIDTH,))
    parameters = {"feature": {"name": spec.name, "shape": list(spec.shape), "dtype": spec.dtype, "source": ""}}
    values = np.random.default_rng(0).random((IMAGES // SHARDS * 2, WIDTH), np.float32)
    with tempfile.TemporaryDirectory() as folder:
        output = OutputDataset(Folder(folder), "features", parameters, shards=SHARDS)
        ids: dict[int, list[str]] = {}
        for number in range(IMAGES):
            ids.setdefault(shard_of(f"image-{number:06d}", SHARDS), []).append(f"image-{number:06d}")

        def write_feature_shard(number: int, shard: ShardWriter) -> None:
            flat = pa.array(values[: len(ids[number])].reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, type=output.schema.field("feature").type)
            shard.write(pa.Table.from_arrays([pa.array(sorted(ids[number])), vectors], schema=output.schema))

        write_dataset(output, write_feature_shard)
        files = sorted(str(path) for path in Path(folder).glob("part-*.parquet"))
        size = IMAGES * WIDTH * 4 / 1e9

        def plain() -> np.ndarray:
            column = pq.read_table(files, columns=["feature"])["feature"]
            return np.concatenate([chunk.flatten().to_numpy().reshape(-1, WIDTH) for chunk in column.chunks])

        # The files are in the page cache from here on.
        assert open_dataset(folder).numpy().shape == plain().shape == (IMAGES, WIDTH)
        ratio(
            "features into one array, against read_table and one copy",
            lambda: size * rate_of(lambda: open_dataset(folder).numpy()),
            lambda: size * rate_of(plain),
            unit="GB/s",
            at_least=floor("reading features"),
            runs=5,
        )
        random_rows(folder)


def random_rows(folder: str) -> None:
    """Print the ratio of rows in random batches; both sides give one array per batch, of files in the page cache."""
    dataset = open_dataset(folder)
    table = lance.write_dataset(dataset.table(), f"{folder}/lance")
    image_ids, rng = dataset.image_ids(), np.random.default_rng(1)

    def ours() -> None:
        for batch in rng.integers(0, IMAGES, (BATCHES, BATCH)).tolist():
            assert dataset.take([image_ids[row] for row in batch], ["feature"])["feature"].shape == (BATCH, WIDTH)

    def theirs() -> None:
        for batch in rng.integers(0, IMAGES, (BATCHES, BATCH)).tolist():
            column = table.take(batch, columns=["feature"])["feature"]
            assert column.combine_chunks().flatten().to_numpy().reshape(-1, WIDTH).shape == (BATCH, WIDTH)

    ours(), theirs()
    ratio(
        "random rows, against Lance",
        lambda: rate_of(ours, BATCH * BATCHES),
        lambda: rate_of(theirs, BATCH * BATCHES),
        unit="rows/s",
        at_least=floor("random rows"),
        runs=5,
    )


if __name__ == "__main__":
    main()
