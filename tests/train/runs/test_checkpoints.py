import pickle

import pytest
import torch

from schemas.errors import DatasetError
from schemas.storage import Folder
from train.models.joint_embedding import ModelConfig
from train.runs.checkpoints import BEST, LAST, Checkpoint, Standing, read_checkpoint, write_checkpoint

CHECKPOINT = Checkpoint(
    config="[data]\n",
    model_config=ModelConfig(
        ("en", "de"), 9, 3, embedding=2, words=2, shared=False, language_ids={"en": (0, 3, 5), "de": (3, 4)}
    ),
    model={"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([float("nan"), -0.0])},
    tokens=("<pad>", "<start>", "<end>", "<unk>", "é"),
    fingerprints={"captions": "c" * 64},
    captions={"max_length": 100, "text": {"recipe": "raw"}},
    seed=2**31,
    precision="fp32",
    standing=Standing(step=7, best_score=12.5, best_step=3, stale=2, stopped="steps"),
    optimizer={"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
    sampler={"step": 2**40, "languages": {"en": {"epoch": 1, "position": 2}}},
)


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path))


def test_a_checkpoint_survives_a_round_trip(folder):
    write_checkpoint(folder, LAST, CHECKPOINT)
    stored = read_checkpoint(folder, LAST)
    for name in ("config", "tokens", "fingerprints", "captions", "seed", "precision", "standing", "sampler", "model_config"):
        assert getattr(stored, name) == getattr(CHECKPOINT, name), name
    assert stored.model["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert stored.model["b"].view(torch.int32).tolist() == CHECKPOINT.model["b"].view(torch.int32).tolist()
    assert stored.optimizer["param_groups"] == CHECKPOINT.optimizer["param_groups"]
    assert folder.names() == [LAST]


def test_a_failed_write_leaves_the_old_checkpoint(folder, monkeypatch):
    write_checkpoint(folder, LAST, CHECKPOINT)
    before = folder.read(LAST)

    def fail(content, file):
        file.write(b"half")
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        write_checkpoint(folder, LAST, CHECKPOINT)
    assert folder.read(LAST) == before
    assert folder.names() == [LAST]


def test_a_missing_checkpoint(folder):
    with pytest.raises(FileNotFoundError):
        read_checkpoint(folder, BEST)


class Evil:
    """Runs code when it is unpickled without care."""

    def __reduce__(self):
        return print, ("pwned",)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"no checkpoint", b"PK\x03\x04 no zip", pickle.dumps({"a": 1}), pickle.dumps(Evil())),
        *(b"hello", b"a", b"q\xff", b"J\x01", b"X\x01\x00\x00\x00\xff", b"\x88\x85R"),
    ],
    ids=["empty", "text", "zip", "pickle", "evil", "hello", "a", "key", "struct", "unicode", "type"],
)
def test_a_file_that_is_not_a_checkpoint_is_refused(folder, data, capfd):
    folder.write(BEST, data)
    with pytest.raises(DatasetError, match=r"best\.pt is (damaged, or )?not a checkpoint"):
        read_checkpoint(folder, BEST)
    assert "pwned" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("cut", [1, 400, 1000])
def test_a_torn_checkpoint_is_refused(folder, cut):
    write_checkpoint(folder, BEST, CHECKPOINT)
    folder.write(BEST, folder.read(BEST)[:-cut])
    with pytest.raises(DatasetError, match=r"best\.pt is damaged, or not a checkpoint"):
        read_checkpoint(folder, BEST)


def test_code_in_a_checkpoint_does_not_run(folder, capfd):
    with folder.replace(BEST) as file:
        torch.save({"format": "imagepivot run", "version": 1, "model": Evil()}, file)
    with pytest.raises(DatasetError, match="damaged, or not a checkpoint"):
        read_checkpoint(folder, BEST)
    assert "pwned" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"format": "imagepivot run", "version": 2},
            r"best\.pt has version 2, but this imagepivot reads up to 1: update imagepivot",
        ),
        ({"state_dict": {}}, "is not a checkpoint of a run: give the folder that imagepivot train wrote"),
        ([1, 2], "is not a checkpoint of a run"),
        ({"format": "imagepivot run", "version": 1, "seed": 3}, r"best\.pt is damaged"),
    ],
)
def test_other_content_is_refused(folder, content, message):
    with folder.replace(BEST) as file:
        torch.save(content, file)
    with pytest.raises(DatasetError, match=message):
        read_checkpoint(folder, BEST)
