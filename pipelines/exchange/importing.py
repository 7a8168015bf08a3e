"""``imagepivot import``: datasets from features of other tools.

One process, no Beam: the work is reading and writing. All values are checked before the first shard is written. Each shard is read
from the files a few rows at a time: memory holds a few megabytes and the image ids, for files of any size.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from pipelines.exchange.importers.arrays import open_arrays
from pipelines.exchange.importers.base import FeatureFiles, stored_dtype
from pipelines.exchange.importers.hdf5 import open_hdf5
from pipelines.exchange.importers.tsv import open_tsv
from pipelines.exchange.importers.webdataset import open_tars
from pipelines.exchange.jobs import ImportFormat, ImportJob
from pipelines.running.meter import Meter
from schemas.errors import InputError, UsageError
from schemas.features import FeatureSpec
from schemas.keys import shard_of
from schemas.kinds import count_nonfinite, schema_of, table_of_arrays, vector_bytes
from schemas.manifest import Manifest
from schemas.options import takes_fields
from schemas.parameters import FeaturesParameters
from schemas.storage.folder import Folder
from schemas.writing.dataset_writer import write_dataset
from schemas.writing.output import OutputDataset
from schemas.writing.reuse_policy import ReusePolicy
from schemas.writing.shard_count import VECTOR_SHARD_BYTES, check_shard_bytes, choose_shards, known_shards
from schemas.writing.shard_writer import ShardWriter

_READERS: dict[ImportFormat, Callable[[ImportJob], FeatureFiles]] = {
    "npy": open_arrays,
    "tsv": open_tsv,
    "hdf5": open_hdf5,
    "webdataset": open_tars,
}
_EXTENSIONS: dict[str, ImportFormat] = {".npy": "npy", ".tsv": "tsv", ".h5": "hdf5", ".hdf5": "hdf5", ".tar": "webdataset"}
_UNSUPPORTED = {".npz": "npz archives", ".lmdb": "LMDB", ".mdb": "LMDB"}
_BLOCK_BYTES = 8 << 20


def import_format(location: str) -> ImportFormat:
    """Return the format of a file by its extension.

    Raises:
        UsageError: the extension is unknown, or that of a format that is not supported.
    """
    for extension, name in _UNSUPPORTED.items():
        if location.lower().rstrip("/").endswith(extension) or os.path.exists(f"{location}/data{extension}"):  # noqa: PTH110
            raise UsageError(
                f"{location!r}: import does not support {name} yet; write the features as {', '.join(_READERS)} first"
            )
    for extension, name in _EXTENSIONS.items():
        if location.lower().endswith(extension):
            return name
    raise UsageError(f"cannot tell the format of {location!r} from its name: give --format {', '.join(_READERS)}")


@takes_fields(ImportJob)
def import_features(job: ImportJob, meter: Meter = Meter()) -> Manifest:
    """Write a dataset of kind ``features`` or ``regions``.

    Raises:
        ImagepivotError: the files are missing, damaged or contradict each other, or the folder cannot be written.
    """
    source_format = job.format or import_format(job.sources[0])
    job = replace(job, format=source_format)
    files = _READERS[source_format](job)
    dtype = stored_dtype(files.dtype, place=job.sources[0])
    spec = FeatureSpec(name=job.name, shape=files.shape, dtype=dtype, source=job.source)
    folder = Folder(job.output)
    size = len(files.image_ids) * vector_bytes(schema_of(files.kind, spec))
    shards = known_shards(job.shards, folder, overwrite=job.overwrite) or choose_shards(size, VECTOR_SHARD_BYTES)
    check_shard_bytes(shards, size, folder)
    dtype_name = files.dtype.newbyteorder("=").name
    imported = {"format": source_format, "name": job.name, "dtype": dtype_name, **files.parameters}
    output = OutputDataset(
        folder=folder,
        kind=files.kind,
        parameters=FeaturesParameters(feature=spec, imported=imported, space=job.space or None).to_json(),
        inputs=tuple(files.inputs()),
        shards=shards,
        notes=job.notes.to_json(),
    )
    rows_by_shard: list[list[int]] = []

    def check() -> None:
        rows_by_shard.extend(_by_shard(files, _check_feature_rows(files, spec), output.shards))

    def write_feature_shard(index: int, shard: ShardWriter) -> None:
        meter.start_shard(index)
        for block in _blocks(rows_by_shard[index], spec):
            shard.write(_feature_table(files, block, spec))
            meter.add(images=len(block))
        meter.finish_shard()

    return write_dataset(output, write_feature_shard, ReusePolicy(overwrite=job.overwrite, verify=job.verify), check=check)


def _check_feature_rows(files: FeatureFiles, spec: FeatureSpec) -> list[int]:
    """Read all rows once, and return the first row of each image.

    Raises:
        InputError: values are not finite, or the rows of one image differ.
    """
    bad_rows = bad_values = 0
    first_bad, item = -1, "image" if files.captions is None else "caption"
    for rows in _blocks(range(len(files.image_ids)), spec):
        bad = count_nonfinite(_feature_table(files, rows, spec))
        if bad.any():
            first_bad = rows[int(np.flatnonzero(bad)[0])] if first_bad < 0 else first_bad
            bad_rows, bad_values = bad_rows + int((bad > 0).sum()), bad_values + int(bad.sum())
    if bad_rows:
        raise InputError(
            f"{bad_values:,} values of {bad_rows:,} {item}s are not finite as {spec.dtype}, first of {item} "
            f"{files.image_ids[first_bad]!r} ({files.place(first_bad)}): extract these features again, or remove them"
        )
    first: dict[str, int] = {}
    copies: dict[int, int] = {}  # Earlier row by later row of an image.
    for row, image_id in enumerate(files.image_ids):
        earlier = first.setdefault(image_id, row)
        if earlier != row:
            copies[row] = earlier
    for later_rows in _blocks(list(copies), spec):
        earlier_rows = [copies[row] for row in later_rows]
        if _feature_table(files, earlier_rows, spec).equals(_feature_table(files, later_rows, spec)):
            continue
        for earlier, later in zip(earlier_rows, later_rows, strict=True):
            if not _feature_table(files, [earlier], spec).equals(_feature_table(files, [later], spec)):
                raise InputError(
                    f"{item} {files.image_ids[later]!r} occurs at {files.place(earlier)} and again, with other values, at "
                    f"{files.place(later)}: each has one feature; check that these ids belong to the file, or give --id-rule "
                    "exact if #N at their ends is no number of a caption"
                )
    return list(first.values())


def _blocks(rows: Sequence[int], spec: FeatureSpec) -> Iterator[Sequence[int]]:
    size = max(1, _BLOCK_BYTES // (4 * spec.width))
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _feature_table(files: FeatureFiles, rows: Sequence[int], spec: FeatureSpec) -> pa.Table:
    schema, ids = schema_of(files.kind, spec), [files.image_ids[row] for row in rows]
    if files.captions is None:
        return table_of_arrays(ids, files.columns(rows), schema)
    vectors = table_of_arrays(ids, files.columns(rows), pa.schema([schema[0], schema[-1]]))
    return files.captions.take(list(rows)).append_column("embedding", vectors["embedding"]).cast(schema)


def _by_shard(files: FeatureFiles, rows: Sequence[int], shards: int) -> list[list[int]]:
    """Return the rows of each shard, sorted by key."""
    captions = None if files.captions is None else map(dict.values, files.captions.to_pylist())
    keys = [(image_id,) for image_id in files.image_ids] if captions is None else [*map(tuple, captions)]
    groups: list[list[int]] = [[] for _ in range(shards)]
    for row in sorted(rows, key=keys.__getitem__):
        groups[shard_of(keys[row][0], shards)].append(row)
    return groups
