import io
import pickle
import random
import re
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from schemas.errors import DatasetError
from schemas.storage.folder import Folder
from tests.fake_gpu import fake_gpu
from train.models.retrieval_model import Dimensions
from train.runs.checkpoints import BEST, LAST, Checkpoint, TrainingProgress, read_checkpoint, weights_digest, write_checkpoint
from train.runs.run import open_run

CHECKPOINT = Checkpoint(
    config="[data]\n",
    dimensions=Dimensions(("en", "de"), 9, (3,), language_ids={"en": (0, 3, 5), "de": (3, 4)}),
    model={"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([float("nan"), -0.0])},
    tokens=("<pad>", "<start>", "<end>", "<unk>", "é"),
    fingerprints={name: name[0] * 64 for name in ("captions", "features", "vocabulary", "extractor")},
    captions={"max_length": 100, "text": {"recipe": "raw"}},
    seed=2**31,
    precision="fp32",
    progress=TrainingProgress(step=7, best_score=12.5, best_step=3, evals_since_best=2, stop_reason="steps"),
    missing_features={"train": {"images": 2, "first": ["a", "b"]}},
    started_from={"run": "runs/first", "weights_sha256": "a" * 64, "words": {"sentences.0": [3, 5]}},
    contents={"captions": "c" * 64, "features": "e" * 64},
    optimizer={"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
    sampler={"step": 2**40, "languages": {"en": {"epoch": 1, "position": 2}}},
)


@pytest.fixture
def folder(tmp_path):
    return Folder(str(tmp_path))


def test_checkpoint_survives_a_round_trip(folder):
    write_checkpoint(folder, LAST, CHECKPOINT)
    stored = read_checkpoint(folder, LAST)
    for name in CHECKPOINT.__dataclass_fields__.keys() - {"model", "optimizer"}:
        assert getattr(stored, name) == getattr(CHECKPOINT, name), name
    assert stored.model["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert stored.model["b"].view(torch.int32).tolist() == CHECKPOINT.model["b"].view(torch.int32).tolist()
    assert stored.optimizer["param_groups"] == CHECKPOINT.optimizer["param_groups"]
    assert folder.names() == [LAST]


class Evil:
    """Runs code when it is unpickled without care."""

    def __reduce__(self):
        return print, ("pwned",)


def test_read_checkpoint_of_a_pickle_is_refused(folder, capfd):
    folder.put(BEST, pickle.dumps(Evil()))
    with pytest.raises(DatasetError, match=r"best\.pt is damaged, or not a checkpoint"):
        read_checkpoint(folder, BEST)
    assert "pwned" not in "".join(capfd.readouterr())


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A checkpoint's bytes, and start and size of each of its parts."""
    folder = Folder(str(tmp_path_factory.mktemp("parts")))
    write_checkpoint(folder, BEST, CHECKPOINT)
    data = folder.read(BEST)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return data, {
            info.filename.partition("/")[2]: (data.index(archive.read(info), info.header_offset), info.file_size)
            for info in archive.infolist()
        }


@pytest.mark.parametrize("part", ["data.pkl", "data/0", "data/1"])
@pytest.mark.parametrize("bit", [0, 7])
def test_flipped_bit_is_found(folder, parts, part, bit):
    """Torch itself reads other weights without a word."""
    data, places = parts
    start, size = places[part]
    flipped = bytearray(data)
    flipped[start + size // 2] ^= 1 << bit
    folder.put(BEST, bytes(flipped))
    with pytest.raises(DatasetError, match=rf"best\.pt is damaged, .*\(its part '.*{part}' is not as it was written"):
        read_checkpoint(folder, BEST)


ADVICE = ("weights_only", "allow_pickle", "add_safe_globals", "set_default", "trust")
"""Words of the libraries' advice, which is not for users."""


def damages(data: bytes, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of damaged files."""
    rng, size = random.Random(seed), len(data)
    for cut in sorted(
        {0, 1, 2, size // 3, size // 2, size - 100, size - 23, size - 1, *(rng.randrange(size) for _ in range(8))}
    ):
        yield f"cut at {cut}", data[:cut]
    for place in (rng.randrange(size) for _ in range(40)):
        yield f"bit of byte {place}", data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    for place in (rng.randrange(size) for _ in range(5)):
        yield f"zeros from {place}", data[:place] + bytes(min(512, size - place)) + data[place + 512 :]
    yield "nonsense", rng.randbytes(size)
    yield "text", b"this is text\n"
    yield "JSON", b'{"step": 3}\n'
    yield "an archive", b"PK\x05\x06" + bytes(18)
    yield "more at the end", data + b"\x00"


@pytest.mark.parametrize("seed", range(3))
def test_damaged_checkpoint_is_refused_or_read_as_it_was_written(folder, parts, seed, capfd):
    for way, content in damages(parts[0], seed):
        folder.put(BEST, content)
        found, message = None, ""
        try:
            found = read_checkpoint(folder, BEST)
        except DatasetError as error:
            message = str(error)
        if found is None:
            assert re.fullmatch(r".*/best\.pt is (damaged, or )?not a checkpoint.*", message), way  # In one line.
            assert not any(word in message for word in ADVICE), message
        else:
            assert way.startswith(("bit", "zeros", "more")), way
            assert weights_digest(found.model) == weights_digest(CHECKPOINT.model), way
            assert replace(found, model={}, optimizer=None) == replace(CHECKPOINT, model={}, optimizer=None), way
    assert capfd.readouterr() == ("", "")
    (folder.local_path / BEST).unlink()
    (folder.local_path / BEST).mkdir()
    with pytest.raises(DatasetError, match=r"best\.pt'"):
        read_checkpoint(folder, BEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": 3}, "config is 3"),
        ({"model": {"a": [1.0]}}, "model does not map names to tensors"),
        ({"fingerprints": {"captions": "c"}}, "fingerprints are not those of captions, features, vocabulary, extractor"),
        ({"progress": {"step": "7"}}, "progress.step is '7', expected a whole number"),
        ({"started_from": {"run": "x", "weights_sha256": 3}}, "started_from is "),
        ({"more": 1}, "unknown key more"),
        ({"version": "1"}, "version is '1'"),
    ],
    ids=str,
)
def test_content_of_another_type_is_refused(folder, change, message):
    content = {name: getattr(CHECKPOINT, name) for name in CHECKPOINT.__dataclass_fields__}
    content |= {"dimensions": asdict(CHECKPOINT.dimensions), "progress": asdict(CHECKPOINT.progress)}
    with folder.replace(BEST) as file:
        torch.save({"format": "imagepivot run", "version": 4, **content, **change}, file)
    with pytest.raises(DatasetError, match=rf"best\.pt is damaged, or not a checkpoint \(.*{message}"):
        read_checkpoint(folder, BEST)


def test_code_in_a_checkpoint_does_not_run(folder, capfd, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # Of no effect, since the argument is given.
    with folder.replace(BEST) as file:
        torch.save({"format": "imagepivot run", "version": 1, "model": Evil()}, file)
    with pytest.raises(DatasetError, match="it holds something else than numbers, text and tensors") as caught:
        read_checkpoint(folder, BEST)
    assert "pwned" not in "".join(capfd.readouterr())
    assert not re.search("weights_only|add_safe_globals|allowlist|trust", str(caught.value))


def test_read_checkpoint_with_a_part_marked_as_folder_is_refused(folder):
    """Torch would read nothing of it, and leave its tensor to chance."""
    write_checkpoint(folder, BEST, CHECKPOINT)
    data = bytearray(folder.read(BEST))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        start = archive.start_dir
    data[data.index(b"archive/data/0", start) - 8] ^= 0x10  # The attributes of the part, in the archive's directory.
    folder.put(BEST, bytes(data))
    with pytest.raises(DatasetError, match=r"best\.pt is damaged, .*\(its part '.*/data/0' is not as it was written"):
        read_checkpoint(folder, BEST)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"format": "imagepivot run", "version": 5}, r"best\.pt has version 5, but this imagepivot reads up to 4"),
        ({"state_dict": {}}, "is not a checkpoint of a run: give the folder that imagepivot train wrote"),
        ({"format": "imagepivot run", "version": 3, "seed": 3}, r"best\.pt has version 3, expected 4"),
    ],
)
def test_other_content_is_refused(folder, content, message):
    with folder.replace(BEST) as file:
        torch.save(content, file)
    with pytest.raises(DatasetError, match=message):
        read_checkpoint(folder, BEST)


def test_weights_on_a_gpu_have_the_digest_of_those_on_a_cpu_and_are_waited_for_once():
    weights = {
        "b": torch.randn(5, 3),
        "a.counter": torch.tensor(7),
        "c": torch.randn(4, 6).T,
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, dtype=torch.float16),
    }
    expected = weights_digest(weights)
    with fake_gpu() as gpu:
        there = {name: values if name == "a.counter" else values.to("cuda") for name, values in weights.items()}
        gpu.reset()
        assert weights_digest(there) == expected
        assert gpu.waits.total() == 1, gpu.report()
    assert weights_digest(weights | {"b": weights["b"] + 1}) != expected


def changed(folder: Path, name: str, **change) -> None:
    """Write a checkpoint again with other fields; a function gets the old value."""
    run = Folder(str(folder))
    checkpoint = read_checkpoint(run, name)
    values = {field: value(getattr(checkpoint, field)) if callable(value) else value for field, value in change.items()}
    write_checkpoint(run, name, replace(checkpoint, **values))


def with_weights(name, values):
    return lambda model: {**model, name: values(model[name])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": with_weights("images.weight", lambda weights: weights[:, :-1])}, r"images\.weight is float32 \[6, 7\]"),
        ({"model": with_weights("images.weight", lambda weights: weights * torch.nan)}, r"images\.weight holds .* not finite"),
        ({"model": lambda model: {**model, "more": torch.zeros(1)}}, "more is unknown"),
        ({"model": {}}, r"images\.weight is missing"),
        ({"config": "a = " + "[" * 100_000}, "nested too deeply"),
        ({"tokens": ("<pad>", "<start>", "<end>", "<unk>")}, "the vocabulary 4"),
        ({"dimensions": lambda dimensions: replace(dimensions, feature_shape=(2**50,))}, "no model has its dimensions"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_open_run_with_an_inconsistent_checkpoint_is_refused(copied_run, change, message):
    changed(copied_run, BEST, **change)
    with pytest.raises(DatasetError, match=rf"best\.pt is damaged, or not a checkpoint \(.*{message}"):
        open_run(copied_run)


def first_moment(value):
    return lambda state: {**state, "state": {**state["state"], 0: {**state["state"][0], "exp_avg": value}}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {}}, "the state of its optimizer does not fit the model"),
        ({"optimizer": first_moment(torch.zeros(3))}, r"exp_avg of parameter 0 is float32 \[3\] or not finite"),
        ({"sampler": {"step": 1, "languages": {"en": {"epoch": 0, "position": 10**9}}}}, "position 1000000000 is not"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_resume_from_an_inconsistent_checkpoint_is_refused(train_toy, copied_run, change, message):
    changed(copied_run, LAST, **change)
    before = {path.name: path.read_bytes() for path in copied_run.iterdir()}
    with pytest.raises(DatasetError, match=rf"last\.pt is damaged, or not a checkpoint \(.*{message}"):
        train_toy(resume=True)
    assert {path.name: path.read_bytes() for path in copied_run.iterdir()} == before
