import numpy as np
import pytest
import torch

from tests.fake_gpu import fake_gpu
from tests.train.trainings import CONFIG, DAN, MHA_D, ORDER, events, train_in_two_processes, weights
from train.config.sections import from_toml
from train.jobs import TrainJob
from train.loop.distributed import DistributedContext, join_processes
from train.loop.training import train


@pytest.mark.parametrize(("count", "size"), [(9, 2), (128, 3), (2, 4), (1, 2), (0, 2)])
def test_rows_partition_a_batch(count, size):
    rows = [np.arange(count)[DistributedContext(rank, size).rows(count)] for rank in range(size)]
    assert np.concatenate(rows).tolist() == list(range(count))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.cluster
@pytest.mark.parametrize(
    "text",
    [
        CONFIG,
        MHA_D,
        DAN.replace("dropout = 0.2", "dropout = 0.0"),
        # An encoder for each language, of which the batches of a step use different ones.
        ORDER.replace("c2c_probability = 0.5", "").replace("[schedule]", "[schedule]\ngrad_accum_steps = 3"),
    ],
    ids=["vse", "mha-d", "dan", "several batches a step"],
)
def test_two_processes_equal_one(toy, toy_regions, tmp_path, text):
    corpus, text = toy_regions if "kind" in text else toy, text.replace("max_steps = 44", "max_steps = 20")
    printed = train_in_two_processes(corpus, tmp_path / "two", text)
    assert printed[0] == printed[1]  # The second process knows the score that the first one measured.
    train(TrainJob(from_toml(text, "test"), corpus, str(tmp_path / "one"), device="cpu"))
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert sum(value.numel() for value in one.values()) > 100
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert {line["step"] for line in events(tmp_path / "two", "step")} == {10, 20}
    for ours, theirs in zip(events(tmp_path / "two", "step"), events(tmp_path / "one", "step"), strict=True):
        assert ours["terms"] == {name: pytest.approx(value, rel=1e-3, abs=1e-4) for name, value in theirs["terms"].items()}


@pytest.mark.cluster
def test_two_processes_with_dropout(toy_regions, tmp_path):
    text = DAN.replace("max_steps = 44", "max_steps = 5")
    train_in_two_processes(toy_regions, tmp_path / "two", text)
    train(TrainJob(from_toml(text, "test"), toy_regions, str(tmp_path / "one"), device="cpu"))
    two, one = weights(tmp_path / "two"), weights(tmp_path / "one")
    counts = [name for name in one if name.endswith("next_seed")]
    assert len(counts) == 3
    assert all(torch.equal(two[name], one[name]) for name in counts)


@pytest.mark.parametrize("size", ["1", "2"])
def test_join_processes_sets_the_gpu_first(monkeypatch, size):
    chosen = []
    monkeypatch.setenv("WORLD_SIZE", size)
    for name, value in (("get_rank", 1), ("get_world_size", 2), ("destroy_process_group", None)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: chosen.append(gpu.device))
    with fake_gpu() as gpu, join_processes(torch.device("cuda", 1)):
        assert gpu.device == 1
    assert chosen == [1] * (size == "2")
