"""Features in tar files of WebDataset, as `export` writes them."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.exporters.webdataset import LABELS, NUMBERS
from pipelines.exchange.image_lists import local_file
from pipelines.exchange.importers.base import FeatureFiles, describe_file
from pipelines.exchange.importers.image_ids import ImageIds
from pipelines.exchange.jobs import ImportJob
from pipelines.inputs.tars import tar_members
from schemas.errors import InputError
from schemas.vector_files import NPY_ERRORS

# Key and extension of a member, as WebDataset splits its name.
_MEMBER = re.compile(r"(?:\./)?((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
_FEATURE, _BOXES, _LABELS = "feature.npy", "boxes.npy", "regions.json"


@dataclass(frozen=True)
class _Sample:
    """Place of a sample, with offset and size of its members by extension."""

    path: Path
    key: str
    members: Mapping[str, tuple[int, int]]

    @property
    def place(self) -> str:
        return f"{self.path.name}, sample {self.key!r}"


def open_tars(job: ImportJob) -> FeatureFiles:
    """Index the samples of tar files.

    Raises:
        ImagepivotError: a file is missing or damaged, or holds other samples.
    """
    paths = [local_file(location) for location in job.sources]
    samples = [sample for path in paths for sample in _index(path)]
    if not samples:
        raise InputError(f"{paths[0].name} holds no samples, expected 'ID.{_FEATURE}' for each image")
    ids = ImageIds(job.id_rule or "exact")
    image_ids = [ids.read(sample.key, place=sample.place) for sample in samples]
    with samples[0].path.open("rb") as stream:
        first = _array(stream, samples[0], _FEATURE)
    has_regions = _BOXES in samples[0].members
    if not (first.ndim and first.size) or (has_regions and first.ndim != 2):
        expected = "[R, D] beside boxes" if has_regions else "[D] or more dimensions"
        raise InputError(f"{samples[0].place} has a feature {first.shape}, expected {expected}, none zero: export it again")

    def columns(rows: Sequence[int]) -> dict[str, np.ndarray]:
        values: dict[str, list[Any]] = {}
        with ExitStack() as stack:
            streams = {path: stack.enter_context(path.open("rb")) for path in {samples[row].path for row in rows}}
            for sample in (samples[row] for row in rows):
                feature = _array(streams[sample.path], sample, _FEATURE)
                if feature.shape != first.shape or feature.dtype != first.dtype:
                    raise InputError(
                        f"{sample.place} has a feature {feature.dtype} {feature.shape}, the first sample {first.dtype} "
                        f"{first.shape}: import features of one kind together, others into another dataset"
                    )
                row = _regions_of(streams[sample.path], sample, feature) if has_regions else {"feature": feature}
                for name, value in row.items():
                    values.setdefault(name, []).append(value)
        return {name: np.stack(column) for name, column in values.items()}

    return FeatureFiles(
        "regions" if has_regions else "features",
        first.shape,
        first.dtype,
        image_ids,
        lambda: [describe_file(path) for path in paths],
        ids.parameters,
        lambda row: samples[row].place,
        columns,
    )


def _regions_of(stream: io.BufferedReader, sample: _Sample, feature: np.ndarray) -> dict[str, Any]:
    """Return the columns of a sample of regions."""
    boxes = _array(stream, sample, _BOXES)
    if boxes.shape != (len(feature), 4) or boxes.dtype.kind not in "fiu":
        raise InputError(
            f"{sample.place} has boxes {boxes.dtype} {boxes.shape}, expected numbers {(len(feature), 4)}: "
            "one for each row of the feature"
        )
    try:
        labels = json.loads(_bytes(stream, sample, _LABELS))
        numbers = {name: int(labels[name]) for name in NUMBERS}
        vectors = {name: np.array(labels[name], np.float64).reshape(len(feature)) for name in LABELS}
        if not all(0 <= number < 2**31 for number in numbers.values()) or numbers["num_regions"] > len(feature):
            raise ValueError(f"{numbers} are not those of an image with at most {len(feature)} regions")
        if not all(0 <= ids.min() <= ids.max() < 2**15 for ids in (vectors["class_ids"], vectors["attribute_ids"])):
            raise ValueError("ids of classes and attributes are not all 0 to 32767")
        if any(values[numbers["num_regions"] :].any() for values in (feature, boxes, *vectors.values())):
            raise ValueError(f"values beyond the {numbers['num_regions']} regions are not zero")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise InputError(f"{sample.place}: {_LABELS} does not hold labels of regions ({error}): export it again") from error
    return {**numbers, **vectors, "boxes": boxes, "features": feature}


def _index(path: Path) -> list[_Sample]:
    """Return the samples of a file, in its order."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    with path.open("rb") as stream:
        for member in tar_members(stream, path.stat().st_size, str(path)):
            match = _MEMBER.fullmatch(member.name)
            if match is None or not member.isfile():
                continue
            members = samples.setdefault(match[1], {})
            if match[2] in members:
                raise InputError(f"{path.name} holds {member.name!r} twice: write the file again, with each image once")
            members[match[2]] = (member.offset_data, member.size)
    return [_Sample(path, key, members) for key, members in samples.items()]


def _bytes(stream: io.BufferedReader, sample: _Sample, extension: str) -> bytes:
    if extension not in sample.members:
        members = ", ".join(sorted(sample.members))
        raise InputError(f"{sample.place} has no {extension}, only {members}: import reads tar files as `export` writes them")
    offset, size = sample.members[extension]
    stream.seek(offset)
    data = stream.read(size)
    if len(data) < size:
        raise InputError(f"{sample.place}: the file is cut off: copy or export it again")
    return data


def _array(stream: io.BufferedReader, sample: _Sample, extension: str) -> np.ndarray:
    data = _bytes(stream, sample, extension)
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except NPY_ERRORS as error:
        raise InputError(f"{sample.place}: {extension} is not an npy array of numbers: export it again") from error
