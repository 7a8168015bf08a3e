"""Features and regions as arrays against the rows that were written, padding left out by hand."""

import pickle

import numpy as np
import pyarrow as pa
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from tests.train.trainings import region_row
from train.data.feature_checks import find_feature_outliers
from train.data.features import extractor_fingerprint, missing_images, read_features, shard_features, vectors_of

TOY = FeatureSpec("toy", (6,))
IDS = ["b", "a", "ü", "猫", *(f"image-{n}" for n in range(23))]


@pytest.fixture(params=["in memory", "mapped"])
def storage(request, tmp_path) -> dict:
    """Arguments of `read_features`."""
    return {"memory_map": tmp_path / "cache"} if request.param == "mapped" else {}


@pytest.fixture
def features(new_dataset, tmp_path):
    rng = np.random.default_rng(0)

    def write(name="features", spec=TOY, **kwargs):
        rows = [{"image_id": name, "feature": rng.standard_normal(6).astype(spec.dtype)} for name in IDS]
        rows[3]["feature"][:] = 0
        new_dataset(tmp_path / name, "features", rows, parameters=kwargs.pop("parameters", {}), spec=spec, **kwargs)
        return open_dataset(tmp_path / name), {row["image_id"]: row["feature"] for row in rows}

    return write


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("l2", [False, True])
def test_read_features_in_requested_order(features, storage, dtype, l2):
    dataset, by_id = features(spec=FeatureSpec("toy", (6,), dtype))
    ids = [IDS[n] for n in np.random.default_rng(1).permutation(len(IDS))[:17]]
    result = read_features(dataset, ids, l2=l2, **storage)
    assert isinstance(result.stored, np.memmap) == bool(storage)
    assert result.stored.dtype == dtype  # Nothing is held twice as wide as it is stored.
    assert (result[:].dtype, result[:].shape, result.shape, len(result)) == (np.float32, (17, 6), (17, 6), 17)
    for number, image_id in enumerate(ids):
        values = by_id[image_id].astype(np.float64)
        norm = sum(value**2 for value in values) ** 0.5
        np.testing.assert_allclose(result[number : number + 1][0], values / norm if l2 and norm else values, rtol=2e-7)
    chosen = np.array([3, 3, 0, 16])
    np.testing.assert_array_equal(result[chosen], result[:][chosen])
    assert result[chosen].flags.c_contiguous
    assert result.mask(slice(None)) is None
    assert read_features(dataset, [], l2=l2, **storage)[:].shape == (0, 6)


@pytest.mark.parametrize("width", [3, 2048])
def test_features_of_a_batch_equal_all_features(new_dataset, storage, tmp_path, width):
    values = np.random.default_rng(2).standard_normal((50, width)).astype(np.float16)
    ids = [f"{number:02d}" for number in range(50)]
    rows = [{"image_id": image_id, "feature": value} for image_id, value in zip(ids, values, strict=True)]
    new_dataset(tmp_path / "wide", "features", rows, parameters={}, spec=FeatureSpec("wide", (width,), "float16"))
    wide = values.astype(np.float32)
    expected = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    features = read_features(open_dataset(tmp_path / "wide"), ids, l2=True, **storage)
    assert np.concatenate([features[n : n + 1] for n in range(50)]).tobytes() == expected.tobytes()
    assert features[np.arange(7, 39)].tobytes() == expected[7:39].tobytes()


def test_mapped_file_is_reused(features, tmp_path):
    dataset, _ = features()
    arguments = {"memory_map": tmp_path / "cache"}
    first = read_features(dataset, IDS[:5], **arguments)
    [path] = (tmp_path / "cache").iterdir()
    before = path.stat()
    # Whatever is asked of the dataset, there is one copy.
    again = read_features(dataset, IDS[4::-1], **arguments)
    assert np.array_equal(again[:], first[:][::-1])
    with pytest.raises(ValueError, match="read-only"):
        again.stored[0] = 0
    np.testing.assert_allclose(np.linalg.norm(read_features(dataset, IDS[:3], l2=True, **arguments)[:], axis=1), 1, rtol=1e-6)
    assert len(read_features(dataset, IDS, **arguments)) == len(IDS)
    assert list((tmp_path / "cache").iterdir()) == [path]
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    # Other data need another file; the features of a dataset may also grow, and its fingerprint stays.
    read_features(features("others")[0], IDS[:5], **arguments)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_features_too_large_for_memory(features, tmp_path, monkeypatch):
    dataset, _ = features()
    monkeypatch.setattr("train.data.features.memory_limit", lambda: 1)
    message = r"27 images take 0\.0 GB, more than 50% of the .* GB of memory .*: name a folder .*--memory-map"
    with pytest.raises(UsageError, match=message):
        read_features(dataset, IDS)
    assert len(read_features(dataset, IDS, memory_map=tmp_path / "cache")) == len(IDS)


def test_missing_images(features, write):
    ids = ["x0", "b", *(f"x{n}" for n in range(1, 7)), "a"]
    assert missing_images(features()[0], ids).tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert missing_images(features()[0], IDS).tolist() == []
    assert missing_images(write()[0], [*REGION_IDS, "other"]).tolist() == [0, 4, 8, 12]  # Images without regions.


def test_extractor_fingerprint(features, toy):
    plain = extractor_fingerprint(features("a")[0])
    assert plain == extractor_fingerprint(features("b", parameters={"imported": {"format": "npy"}}, shards=5)[0])
    assert plain != extractor_fingerprint(features("c", spec=FeatureSpec("other", (2, 3)))[0])
    assert extractor_fingerprint(features("d", parameters={"extractor_fingerprint": "1234"})[0]) == "1234"
    for function in (extractor_fingerprint, lambda dataset: read_features(dataset, [])):
        with pytest.raises(DatasetError, match="holds encoded, expected features or regions"):
            function(open_dataset(toy.captions))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_features_are_refused(new_dataset, write, storage, tmp_path, value):
    rows = [{"image_id": name, "feature": np.zeros(6)} for name in IDS]
    rows[4]["feature"][5] = value
    new_dataset(tmp_path / "features", "features", rows, parameters={}, spec=TOY)
    regions, _ = write(np.nan, factors={7: value})
    for dataset, ids, image_id in ((open_dataset(tmp_path / "features"), IDS, IDS[4]), (regions, FULL, "image-07")):
        with pytest.raises(DatasetError, match=f"has NaN or infinite features, e.g. of image '{image_id}'"):
            read_features(dataset, ids, **storage)
        assert len(read_features(dataset, ids[:4], **storage)) == 4  # Only requested images are checked.


SPEC = FeatureSpec("toy-regions", (3, 2), "float16")
REGION_IDS = [f"image-{number:02d}" for number in range(12)]
USED = [number % 4 for number in range(12)]  # 0, 4 and 8 have no region.
FULL = [image_id for image_id, used in zip(REGION_IDS, USED, strict=True) if used]


@pytest.fixture
def write(new_dataset, tmp_path):
    """Write regions with a value as padding, and return the dataset and the regions by image."""

    def write(padding: float = 0.0, name: str = "regions", used=USED, factors=()):
        rng, rows, by_id = np.random.default_rng(0), [], {}
        for number, image_id in enumerate(REGION_IDS):
            values = (1 + rng.random(SPEC.shape)).astype(np.float16)
            values *= np.float16(dict(factors).get(number, 1))
            by_id[image_id] = values[: used[number]].astype(np.float64)
            values[used[number] :] = padding
            rows.append(region_row(image_id, used[number], values))
        new_dataset(tmp_path / name, "regions", rows, parameters={}, spec=SPEC)
        return open_dataset(tmp_path / name), by_id

    return write


@pytest.mark.parametrize("padding", [0.0, -7.0, np.nan, np.inf])
@pytest.mark.parametrize("l2", [False, True])
def test_padding_is_zeros_and_masked(write, storage, padding, l2):
    dataset, by_id = write(padding)
    ids = FULL[::-1]
    read = read_features(dataset, ids, l2=l2, **storage)
    assert (read.stored.dtype, isinstance(read.stored, np.memmap)) == (np.float16, bool(storage))
    assert (read.shape, read[:].dtype) == ((9, 3, 2), np.float32)
    mask = read.mask(slice(None))
    for values, present, image_id in zip(read[:], mask, ids, strict=True):
        expected = by_id[image_id] / (np.sqrt((by_id[image_id] ** 2).sum(1, keepdims=True)) if l2 else 1)
        assert present.tolist() == [True] * len(expected) + [False] * (3 - len(expected))
        np.testing.assert_allclose(values[: len(expected)], expected, rtol=2e-7)
        assert values[len(expected) :].tolist() == [[0.0, 0.0]] * (3 - len(expected))
    chosen = np.array([4, 0, 4])
    assert read.mask(chosen).tolist() == mask[chosen].tolist()
    assert np.array_equal(read[chosen], read[:][chosen])


def test_mapped_features_are_pickled_as_path(write, storage):
    dataset, _ = write()
    read = read_features(dataset, FULL, l2=True, **storage)
    data = pickle.dumps(read)
    copy = pickle.loads(data)
    assert (read.stored[1].tobytes() in data) != isinstance(copy.stored, np.memmap) == bool(storage)
    assert np.array_equal(copy[:], read[:])
    assert np.array_equal(copy.mask(slice(None)), read.mask(slice(None)))


def test_shard_features_of_regions(write):
    dataset, by_id = write(np.nan)
    for chosen, expected in ((None, FULL), (pa.array(REGION_IDS[3:6]), ["image-03", "image-05"])):
        shards = [shard_features(dataset, number, chosen=chosen) for number in range(dataset.num_shards)]
        assert sorted(image_id for ids, _ in shards for image_id in ids) == expected
        for ids, read in shards:
            for image_id, values, mask in zip(ids, read[:], read.mask(slice(None)), strict=True):
                assert np.array_equal(values[mask], by_id[image_id])
                assert not values[~mask].any()


def test_invalid_region_counts_are_refused(write):
    for used in (4, -1):
        dataset, _ = write(name=f"wrong{used}", used=[*USED[:-1], used])
        low, high = min(0, used), max(3, used)
        with pytest.raises(DatasetError, match=f"has images with {low} to {high} regions, expected 0 to 3"):
            vectors_of(dataset, dataset.table(["features", "num_regions"]))


def test_padding_is_no_outlier(write, storage):
    dataset, _ = write(5e4)
    assert find_feature_outliers("train", read_features(dataset, FULL, **storage), FULL) is None
    dataset, _ = write(5e4, name="odd", factors={5: 0, 6: 1000, 7: 1e-3})
    found = find_feature_outliers("train", read_features(dataset, FULL, **storage), FULL)
    assert (found.images, found.zero_features, found.norm_outliers, found.example) == (9, 1, 2, "image-05")
    assert 1.4 < found.median < 2.9
