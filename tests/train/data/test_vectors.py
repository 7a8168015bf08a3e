"""Regions as features: against the rows that were written, padding left out by hand."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError
from schemas.features import FeatureSpec
from train.data.features import missing_images, read_features, shard_features
from train.data.norms import find_feature_outliers
from train.data.vectors import feature_spec, in_use, vectors_of

SPEC = FeatureSpec("toy-regions", (3, 2), "float16")
IDS = [f"image-{number:02d}" for number in range(12)]
USED = [number % 4 for number in range(12)]  # 0, 4 and 8 have no region.
FULL = [image_id for image_id, used in zip(IDS, USED, strict=True) if used]


@pytest.fixture
def write(new_dataset, tmp_path):
    """Write regions whose padding holds a value, and return the dataset and the regions in use by image."""

    def write(padding: float = 0.0, name: str = "regions", used=USED, factors=()):
        rng, rows, by_id = np.random.default_rng(0), [], {}
        for number, image_id in enumerate(IDS):
            values = (1 + rng.random(SPEC.shape)).astype(np.float16)
            values *= np.float16(dict(factors).get(number, 1))
            by_id[image_id] = values[: used[number]].astype(np.float64)
            values[used[number] :] = padding
            row = {"image_id": image_id, "width": 1, "height": 1, "num_regions": used[number], "features": values}
            row["boxes"] = np.zeros((3, 4), np.float32)
            for kind in ("class", "attribute"):
                row |= {f"{kind}_ids": np.zeros(3, np.int16), f"{kind}_scores": np.zeros(3, np.float32)}
            rows.append(row)
        new_dataset(tmp_path / name, "regions", rows, parameters={}, spec=SPEC)
        return open_dataset(tmp_path / name), by_id

    return write


def file_pages(folder: Path) -> int:
    """How many bytes of files in a folder stand in the memory of this process, of all mappings."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("padding", [0.0, -7.0, np.nan, np.inf])
@pytest.mark.parametrize("l2", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_padding_is_zeros_and_masked(write, tmp_path, padding, l2, mapped):
    dataset, by_id = write(padding)
    arguments = {"memory_map": tmp_path / "cache", "memory_share": 0} if mapped else {}
    ids = FULL[::-1]
    read = read_features(dataset, ids, l2=l2, **arguments)
    assert (read.stored.dtype, isinstance(read.stored, np.memmap)) == (np.float16, mapped)
    assert (read.shape, read.array.dtype) == ((9, 3, 2), np.float32)
    mask = read.mask(slice(None))
    for values, present, image_id in zip(read.array, mask, ids, strict=True):
        expected = by_id[image_id] / (np.sqrt((by_id[image_id] ** 2).sum(1, keepdims=True)) if l2 else 1)
        assert present.tolist() == [True] * len(expected) + [False] * (3 - len(expected))
        np.testing.assert_allclose(values[: len(expected)], expected, rtol=2e-7)
        assert values[len(expected) :].tolist() == [[0.0, 0.0]] * (3 - len(expected))
    chosen = np.array([4, 0, 4])
    assert read.mask(chosen).tolist() == mask[chosen].tolist()
    assert np.array_equal(read[chosen], read.array[chosen])


def test_vectors_have_no_mask(toy):
    dataset = open_dataset(toy.features)
    assert read_features(dataset, dataset.image_ids()[:3]).mask(slice(None)) is None


def test_one_copy_is_mapped(write, tmp_path):
    dataset, _ = write()
    first = read_features(dataset, FULL[:4], memory_map=tmp_path / "cache")
    [path] = (tmp_path / "cache").iterdir()
    stamp = path.stat().st_mtime_ns
    again = read_features(dataset, FULL[2:], l2=True, memory_map=tmp_path / "cache")
    assert [path.stat().st_mtime_ns] == [stamp for path in (tmp_path / "cache").iterdir()]
    assert str(first.stored.filename) == str(again.stored.filename) == str(again.counts.filename) == str(path)
    # Values, norms and numbers of 12 images, behind a header.
    assert 0 < path.stat().st_size - 12 * (3 * 2 * 2 + 3 * 4 + 4) <= 256


def test_what_is_mapped_is_pickled_as_its_path(write, tmp_path):
    dataset, _ = write()
    read = read_features(dataset, FULL, l2=True, memory_map=tmp_path / "cache")
    data = pickle.dumps(read)
    assert read.stored[1].tobytes() not in data
    copy = pickle.loads(data)
    assert isinstance(copy.stored, np.memmap)
    assert np.array_equal(copy.array, read.array)
    assert np.array_equal(copy.mask(slice(None)), read.mask(slice(None)))
    plain = pickle.loads(pickle.dumps(read_features(dataset, FULL)))
    assert np.array_equal(plain.array, read_features(dataset, FULL).array)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is mapped")
def test_what_was_read_does_not_stay(write, tmp_path):
    dataset, _ = write()
    read = read_features(dataset, FULL, memory_map=tmp_path / "cache")
    assert file_pages(tmp_path / "cache") == 0  # Nor what was written.
    assert float(np.asarray(read.stored).sum()) > 0
    assert file_pages(tmp_path / "cache") > 0
    before = read.array
    assert file_pages(tmp_path / "cache") == 0
    assert np.array_equal(read.array, before)
    read.norms_of_images()
    read.mask(slice(None))
    assert file_pages(tmp_path / "cache") == 0


def test_an_image_without_a_region_is_one_without_features(write, tmp_path):
    dataset, _ = write()
    assert missing_images(dataset, [*IDS, "other"]).tolist() == [0, 4, 8, 12]
    for arguments in ({}, {"memory_map": tmp_path / "cache"}):
        with pytest.raises(DatasetError, match=r"lacks the features of 3 of 12 images: image-00, image-04, image-08$"):
            read_features(dataset, IDS, **arguments)


def test_a_shard_gives_the_images_that_have_regions(write):
    dataset, by_id = write(np.nan)
    found = {}
    for number in range(dataset.num_shards):
        image_ids, read = shard_features(dataset, number)
        found |= dict(zip(image_ids, zip(read.array, read.mask(slice(None)), strict=True), strict=True))
    assert sorted(found) == FULL
    for image_id, (values, mask) in found.items():
        assert np.array_equal(values[mask], by_id[image_id])
        assert not values[~mask].any()
    chosen = [shard_features(dataset, number, chosen=pa.array(IDS[3:6]))[0] for number in range(dataset.num_shards)]
    assert sorted(image_id for ids in chosen for image_id in ids) == ["image-03", "image-05"]


def test_impossible_numbers_of_regions_are_refused(write):
    for used in (4, -1):
        dataset, _ = write(name=f"wrong{used}", used=[*USED[:-1], used])
        low, high = min(0, used), max(3, used)
        with pytest.raises(
            DatasetError, match=rf"says that between {low} and {high} regions .*, expected 0 to 3: run 'imagepivot"
        ):
            vectors_of(dataset, dataset.table(["features", "num_regions"]))


def test_what_is_not_finite_is_refused_where_it_is_in_use(write, tmp_path):
    dataset, _ = write(np.nan, factors={7: np.nan})
    for arguments in ({}, {"memory_map": tmp_path / "cache"}):
        with pytest.raises(DatasetError, match="features that are not finite numbers, among them that of image 'image-07'"):
            read_features(dataset, FULL, **arguments)
        assert len(read_features(dataset, FULL[:5], **arguments)) == 5


@pytest.mark.parametrize("mapped", [False, True])
def test_padding_is_not_odd(write, tmp_path, mapped):
    arguments = {"memory_map": tmp_path / "cache"} if mapped else {}
    dataset, _ = write(5e4)
    assert find_feature_outliers("train", read_features(dataset, FULL, **arguments), FULL) is None
    dataset, _ = write(5e4, name="odd", factors={5: 0, 6: 1000, 7: 1e-3})
    found = find_feature_outliers("train", read_features(dataset, FULL, **arguments), FULL)
    assert (found.images, found.zero_features, found.norm_outliers, found.example) == (9, 1, 2, "image-05")
    assert 1.4 < found.median < 2.9


def test_other_kinds(toy):
    with pytest.raises(DatasetError, match="holds encoded, expected features or regions: give the folder of the features"):
        feature_spec(open_dataset(toy.captions))


def test_the_first_ones_are_in_use():
    assert in_use(np.array([0, 2, 3]), 3).tolist() == [[False] * 3, [True, True, False], [True] * 3]
