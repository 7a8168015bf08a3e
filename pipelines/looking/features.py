"""Chapters of a report about features and regions, failures and duplicates."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter

import numpy as np

from pipelines.datasets.region_names import RegionNames, named_regions
from pipelines.datasets.view import LabelledBox, draw_boxes
from pipelines.looking.exhibits import Photos, jpeg_address, spread
from pipelines.looking.pages import Block, Exhibit, PictureMap, Strip, TextLine
from schemas.console.tables import Row, Table, number_columns
from schemas.dataset import Dataset
from schemas.duplicates import Duplicate
from schemas.escapes import counted
from schemas.kinds import FAILURE_REASONS

_MAX_LISTED = 200
_MAX_PICTURES = 24
_MAX_MAPPED = 300
_BOXES = 5
_REGION_PICTURES = 6
_MAP_SIDE = 64  # Pixels of a thumbnail in a map.
_SHOWN = 20


def describe_features(dataset: Dataset, photos: Photos) -> tuple[list[Block], list[str]]:
    """Return blocks and remarks about features or regions."""
    image_ids = dataset.image_ids()
    photos.check_ids(image_ids)
    mapped, sample = set(spread(image_ids, _MAX_MAPPED)), dict[str, np.ndarray]()
    extremes, norms, zeros, broken = list[np.ndarray](), list[np.ndarray](), list[str](), list[str]()
    for ids, values, means in _read_vectors(dataset):
        vectors = values[np.isfinite(values).all(1)]
        if len(vectors):
            extremes = [np.min([*extremes[:1], vectors.min(0)], 0), np.max([*extremes[1:], vectors.max(0)], 0)]
            norms.append(np.sqrt(np.einsum("nd,nd->n", vectors, vectors, dtype=np.float64)))
        finite = {image_id: mean for image_id, mean in zip(ids, means, strict=True) if np.isfinite(mean).all()}
        broken += [image_id for image_id in ids if image_id not in finite]
        zeros += [image_id for image_id, mean in finite.items() if not mean.any()]
        sample |= {image_id: mean.copy() for image_id, mean in finite.items() if image_id in mapped}
    remarks = []
    if broken:
        images = counted(len(broken), "image")
        remarks.append(f"{images} with NaN or infinite values, left out below: {', '.join(broken[:_SHOWN])}")
    if not norms:
        return [], remarks or ["there are no vectors"]
    low, high = extremes
    is_zero = (low == 0) & (high == 0)
    remarks += [*_dimensions(is_zero, "zero"), *_dimensions((low == high) & ~is_zero, "constant")]
    if zeros:
        remarks.append(f"{counted(len(zeros), 'image')} with a vector of zeros: {', '.join(zeros[:_SHOWN])}")
    row: Row = (sum(map(len, norms)), len(low), *np.quantile(np.concatenate(norms), [0, 0.5, 1]).tolist())
    columns = (
        *number_columns("vectors", "dimensions", spec=","),
        *number_columns("lowest norm", "median", "highest", spec=".4g"),
    )
    blocks: list[Block] = [Table(columns, [row], "vectors")]
    if dataset.kind == "regions":
        blocks += _boxes(dataset, photos, image_ids)
    if not sample:
        return blocks, remarks
    title = f"map of {counted(len(sample), 'image')} by principal components: near images have near vectors"
    points = principal_components(np.stack(list(sample.values())))
    return [*blocks, PictureMap.of(title, list(sample), points, photos.addresses(list(sample), _MAP_SIDE))], remarks


def principal_components(vectors: np.ndarray) -> np.ndarray:
    """Return two principal components ``[N, 2]``, their largest values positive."""
    centred = vectors - vectors.mean(0, dtype=np.float64)
    squares, axes = np.linalg.eigh(centred @ centred.T)
    points = np.pad((axes * np.sqrt(squares.clip(0)))[:, ::-1], ((0, 0), (0, 2)))[:, :2]
    return np.asarray(points * np.where(points.max(0) < -points.min(0), -1, 1))


def _read_vectors(dataset: Dataset) -> Iterator[tuple[list[str], np.ndarray, Sequence[np.ndarray]]]:
    """Yield image ids, their vectors ``[N, D]``, and the mean of each image.

    Regions that are not in use are left out.
    """
    is_regions = dataset.kind == "regions"
    names = ["image_id", "features", "num_regions"] if is_regions else ["image_id", "feature"]
    for batch in dataset.batches(names):
        ids = batch.column("image_id").to_pylist()
        vectors = batch.column(names[1]).flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        if is_regions and dataset.spec is not None:
            images = zip(vectors.reshape(len(ids), *dataset.spec.shape), batch.column("num_regions").to_pylist(), strict=True)
            used = [image[:count] for image, count in images]
            yield ids, np.concatenate(used), [image.sum(0) / max(1, len(image)) for image in used]
        else:
            yield ids, vectors.reshape(len(ids), -1), vectors.reshape(len(ids), -1)


def _dimensions(are_such: np.ndarray, word: str) -> Iterator[str]:
    indices = np.flatnonzero(are_such)
    if len(indices):
        shown = ", ".join(map(str, indices[:_SHOWN])) + (", ..." if len(indices) > _SHOWN else "")
        yield f"{len(indices):,} of {len(are_such):,} dimensions {'is' if len(indices) == 1 else 'are'} {word}: {shown}"


def _boxes(dataset: Dataset, photos: Photos, image_ids: Sequence[str]) -> list[Block]:
    """Return pictures with their best regions; none for pictures of other sizes."""
    names, exhibits = RegionNames.of(dataset), []
    chosen = spread([image_id for image_id in sorted(image_ids) if image_id in photos.refs], _REGION_PICTURES)
    for image_id, picture in photos.pictures(chosen, side=2**16):
        row = dataset.get(image_id)
        regions = named_regions(row, names)[:_BOXES]
        if (row["width"], row["height"]) in (picture.size, (0, 0)):
            drawing = draw_boxes(picture, [LabelledBox(item.xyxy, item.text, index) for index, item in enumerate(regions)])
            drawing.thumbnail((800, 800))
            exhibits.append(Exhibit(image_id, jpeg_address(drawing), "", [TextLine(region.text) for region in regions]))
    return [Strip(TextLine(f"best {_BOXES} regions"), exhibits, layout="wide")] if exhibits else []


def describe_failures(dataset: Dataset, photos: Photos) -> list[Block]:
    """Return reasons and inputs of failures, with pictures where they decode."""
    if not dataset.manifest.failed:
        return []
    failures = dataset.failures().to_pylist()
    reasons: list[Row] = [
        (reason, count, FAILURE_REASONS.get(reason, "")) for reason, count in sorted(dataset.manifest.failure_reasons.items())
    ]
    shown = failures[:_MAX_LISTED]
    note = f"and {len(failures) - len(shown):,} more: imagepivot inspect {dataset.folder.location} --failures"
    rows: list[Row] = [tuple(row[name] for name in ("key", "reason", "uri", "message")) for row in shown]
    columns = ("key", "reason", "uri", "message")
    why = {row["key"]: row["reason"] for row in failures}
    pictures = photos.addresses([key for key in why if key in photos.refs][:_MAX_PICTURES])
    exhibits = [Exhibit(key, address, why[key]) for key, address in pictures.items()]
    return [
        Table(("reason", *number_columns("inputs", spec=","), "meaning"), reasons, f"{counted(len(failures), 'failure')}"),
        Table(columns, rows, "failed inputs", [note] if len(failures) > len(shown) else ()),
        *([Strip(TextLine("failed images that decode now"), exhibits)] if exhibits else []),
    ]


def describe_duplicates(duplicates: Sequence[Duplicate], photos: Photos) -> list[Block]:
    """Return groups of a list of duplicates, with pictures of the first ones."""
    groups = [list(members) for _, members in groupby(duplicates, attrgetter("group"))]
    rows: list[Row] = []
    for members in groups[:_MAX_LISTED]:
        names = [" ".join(filter(None, (member.image_id, member.language, member.portion, member.index))) for member in members]
        splits = ", ".join(sorted({member.split for member in members if member.split}))
        rows.append((members[0].group, members[0].kind, max(member.similarity for member in members), splits, ", ".join(names)))
    columns = (*number_columns("group"), "match", *number_columns("similarity", spec=".3f"), "splits", "items")
    images = [member for member in duplicates if not member.language][:_MAX_PICTURES]
    pictures = photos.addresses([member.image_id for member in images])
    exhibits = [
        Exhibit(member.image_id, pictures[member.image_id], f"group {member.group}, {member.kind}")
        for member in images
        if member.image_id in pictures
    ]
    return [
        Table(columns, rows, f"{counted(len(groups), 'group')} of duplicates"),
        *([Strip(TextLine("duplicates"), exhibits)] if exhibits else []),
    ]
