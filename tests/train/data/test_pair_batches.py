"""Batches by index against the pairs in an order made by hand: any number of workers, any place to go on from, any loader."""

import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from schemas.errors import UsageError
from tests.train.trainings import rewrite
from train.data.torch_datasets import PairDataset, PairStream

KEY = ("image_id", "language", "portion", "index")
SIZE, SEED, EPOCHS = 8, 3, 2


def keys(batch):
    columns = (batch[name].tolist() if isinstance(batch[name], torch.Tensor) else batch[name] for name in KEY)
    return [list(key) for key in zip(*columns, strict=True)]


def make(kind, toy, **arguments):
    if kind == "dataset":
        return PairDataset(toy.captions, toy.features, splits=["val", "test"]).batch(SIZE, shuffle=True, seed=SEED, **arguments)
    return PairStream(toy.captions, toy.features, splits=["val", "test"], shuffle=True, seed=SEED).batch(SIZE, **arguments)


@pytest.fixture(scope="module", params=["dataset", "stream"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def expected(kind, toy):
    """Keys of the batches of each epoch: of pairs permuted here, or from the stream itself in one process."""
    pairs = PairDataset(toy.captions, toy.features, splits=["val", "test"])
    stream = PairStream(toy.captions, toy.features, splits=["val", "test"], shuffle=True, seed=SEED)
    epochs = []
    for epoch in range(EPOCHS):
        stream.set_epoch(epoch)
        order = [pairs[n] for n in np.random.default_rng((SEED, epoch)).permutation(len(pairs)).tolist()]
        chosen = order if kind == "dataset" else list(stream)
        epochs.append([[[pair[name] for name in KEY] for pair in chosen[n : n + SIZE]] for n in range(0, len(chosen), SIZE)])
    assert len(epochs[0]) > 9
    assert len(epochs[0][-1]) < SIZE
    return epochs


def test_batches_are_the_pairs_in_order(kind, toy, expected):
    batches = make(kind, toy)
    for epoch in (0, 1, 0):
        batches.set_epoch(epoch)
        assert [keys(batch) for batch in DataLoader(batches, batch_size=None)] == expected[epoch]
    assert [keys(batches[index]) for index in (5, -1)] == [expected[0][5], expected[0][-1]]
    with pytest.raises(IndexError):
        batches[len(batches)]
    assert len(make(kind, toy, drop_last=True)) == len(expected[0]) - 1


def test_batches_continue_after_any_state(kind, toy, expected):
    rng = random.Random(0)
    for _ in range(20):
        epoch, done = rng.randrange(EPOCHS), rng.randrange(len(expected[0]) + 1)
        batches = make(kind, toy)
        batches.set_epoch(epoch)
        state = batches[done - 1]["state"] if done else batches.state_dict()
        resumed = make(kind, toy)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert (resumed.epoch, len(resumed), resumed.state_dict()) == (epoch, len(expected[0]) - done, state)
        resumed.set_epoch(epoch)  # As a loop does: the epoch goes on.
        assert [keys(batch) for batch in DataLoader(resumed, batch_size=None)] == expected[epoch][done:]
        resumed.set_epoch(1 - epoch)
        assert len(resumed) == len(expected[0])


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "context"), [(0, None), (1, "fork"), (2, "fork"), (4, "fork"), (2, "spawn")])
def test_stateful_data_loader_resumes_by_its_own_state(kind, toy, expected, workers, context):
    loaders = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    arguments = {"batch_size": None, "num_workers": workers, "persistent_workers": workers > 0}
    arguments["multiprocessing_context"] = context
    batches = make(kind, toy)
    batches.set_epoch(1)
    loader = loaders.StatefulDataLoader(batches, **arguments)
    first = list(islice(iter(loader), 4))
    state, other = loader.state_dict(), make(kind, toy)
    del loader
    again = loaders.StatefulDataLoader(other, **arguments)
    again.load_state_dict(state)
    assert list(map(keys, first + list(again))) == expected[1]
    other.load_state_dict(first[1]["state"])
    other.set_epoch(0)
    assert list(map(keys, again)) == expected[0]


SCRIPT = """
import json, os, signal, sys

import torch
from torch.utils.data import DataLoader

import imagepivot

captions, features, kind, path, workers, kill_after, context = sys.argv[1:]

if __name__ == "__main__":
    pairs = (imagepivot.PairDataset if kind == "dataset" else imagepivot.PairStream)
    arguments = {"shuffle": True, "seed": 3}
    own = arguments if kind == "stream" else {}
    batches = pairs(captions, features, splits=["val", "test"], **own).batch(8, **({} if own else arguments))
    trained = json.load(open(path)) if os.path.exists(path) else {"keys": [], "state": batches.state_dict()}
    batches.load_state_dict(trained["state"])
    arguments = {"num_workers": int(workers), "multiprocessing_context": context, "persistent_workers": True}
    loader = DataLoader(batches, batch_size=None, **arguments)
    steps = 0
    for epoch in range(batches.epoch, 2):
        batches.set_epoch(epoch)
        for batch in loader:
            keys = zip(batch["image_id"], batch["language"], batch["portion"], batch["index"].tolist())
            trained = {"keys": trained["keys"] + [list(map(list, keys))], "state": batch["state"]}
            with open(path + ".new", "w") as file:
                json.dump(trained, file)
            os.replace(path + ".new", path)
            steps += 1
            if steps == int(kill_after):
                os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("workers", "context"),
    [((1, 1), "fork"), ((2, 2), "fork"), ((4, 4), "fork"), ((2, 4), "fork"), ((2, 4), "spawn")],
)
def test_killed_loop_goes_on_with_the_same_batches(kind, toy, expected, workers, context, tmp_path):
    (tmp_path / "loop.py").write_text(SCRIPT)
    steps = random.Random(f"{workers} {context}").randrange(1, len(expected[0] + expected[1]))
    for number, kill_after in zip(workers, (steps, 0), strict=True):
        words = [toy.captions, toy.features, kind, "trained.json", str(number), str(kill_after), context]
        done = subprocess.run([sys.executable, "loop.py", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == (-9 if kill_after else 0), done.stderr
    trained = json.loads(Path(tmp_path / "trained.json").read_text(encoding="utf-8"))
    assert trained["keys"] == expected[0] + expected[1]


def test_ranks_share_the_batches_of_a_stream(toy, tmp_path):
    features = rewrite(toy.features, tmp_path / "features", list, shards=6)
    pairs = [[pair[name] for name in KEY] for pair in PairStream(toy.captions, features, shuffle=True)]
    share = len(pairs) // 3
    for rank in range(3):
        batches = PairStream(toy.captions, features, shuffle=True, rank=rank, world_size=3).batch(SIZE)
        drawn = [key for batch in DataLoader(batches, batch_size=None) for key in keys(batch)]
        assert drawn == pairs[rank * share : (rank + 1) * share]


def test_states_of_other_batches_are_refused(kind, toy):
    batches = make(kind, toy)
    pairs = PairDataset(toy.captions, toy.features, splits=["val", "test"])
    for name, other in {"batch_size": pairs.batch(9, shuffle=True, seed=SEED), "seed": pairs.batch(SIZE, shuffle=True)}.items():
        with pytest.raises(UsageError, match=rf"{name} of the state is \d+, expected \d+: create the batches as before"):
            batches.load_state_dict(other.state_dict())
    with pytest.raises(UsageError, match="batch_size of the state is None"):
        batches.load_state_dict({})
    with pytest.raises(UsageError, match="batch_size is 0, expected 1 or more"):
        pairs.batch(0)
