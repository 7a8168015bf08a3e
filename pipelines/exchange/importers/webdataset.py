"""Features in tar files of WebDataset, as `export` writes them: ``ID.feature.npy``, and for regions boxes and labels."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.exchange.image_lists import ImageIds, local_file
from pipelines.exchange.importers.base import describe_file
from pipelines.exchange.jobs import IdRule, ImportJob
from schemas.errors import InputError

# Key and extension of a member, as WebDataset splits its name.
_MEMBER = re.compile(r"(?:\./)?((?:.*/|)[^./]+)[.]([^/]*)", re.DOTALL)
_FEATURE, _BOXES, _LABELS = "feature.npy", "boxes.npy", "regions.json"
_VECTORS = ("class_ids", "class_scores", "attribute_ids", "attribute_scores")


@dataclass(frozen=True)
class _Sample:
    """Place of a sample: its file and key, and offset and size of each member by extension."""

    path: Path
    key: str
    members: Mapping[str, tuple[int, int]]

    @property
    def place(self) -> str:
        return f"{self.path.name}, sample {self.key!r}"


class TarFiles:
    """Indexed tar files with features or regions, concatenated.

    Args:
        job: the files and their options.

    Raises:
        ImagepivotError: a file is missing or damaged, or holds other samples.
    """

    def __init__(self, job: ImportJob) -> None:
        self._paths = [local_file(location) for location in job.sources]
        self._rule: IdRule = job.id_rule or "exact"
        self._samples = [sample for path in self._paths for sample in _index(path)]
        if not self._samples:
            raise InputError(f"{self._paths[0].name} holds no samples, expected 'ID.{_FEATURE}' for each image")
        reader = ImageIds(self._rule)
        self._image_ids = [reader.read(sample.key, place=sample.place) for sample in self._samples]
        first = self._samples[0]
        self._has_regions = _BOXES in first.members
        with first.path.open("rb") as stream:
            self._feature = _array(stream, first, _FEATURE)

    @property
    def kind(self) -> str:
        """``regions`` if the first sample has boxes, else ``features``."""
        return "regions" if self._has_regions else "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the feature of an image."""
        return self._feature.shape

    @property
    def dtype(self) -> np.dtype:
        """Type of the features."""
        return self._feature.dtype

    @property
    def image_ids(self) -> Sequence[str]:
        """Image id of each sample."""
        return self._image_ids

    @property
    def inputs(self) -> list[dict[str, Any]]:
        """Name, size and SHA-256 of each file."""
        return [describe_file(path) for path in self._paths]

    @property
    def parameters(self) -> dict[str, Any]:
        """The rule for image ids."""
        return {"id_rule": self._rule}

    def place(self, row: int) -> str:
        """Return file and key of a sample."""
        return self._samples[row].place

    def columns(self, rows: Sequence[int]) -> dict[str, np.ndarray]:
        """Read samples."""
        values: dict[str, list[Any]] = {}
        streams = {path: path.open("rb") for path in {self._samples[row].path for row in rows}}
        try:
            for row in rows:
                sample = self._samples[row]
                for name, value in self._read(streams[sample.path], sample).items():
                    values.setdefault(name, []).append(value)
        finally:
            for stream in streams.values():
                stream.close()
        return {name: np.stack(column) for name, column in values.items()}

    def _read(self, stream: io.BufferedReader, sample: _Sample) -> dict[str, Any]:
        feature = _array(stream, sample, _FEATURE)
        if feature.shape != self.shape or feature.dtype != self.dtype:
            raise InputError(
                f"{sample.place} has a feature {feature.dtype} {feature.shape}, the first sample {self.dtype} {self.shape}: import "
                "features of one kind together, others into another dataset"
            )
        if not self._has_regions:
            return {"feature": feature}
        boxes = _array(stream, sample, _BOXES)
        try:
            labels = json.loads(_bytes(stream, sample, _LABELS))
            numbers = {name: int(labels[name]) for name in ("width", "height", "num_regions")}
            vectors = {name: np.array(labels[name], np.float64).reshape(len(feature)) for name in _VECTORS}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{sample.place}: {_LABELS} does not hold labels of regions ({error}): export it again") from error
        if boxes.shape != (len(feature), 4):
            raise InputError(
                f"{sample.place} has boxes {boxes.shape}, expected {(len(feature), 4)}: one for each row of the feature"
            )
        return {**numbers, **vectors, "boxes": boxes, "features": feature}


def _index(path: Path) -> list[_Sample]:
    """Return the samples of a file, in its order."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                if match is None or not member.isfile():
                    continue
                members = samples.setdefault(match[1], {})
                if match[2] in members:
                    raise InputError(f"{path.name} holds {member.name!r} twice: make the file again, each image once")
                members[match[2]] = (member.offset_data, member.size)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as an uncompressed tar file ({error}): copy or export it again"
        ) from error
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
    except (ValueError, OSError, EOFError, SyntaxError) as error:
        raise InputError(f"{sample.place}: {extension} is not an npy array of numbers: export it again") from error
