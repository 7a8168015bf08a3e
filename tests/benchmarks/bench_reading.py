"""Reading features into one contiguous array against ``pyarrow.parquet.read_table`` of the same files plus one copy."""

import tempfile
from pathlib import Path

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


if __name__ == "__main__":
    main()
