import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from schemas.storage.folder import Folder
from tests.pretended_gpu import pretended_gpu
from train.config.sections import from_toml
from train.distributed import Processes, join_processes
from train.jobs import TrainJob
from train.loop import train
from train.runs.checkpoints import LAST, read_checkpoint

CONFIG = """
[data]
portions = { en = ["comparable"], de = ["comparable"] }
[model]
embed_dim = 6
word_dim = 4
[loss]
c2c_probability = 0.5
[optimizer]
learning_rate = 0.01
[schedule]
batch_size = 9
eval_every_steps = 8
max_steps = 20
"""
SCRIPT = """
import sys
from train.config.sections import from_toml
from train.jobs import Corpus
from train.jobs import TrainJob
from train.loop import train

captions, features, vocabulary, output, text = sys.argv[1:]
result = train(TrainJob(from_toml(text, "test"), Corpus(captions, features, vocabulary), output, device="cpu"))
print(result.progress)
"""


@pytest.mark.parametrize(("count", "size"), [(9, 2), (128, 3), (2, 4), (1, 2), (0, 2)])
def test_every_row_belongs_to_one_process(count, size):
    rows = [np.arange(count)[Processes(rank, size).rows(count)] for rank in range(size)]
    assert np.concatenate(rows).tolist() == list(range(count))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_one_process_is_alone():
    processes = Processes()
    part, module = torch.ones(3, 2), torch.nn.Linear(1, 1)
    assert processes.is_first
    assert processes.whole(part, 3) is part
    assert processes.wrap(module) is module
    assert processes.agree(1.5, torch.device("cpu")) == 1.5
    assert processes.greatest(15) == 15


def test_without_torchrun_there_is_one_process(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_processes(torch.device("cpu")) as processes:
        assert processes == Processes(0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.cluster
def test_two_processes_train_the_model_of_one(toy, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}

    def begin(environment: dict[str, str]) -> subprocess.Popen:
        arguments = [toy.captions, toy.features, toy.vocabulary, str(tmp_path / "two"), CONFIG]
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *arguments],
            env=environment,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )

    processes = [begin({**torchrun, "RANK": str(rank)}) for rank in range(2)]
    train(TrainJob(from_toml(CONFIG, "test"), toy, str(tmp_path / "one"), device="cpu"))
    printed = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[0] == printed[1]  # The second process knows the score that the first one measured.
    one, two = (read_checkpoint(Folder(str(tmp_path / name)), LAST).model for name in ("one", "two"))
    start = torch.nn.utils.parameters_to_vector([torch.zeros_like(value) for value in one.values()])
    assert len(start) > 100
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("size", ["1", "2"])
def test_every_process_chooses_its_gpu_before_it_joins_the_others(monkeypatch, size):
    chosen = []
    monkeypatch.setenv("WORLD_SIZE", size)
    for name, value in (("get_rank", 1), ("get_world_size", 2), ("destroy_process_group", None)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: chosen.append(gpu.device))
    with pretended_gpu() as gpu, join_processes(torch.device("cuda", 1)):
        assert gpu.device == 1
    assert chosen == [1] * (size == "2")
