"""Features against the rows of the shards, looked up one by one."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from train.data.features import extractor_fingerprint, missing_images, read_features

TOY = FeatureSpec("toy", (6,))
IDS = ["b", "a", "ü", "猫", *(f"image-{n}" for n in range(23))]


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
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_come_in_the_requested_order(features, tmp_path, dtype, l2, mapped):
    dataset, by_id = features(spec=FeatureSpec("toy", (6,), dtype))
    ids = [IDS[n] for n in np.random.default_rng(1).permutation(len(IDS))[:17]]
    arguments = {"memory_map": tmp_path / "cache", "memory_share": 0} if mapped else {}
    result = read_features(dataset, ids, l2=l2, **arguments)
    assert isinstance(result.stored, np.memmap) == mapped
    assert result.stored.dtype == dtype  # Nothing is held twice as wide as it is stored.
    assert (result.array.dtype, result.array.shape, result.shape, result.width, len(result)) == (
        np.float32,
        (17, 6),
        (17, 6),
        6,
        17,
    )
    for number, image_id in enumerate(ids):
        values = by_id[image_id].astype(np.float64)
        norm = sum(value**2 for value in values) ** 0.5
        np.testing.assert_allclose(result[number : number + 1][0], values / norm if l2 and norm else values, rtol=2e-7)
    chosen = np.array([3, 3, 0, 16])
    np.testing.assert_array_equal(result[chosen], result.array[chosen])
    assert result[chosen].flags.c_contiguous


@pytest.mark.parametrize("width", [1, 3, 8, 2048])
def test_a_batch_has_the_bits_that_all_at_once_have(new_dataset, tmp_path, width):
    values = np.random.default_rng(2).standard_normal((50, width)).astype(np.float16)
    ids = [f"{number:02d}" for number in range(50)]
    rows = [{"image_id": image_id, "feature": value} for image_id, value in zip(ids, values, strict=True)]
    new_dataset(tmp_path / "wide", "features", rows, parameters={}, spec=FeatureSpec("wide", (width,), "float16"))
    wide = values.astype(np.float32)
    expected = wide / np.linalg.norm(wide, axis=-1, keepdims=True)
    for arguments in ({}, {"memory_map": tmp_path / "cache"}):
        features = read_features(open_dataset(tmp_path / "wide"), ids, l2=True, **arguments)
        assert np.concatenate([features[n : n + 1] for n in range(50)]).tobytes() == expected.tobytes()
        assert features[np.arange(7, 39)].tobytes() == expected[7:39].tobytes()


def test_a_feature_of_zeros_stays_zero(features):
    dataset, _ = features()
    assert read_features(dataset, [IDS[3]], l2=True).array.tolist() == [[0] * 6]


def test_several_features_of_an_image_stay_apart(features):
    dataset, by_id = features(spec=FeatureSpec("toy", (2, 3)))
    result = read_features(dataset, IDS[:3], l2=True)
    assert (result.array.shape, result.width) == ((3, 2, 3), 3)
    for row, image_id in zip(result.array, IDS, strict=False):
        values = by_id[image_id].reshape(2, 3)
        np.testing.assert_allclose(row, values / np.linalg.norm(values, axis=1, keepdims=True), rtol=2e-7)


def test_no_images(features, tmp_path):
    dataset, _ = features()
    for arguments in ({}, {"memory_map": tmp_path / "cache"}):
        assert read_features(dataset, [], **arguments).array.shape == (0, 6)


def test_a_mapped_file_is_used_again(features, tmp_path):
    dataset, _ = features()
    arguments = {"memory_map": tmp_path / "cache", "memory_share": 0}
    first = read_features(dataset, IDS[:5], **arguments)
    [path] = (tmp_path / "cache").iterdir()
    before = path.stat()
    again = read_features(dataset, IDS[:5], **arguments)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert np.array_equal(first.array, again.array)
    with pytest.raises(ValueError, match="read-only"):
        again.stored[0] = 0
    # Whatever is asked of the dataset, there is one copy.
    assert np.array_equal(read_features(dataset, IDS[4::-1], **arguments).array, first.array[::-1])
    np.testing.assert_allclose(
        np.linalg.norm(read_features(dataset, IDS[:3], l2=True, **arguments).array, axis=1), 1, rtol=1e-6
    )
    assert len(read_features(dataset, IDS, **arguments)) == len(IDS)
    assert list((tmp_path / "cache").iterdir()) == [path]
    # Other data need another file; the features of a dataset may also grow, and its fingerprint stays.
    read_features(features("others")[0], IDS[:5], **arguments)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_torn_mapped_file_never_appears(features, tmp_path, monkeypatch):
    dataset, _ = features()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("train.data.features.norms_of", fail)
    with pytest.raises(KeyboardInterrupt):
        read_features(dataset, IDS[:5], memory_map=tmp_path / "cache", memory_share=0)
    assert list((tmp_path / "cache").iterdir()) == []


def test_features_too_large_for_memory(features):
    dataset, _ = features()
    with pytest.raises(
        UsageError, match=r"27 images take 0\.0 GB, more than 0% of the .* GB of memory .*: name a folder .*--memory-map"
    ):
        read_features(dataset, IDS, memory_share=0)


def test_missing_images(features):
    dataset, _ = features()
    ids = ["x0", "b", *(f"x{n}" for n in range(1, 7)), "a"]
    assert missing_images(dataset, ids).tolist() == [0, 2, 3, 4, 5, 6, 7]
    assert missing_images(dataset, IDS).tolist() == []
    with pytest.raises(DatasetError, match=r"lacks the features of 7 of 9 images: x0, x1, x2, x3, x4, \.\.\.$"):
        read_features(dataset, ids)
    with pytest.raises(DatasetError, match=r"lacks the features of 1 of 2 images: x$"):
        read_features(dataset, ["a", "x"])


def test_extractor_fingerprint(features):
    plain = extractor_fingerprint(features("a")[0])
    assert plain == extractor_fingerprint(features("b", parameters={"imported": {"format": "npy"}}, shards=5)[0])
    assert plain != extractor_fingerprint(features("c", spec=FeatureSpec("other", (2, 3)))[0])
    assert extractor_fingerprint(features("d", parameters={"extractor_fingerprint": "1234"})[0]) == "1234"


def test_other_kinds_are_refused(toy):
    for function in (extractor_fingerprint, lambda dataset: read_features(dataset, [])):
        with pytest.raises(DatasetError, match="holds encoded, expected features or regions: give the folder of the features"):
            function(open_dataset(toy.captions))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_refused(new_dataset, tmp_path, value):
    rows = [{"image_id": name, "feature": np.zeros(6)} for name in IDS]
    rows[4]["feature"][5] = value
    new_dataset(tmp_path / "features", "features", rows, parameters={}, spec=TOY)
    with pytest.raises(DatasetError, match=f"features that are not finite numbers, among them that of image '{IDS[4]}'"):
        read_features(open_dataset(tmp_path / "features"), IDS)
    arguments = {"memory_map": tmp_path / "cache"}
    with pytest.raises(DatasetError, match=f"features that are not finite numbers, among them that of image '{IDS[4]}'"):
        read_features(open_dataset(tmp_path / "features"), IDS, **arguments)
    for chosen in ({}, arguments):  # Only what is read counts.
        assert len(read_features(open_dataset(tmp_path / "features"), IDS[:4], **chosen)) == 4
