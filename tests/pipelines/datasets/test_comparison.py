from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.datasets.comparison import DatasetComparison, KeySample, ParameterDifference, compare_datasets, comparison_tables
from pipelines.jobs import DiffJob
from schemas import kinds
from schemas.dataset import Dataset, open_dataset
from schemas.features import FeatureSpec
from tests.builders import write_rows

IMAGES = [f"image-{number:02d}" for number in range(20)]
WIDTH, REGIONS = 6, 4
KEY = {"language": "de", "portion": "comparable", "index": 0, "split": "train"}


def write(
    path: Path, kind: str, rows: list[dict], spec: FeatureSpec | None = None, *, shards: int = 3, inputs=(), **parameters: Any
) -> Dataset:
    write_rows(path, kind, rows, spec, parameters=parameters, inputs=inputs, shards=shards)
    return open_dataset(path)


def vectors(images=IMAGES, width: int = WIDTH, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {image_id: rng.standard_normal(width).astype("float32") for image_id in images}


def features(path: Path, values: dict[str, np.ndarray], *, dtype: str = "float32", **options: Any) -> Dataset:
    spec = FeatureSpec("toy", next(iter(values.values())).shape, dtype)
    rows = [{"image_id": image_id, "feature": value.astype(dtype)} for image_id, value in values.items()]
    return write(path, "features", rows, spec, **options)


def region_rows(images=IMAGES, regions: int = REGIONS) -> list[dict]:
    rng = np.random.default_rng(1)
    rows = []
    for number, image_id in enumerate(images):
        used = (np.arange(regions) < number % (REGIONS + 1))[:, None]
        draw = lambda *shape, used=used: (rng.random((REGIONS, *shape)).astype("float32")[:regions] * used).squeeze()  # noqa: E731
        row = {"image_id": image_id, "width": 640, "height": 480, "num_regions": int(used.sum()), "boxes": draw(4)}
        row |= {"features": draw(WIDTH), "class_ids": (draw(1) * 100).astype("int16"), "class_scores": draw(1)}
        rows.append({**row, "attribute_ids": (draw(1) * 100).astype("int16"), "attribute_scores": draw(1)})
    return rows


def regions_dataset(path: Path, rows: list[dict], regions: int = REGIONS, **options: Any) -> Dataset:
    return write(path, "regions", rows, FeatureSpec("toy", (regions, WIDTH)), **options)


def caption_rows() -> list[dict]:
    return [
        {"image_id": image_id, **KEY, "index": n, "text": f"{image_id} {n}", "tokens": [image_id]}
        for image_id in IMAGES
        for n in range(2)
    ]


def compare(a: Dataset, b: Dataset, tolerance: float = 0.0) -> DatasetComparison:
    return compare_datasets(DiffJob(a.folder.location, b.folder.location, tolerance))


def rows_of(comparison: DatasetComparison) -> list[list]:
    """The rows of all tables without their empty cells."""
    return [[value for value in row if value] for table in comparison_tables(comparison) for row in table.values]


@pytest.mark.parametrize("shards", [(3, 3), (3, 6), (4, 6), (2, 5), (1, 7)])
def test_equal_features_in_any_number_of_shards(tmp_path, shards, monkeypatch):
    monkeypatch.setattr(kinds, "_BATCH_BYTES", 1)
    a, b = (features(tmp_path / name, vectors(), shards=n) for name, n in zip("ab", shards, strict=True))
    comparison = compare(a, b)
    assert not comparison.differs
    assert (comparison.rows_a, comparison.rows_b, comparison.common) == (20, 20, 20)
    assert comparison.missing_in_a == comparison.missing_in_b == comparison.differing == KeySample()
    (feature,) = comparison.vectors
    assert (feature.rows, feature.max_difference, feature.mean, feature.relative, feature.mean_cosine) == (0, 0, 0, 0, 1)
    same = shards[0] == shards[1]
    assert comparison.parameters == (() if same else (ParameterDifference("shards", *shards),))


@pytest.mark.parametrize("shards", [(3, 3), (4, 6)])
def test_differences_of_features_are_those_of_numpy(tmp_path, shards):
    left, right = vectors(), vectors()
    rng = np.random.default_rng(2)
    for image_id in IMAGES[:7]:
        right[image_id] = right[image_id] + rng.standard_normal(WIDTH).astype("float32") / 10
    del left["image-19"], right["image-00"], right["image-10"]
    a, b = features(tmp_path / "a", left, shards=shards[0]), features(tmp_path / "b", right, shards=shards[1])
    comparison = compare(a, b)
    common = [image_id for image_id in IMAGES if image_id in left and image_id in right]
    x, y = (np.stack([side[image_id] for image_id in common]).astype("float64") for side in (left, right))
    gaps = np.abs(x - y)
    cosines = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    assert comparison.common == 17
    assert (comparison.missing_in_a, comparison.missing_in_b) == (
        KeySample(1, ("image-19",)),
        KeySample(2, comparison.missing_in_b.first),
    )
    assert set(comparison.missing_in_b.first) == {"image-00", "image-10"}
    assert comparison.differing.count == 6
    assert set(comparison.differing.first) < set(IMAGES[1:7])
    (feature,) = comparison.vectors
    assert feature.rows == 6
    assert feature.max_difference == gaps.max()
    assert feature.max_difference_key == common[gaps.max(1).argmax()]
    assert feature.mean == pytest.approx(gaps.mean())
    assert feature.relative == pytest.approx(gaps.max() / max(np.abs(x).max(), np.abs(y).max()))
    assert feature.mean_cosine == pytest.approx(cosines.mean())
    assert feature.min_cosine == pytest.approx(cosines.min())
    assert feature.min_cosine_key == common[cosines.argmin()]
    assert replace(comparison, tolerance=1e9).differs  # Keys are missing: no tolerance helps.


def test_differs_ignores_differences_up_to_the_tolerance(tmp_path):
    right = vectors()
    right["image-03"] = right["image-03"].copy()
    right["image-03"][0] += np.float32(0.25)
    a, b = features(tmp_path / "a", vectors()), features(tmp_path / "b", right)
    gap = compare(a, b).vectors[0].max_difference
    assert [compare(a, b, tolerance).differs for tolerance in (0, gap * 0.999, gap)] == [True, True, False]


def test_nan_is_the_largest_difference(tmp_path):
    right = vectors()
    right["image-03"][1], right["image-05"][1] = np.nan, 1e9
    comparison = compare(features(tmp_path / "a", vectors()), features(tmp_path / "b", right), tolerance=1e10)
    assert comparison.differs
    assert comparison.vectors[0].max_difference_key == "image-03"


def test_zero_vectors_have_a_cosine(tmp_path):
    left = {image_id: np.zeros(WIDTH, "float32") for image_id in IMAGES[:2]}
    right = {"image-00": left["image-00"], "image-01": np.ones(WIDTH, "float32")}
    (feature,) = compare(features(tmp_path / "a", left), features(tmp_path / "b", right)).vectors
    assert (feature.mean_cosine, feature.min_cosine, feature.min_cosine_key) == (0.5, 0, "image-01")


def test_float16_is_compared_with_float32_by_value(tmp_path):
    left, right = vectors(), {image_id: value.astype("float16") for image_id, value in vectors().items()}
    comparison = compare(features(tmp_path / "a", left), features(tmp_path / "b", right, dtype="float16"))
    assert 0 < comparison.vectors[0].max_difference < 2e-3
    assert comparison.parameters == (ParameterDifference("feature.dtype", "float32", "float16"),)
    assert not replace(comparison, tolerance=2e-3).differs


def test_features_of_other_shapes_are_not_compared(tmp_path):
    comparison = compare(features(tmp_path / "a", vectors()), features(tmp_path / "b", vectors(width=7)))
    assert comparison.incomparable == "the features have shapes [6] and [7]"
    assert (comparison.common, comparison.vectors, replace(comparison, tolerance=1e9).differs) == (20, (), True)
    assert ["values not compared", comparison.incomparable] in rows_of(comparison)


def test_regions_are_compared_one_by_one_as_far_as_both_use_them(tmp_path):
    left, rows = region_rows(), region_rows()
    by_id = {row["image_id"]: row for row in rows}
    for side in (left, rows):
        side[4]["features"][1] = 0  # Alike.
    changed = by_id["image-04"]  # Four regions in use.
    changed["features"] = changed["features"].copy()
    changed["features"][2] *= -1
    changed["boxes"] = changed["boxes"] + np.float32(0.5)
    changed["class_ids"] = changed["class_ids"] + np.int16(1)
    fewer = by_id["image-03"]  # Three.
    fewer["num_regions"] = 2
    for name in ("boxes", "features", "class_ids", "class_scores", "attribute_ids", "attribute_scores"):
        fewer[name] = fewer[name].copy()
        fewer[name][2] = 0
    comparison = compare(regions_dataset(tmp_path / "a", left), regions_dataset(tmp_path / "b", rows))
    assert comparison.columns == {"width": 0, "height": 0, "num_regions": 1, "class_ids": 1, "attribute_ids": 0}
    assert comparison.differing == KeySample(2, comparison.differing.first)
    by_column = {difference.column: difference for difference in comparison.vectors}
    assert by_column["boxes"].max_difference == pytest.approx(0.5, abs=1e-6)
    assert by_column["boxes"].max_difference_key == "image-04"
    assert (by_column["features"].rows, by_column["features"].min_cosine) == (1, pytest.approx(-1))
    used = sum(number % 5 for number in range(20)) - 1
    assert by_column["features"].mean_cosine == pytest.approx((used - 2) / used)
    assert by_column["class_scores"].rows == 0
    assert replace(comparison, tolerance=1e9).differs


def test_regions_of_another_padding_are_equal(tmp_path):
    wide = region_rows()
    for row in wide:
        for name in ("boxes", "features", "class_ids", "class_scores", "attribute_ids", "attribute_scores"):
            row[name] = np.concatenate([row[name], np.zeros((2, *row[name].shape[1:]), row[name].dtype)])
    comparison = compare(
        regions_dataset(tmp_path / "a", region_rows()), regions_dataset(tmp_path / "b", wide, regions=REGIONS + 2)
    )
    assert not comparison.differs
    assert comparison.parameters == (ParameterDifference("feature.shape", [4, 6], [6, 6]),)
    assert [column.column for column in comparison.vectors] == ["boxes", "features", "class_scores", "attribute_scores"]
    assert [column.mean_cosine for column in comparison.vectors] == [None, pytest.approx(1), None, None]


def test_compare_datasets_counts_different_captions(tmp_path):
    rows = caption_rows()
    for row in rows[:14]:
        row["text"] = row["text"].upper()
    rows[3]["split"] = "val"
    rows.append({**rows[0], "language": "en"})
    comparison = compare(write(tmp_path / "a", "captions", caption_rows()), write(tmp_path / "b", "captions", rows, shards=4))
    assert (comparison.common, comparison.differing.count, len(comparison.differing.first)) == (40, 14, 5)
    assert comparison.columns == {"split": 1, "text": 14, "tokens": 0}
    assert comparison.missing_in_a == KeySample(1, ("image-00/en/comparable/0",))
    rows = rows_of(comparison)
    assert ["only in B", 1, "image-00/en/comparable/0"] in rows
    assert ["in both, with a difference", 14, f"{', '.join(comparison.differing.first)}, ..."] in rows
    assert ["  text differs", 14] in rows


@pytest.mark.parametrize("kind", ["encoded", "vocabulary"])
def test_encoded_captions_and_vocabularies(tmp_path, kind):
    if kind == "encoded":
        rows = [{"image_id": image_id, **KEY, "token_ids": [1, 5, 2], "length": 3} for image_id in IMAGES]
        change: dict[str, Any] = {"token_ids": [1, 6, 2]}
    else:
        tokens = ["<pad>", "<start>", "<end>", "<unk>", "hund", "dog"]
        rows = [{"id": n, "token": token, "count": n, "counts": [("de", n)]} for n, token in enumerate(tokens)]
        change = {"counts": [("en", 4)]}
    shards = 1 if kind == "vocabulary" else 3
    a = write(tmp_path / "a", kind, rows, shards=shards)
    assert not compare(a, write(tmp_path / "b", kind, rows, shards=shards)).differs
    comparison = compare(a, write(tmp_path / "c", kind, [*rows[:4], {**rows[4], **change}, *rows[5:]], shards=shards))
    assert comparison.differs
    assert comparison.differing == KeySample(1, ("image-04/de/comparable/0" if kind == "encoded" else "4",))
    assert {name: count for name, count in comparison.columns.items() if count} == dict.fromkeys(change, 1)


@pytest.mark.parametrize(("kind", "width"), [("embeddings", 4), ("token-features", 2)])
def test_vectors_of_captions_are_compared_within_the_tolerance(tmp_path, kind, width):
    a, b = np.ones(4, "float32"), np.array([1, 1, 1, -1], "float32")
    sides = [[{"image_id": image_id, **KEY, "embedding": x, "vectors": x, "length": 2} for image_id in IMAGES] for x in (a, b)]
    sides[1][0] |= {"length": 3, "vectors": np.append(b, a[:2])}
    comparison = compare(*(write(tmp_path / str(n), kind, rows, FeatureSpec("toy", (width,))) for n, rows in enumerate(sides)))
    (column,) = comparison.vectors
    assert (column.rows, column.max_difference, column.min_cosine) == (20, 2, pytest.approx(0.5 if width == 4 else 0))
    assert comparison.columns == ({"split": 0} if width == 4 else {"split": 0, "length": 1})
    assert [replace(comparison, columns={}, tolerance=tolerance).differs for tolerance in (1.9, 2)] == [True, False]
