"""Pairs of captions and images against the rows of both datasets, joined by hand."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.dataset import open_dataset
from schemas.errors import DatasetError, UsageError
from schemas.features import FeatureSpec
from tests.builders import write_rows
from tests.train.trainings import region_row, rewrite
from train.data.pair_batches import collate_pairs
from train.data.torch_datasets import PairDataset, PairStream

KEY = ("image_id", "language", "portion", "index")
REGIONS = FeatureSpec("regions", (3, 2))


def key_of(pair):
    return tuple(pair[name] for name in KEY)


def keys(pairs):
    return list(map(key_of, pairs))


def joined(captions, features, **selected):
    """The rows of both datasets as one dict per caption, by key; vectors as nested lists."""
    images = {row["image_id"]: row for row in open_dataset(features).table().to_pylist()}
    return {
        key_of(row): row | images[row["image_id"]]
        for row in open_dataset(captions).table().to_pylist()
        if all(row[label] in values for label, values in selected.items())
    }


def check(pair, expected):
    """Compare a pair with the joined rows, except ``length``."""
    assert {name for name in expected if name != "length"} == set(pair)
    for name, value in pair.items():
        if isinstance(value, np.ndarray):
            assert value.flags.writeable
            np.testing.assert_array_equal(value.ravel(), np.array(expected[name], value.dtype))
        else:
            assert value == expected[name]


@pytest.fixture(scope="session")
def regions(toy, tmp_path_factory):
    """Regions of the images of the toy, two to three of them in use, in other shards than the captions."""
    rng, rows = np.random.default_rng(3), []
    for image_id in open_dataset(toy.features).image_ids():
        used = int(rng.integers(2, 4))
        row = region_row(image_id, used, rng.standard_normal((3, 2)).astype(np.float32))
        for value in row.values():
            if isinstance(value, np.ndarray):
                value[:] += (9 * rng.random(value.shape)).astype(value.dtype)
                value[used:] = 0
        rows.append(row)
    folder = tmp_path_factory.mktemp("regions") / "regions"
    write_rows(folder, "regions", rows, REGIONS, shards=4)
    return str(folder)


@pytest.fixture(scope="session")
def resharded(toy, tmp_path_factory):
    """The features of the toy in other numbers of shards."""
    folder = tmp_path_factory.mktemp("resharded")
    return {shards: rewrite(toy.features, folder / str(shards), list, shards=shards) for shards in (1, 2, 6, 7)}


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """Captions that are not encoded, and the features of their images."""
    folder = tmp_path_factory.mktemp("tokens")
    rows = [
        {"image_id": name, "language": "en", "portion": "comparable", "index": n, "split": "train"}
        | {"text": f"A {name}, {n}.", "tokens": ["a", name, str(n), "é"][: n + 2]}
        for name in "abc"
        for n in range(2)
    ]
    write_rows(folder / "captions", "captions", rows, shards=2)
    images = [{"image_id": name, "feature": np.full(4, ord(name), np.float16)} for name in "abcd"]
    write_rows(folder / "features", "features", images, FeatureSpec("toy", (2, 2), "float16"), shards=2)
    return str(folder / "captions"), str(folder / "features")


@pytest.mark.parametrize(
    "selected",
    [
        {},
        {"split": ["val"]},
        {"language": ["fr"]},
        {"split": ["train", "test"], "language": ["en", "de"], "portion": ["comparable"]},
    ],
    ids=str,
)
def test_pair_dataset_equals_joined_rows(toy, resharded, selected):
    pairs = PairDataset(toy.captions, resharded[7], **{f"{label}s": values for label, values in selected.items()})
    expected = joined(toy.captions, toy.features, **selected)
    assert len(pairs) == len(expected)
    assert keys(pairs) == sorted(expected)
    for pair in pairs:
        check(pair, expected[key_of(pair)])
        assert pair["token_ids"].dtype == np.int32
        assert pair["feature"].shape == (8,)
    assert [pairs.image_ids[image] for image in pairs.images] == [pair["image_id"] for pair in pairs]
    pairs[0]["feature"][:] = pairs[0]["token_ids"][:] = 7
    check(pairs[0], expected[key_of(pairs[0])])  # A changed pair leaves the dataset unchanged.


@pytest.mark.parametrize("dataset", [PairDataset, PairStream])
def test_pairs_of_regions_and_tokens(toy, regions, tokens, dataset):
    pairs = list(dataset(toy.captions, regions, splits=["val"]))
    expected = joined(toy.captions, regions, split=["val"])
    assert sorted(keys(pairs)) == sorted(expected)
    by_region = dict.fromkeys(("class_ids", "class_scores", "attribute_ids", "attribute_scores"), (3,))
    for pair in pairs:
        check(pair, expected[key_of(pair)])
        shapes = {name: value.shape for name, value in pair.items() if isinstance(value, np.ndarray) and name != "token_ids"}
        assert shapes == {"features": (3, 2), "boxes": (3, 4), **by_region}
        assert isinstance(pair["num_regions"], int)
    (pair, *_) = dataset(toy.captions, regions, columns=["boxes", "num_regions"])
    assert set(pair) == {*KEY, "split", "token_ids", "boxes", "num_regions"}
    pairs = sorted(dataset(*tokens), key=key_of)
    assert [pair["text"] for pair in pairs] == [f"A {name}, {n}." for name in "abc" for n in range(2)]
    assert [pair["tokens"] for pair in pairs[:2]] == [["a", "a"], ["a", "a", "1"]]
    assert pairs[2]["feature"].dtype == np.float16
    assert pairs[2]["feature"].tolist() == [[98, 98], [98, 98]]


@pytest.mark.parametrize("mapped", [False, True])
def test_unit_vectors(toy, regions, tmp_path, mapped):
    arguments = {"memory_map": tmp_path} if mapped else {}
    for name, images in (("feature", toy.features), ("features", regions)):
        expected = joined(toy.captions, images)
        for pair in (*PairDataset(toy.captions, images, l2=True, **arguments), *PairStream(toy.captions, images, l2=True)):
            vectors = np.array(expected[key_of(pair)][name]).reshape(pair[name].shape)
            norms = np.sqrt((vectors**2).sum(-1, keepdims=True))
            np.testing.assert_allclose(pair[name], vectors / np.where(norms > 0, norms, 1), rtol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 3, 6, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_stream_covers_every_pair(toy, resharded, shards, shuffle):
    stream = PairStream(toy.captions, resharded.get(shards, toy.features), languages=["en", "fr"], shuffle=shuffle)
    expected = joined(toy.captions, toy.features, language=["en", "fr"])
    pairs = list(stream)
    assert sorted(keys(pairs)) == sorted(expected)
    assert stream.num_pairs == len(expected)
    for pair in pairs:
        check(pair, expected[key_of(pair)])


def test_stream_order_follows_seed_and_epoch(toy):
    def order(epoch: int, **arguments):
        stream = PairStream(toy.captions, toy.features, **arguments)
        stream.set_epoch(epoch)
        return keys(stream)

    first, stored = order(0, shuffle=True), [keys(table.to_pylist()) for table in open_dataset(toy.captions).shards(KEY)]
    assert order(0, shuffle=True) == first
    assert order(0) == order(1) == [key for shard in stored for key in shard]
    others = [order(1, shuffle=True), order(0, shuffle=True, seed=1), order(0)]
    assert all(other != first and sorted(other) == sorted(first) for other in others)
    # Not only the shards change places: the captions of a shard do as well.
    assert [key for key in first if key in stored[0]] != [key for key in others[0] if key in stored[0]]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("world_size", "workers"), [(2, 0), (5, 0), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 5), (2, 2)))]
)
def test_stream_shares_of_ranks_are_equal(toy, resharded, world_size, shuffle, workers):
    everything = joined(toy.captions, resharded[6], portion=["comparable"])
    arguments = {"shuffle": shuffle, "portions": ["comparable"]}
    for epoch in (0, 1):
        drawn = []
        for rank in range(world_size):
            stream = PairStream(toy.captions, resharded[6], **arguments, rank=rank, world_size=world_size)
            stream.set_epoch(epoch)
            assert stream.num_pairs == len(everything)
            part = loaded(stream, workers)
            assert len(part) == len(everything) // world_size
            drawn += part
        assert len(set(drawn)) == len(drawn)
        assert set(drawn) <= set(everything)
        alone = PairStream(toy.captions, resharded[6], **arguments)
        alone.set_epoch(epoch)
        assert drawn == keys(alone)[: len(drawn)] or workers
    with pytest.raises(UsageError, match=rf"rank is {world_size} of {world_size} processes, expected 0 to {world_size - 1}"):
        PairStream(toy.captions, toy.features, rank=world_size, world_size=world_size)
    with pytest.raises(UsageError, match=r"world_size is 7, more than the [\d,]+ pairs or 6 shards of features"):
        PairStream(toy.captions, resharded[6], rank=0, world_size=7)


def loaded(dataset, workers, **arguments):
    loader = DataLoader(dataset, batch_size=16, num_workers=workers, collate_fn=collate_pairs, **arguments)
    return [key for batch in loader for key in zip(*(values_of(batch[name]) for name in KEY), strict=True)]


def values_of(column):
    return column.tolist() if isinstance(column, torch.Tensor) else column


@pytest.mark.cluster
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_persistent_workers_see_the_epoch(toy, context):
    stream = PairStream(toy.captions, toy.features, splits=["val"], shuffle=True)
    loader = DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    orders = []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append(keys(loader))
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1])


def test_collate_pairs(toy, regions, tokens):
    pairs = PairDataset(toy.captions, toy.features)
    chosen = [pairs[number] for number in (3, 40, 41, 90)]
    batch = collate_pairs(chosen)
    lengths = [len(pair["token_ids"]) for pair in chosen]
    assert batch["token_ids"].dtype == batch["lengths"].dtype == torch.int64
    assert batch["lengths"].tolist() == lengths
    padded = [[*pair["token_ids"].tolist(), *[0] * (max(lengths) - len(pair["token_ids"]))] for pair in chosen]
    assert batch["token_ids"].tolist() == padded
    assert batch["feature"].tolist() == [pair["feature"].tolist() for pair in chosen]
    assert batch["language"] == [pair["language"] for pair in chosen]
    assert batch["index"].tolist() == [pair["index"] for pair in chosen]
    assert collate_pairs(list(PairDataset(*tokens))[:2])["tokens"] == [["a", "a"], ["a", "a", "1"]]
    batch = collate_pairs([PairDataset(toy.captions, regions)[n] for n in (0, 50)])
    assert (batch["features"].shape, batch["boxes"].shape) == ((2, 3, 2), (2, 3, 4))
    assert batch["num_regions"].dtype == torch.int64


@pytest.mark.parametrize("dataset", [PairDataset, PairStream])
def test_missing_features_are_refused_or_excluded(gappy, dataset, caplog):
    arguments = {"captions": gappy.captions, "features": gappy.features, "splits": ["val", "test"]}
    with pytest.raises(DatasetError, match=r"lacks the features of 1 of 9 images of split 'test'.*allow_missing_features=True"):
        dataset(**arguments)
    pairs = dataset(**arguments, allow_missing_features=True)
    assert [(entry.split, entry.images, entry.first) for entry in pairs.missing_features] == [
        ("test", 1, ("test-004",)),
        ("val", 2, ("val-002", "val-009")),
    ]
    assert caplog.messages == [entry.remark for entry in pairs.missing_features]
    complete = dict.fromkeys(open_dataset(gappy.features).image_ids())
    rows = open_dataset(gappy.captions).table().to_pylist()
    expected = [key_of(row) for row in rows if row["image_id"] in complete and row["split"] != "train"]
    assert sorted(keys(pairs)) == sorted(expected)


@pytest.mark.parametrize("dataset", [PairDataset, PairStream])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"languages": "en"}, UsageError, r"languages is 'en', expected a list, e.g. \['en'\]"),
        ({"splits": ["dev"]}, DatasetError, "has no captions of split 'dev'. It has: test: de comparable 18"),
        ({"columns": ["pixels"]}, UsageError, r"has no column 'pixels'\. It has: feature"),
        ({"captions": "features"}, DatasetError, "holds features, expected captions or encoded captions"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(toy, dataset, arguments, error, message):
    folders = {name: getattr(toy, arguments.get(name, name)) for name in ("captions", "features")}
    with pytest.raises(error, match=message):
        dataset(**{**arguments, **folders})


@pytest.mark.parametrize("dataset", [PairDataset, PairStream])
def test_nonfinite_features_are_refused(toy, dataset, tmp_path):
    feature = np.full(8, np.nan, np.float32)
    broken = rewrite(
        toy.features,
        tmp_path,
        lambda rows: [row | ({"feature": feature} if row["image_id"] == "train-005" else {}) for row in rows],
    )
    with pytest.raises(DatasetError, match=r"NaN or infinite features, e\.g\. of image 'train-005'"):
        list(dataset(toy.captions, broken))
