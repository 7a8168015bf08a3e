"""Refusal of files that torch does not read, without its advice to disable the protection."""

from __future__ import annotations

import io
import pickle
import random
import warnings
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from extractors.weights.checkpoints import read_torch
from extractors.weights.restricted_pickle import OLD_TORCH_MAGIC, read_pickle
from schemas.errors import InputError

ADVICE = ("weights_only", "safe_globals", "allowlist", "PyTorch 2.6", "trusted source")


def torchscript(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (
            lambda path: torch.save(torch.nn.Linear(2, 2), path),
            r"which could run code when read \(torch\.nn\.modules\.linear\.Linear\)\. If you trust the file, save",
        ),
        (
            lambda path: torch.save({"a": Fraction(1, 2)}, path),
            r"which could run code when read \(fractions\.Fraction\)\. If you trust the file, save",
        ),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1}, protocol=4)), "holds Python objects, which could run code"),
        (torchscript, r"cannot be read by torch \(it is a TorchScript archive\): .*save torch\.jit\.load\(FILE\)\.state_dict"),
        (
            lambda path: path.write_bytes(OLD_TORCH_MAGIC + b"\x80\x02X\x01"),
            r"cannot be read by torch \(ValueError: not enough data",
        ),
    ],
    ids=["module", "object", "pickle", "TorchScript", "cut"],
)
def test_read_torch_other_file_raises_without_torchs_advice(tmp_path, write, message, recwarn):
    write(tmp_path / "w.pth")
    with pytest.raises(InputError, match=message) as caught:
        read_torch(tmp_path / "w.pth")
    assert not any(word in str(caught.value) for word in ADVICE)
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, UserWarning)] == []


def test_read_pickle_invalid_tensor_storage_raises(tmp_path):
    class Storage:
        def __reduce__(self):
            buffer = io.BytesIO()
            torch.save(Path("x"), buffer, _use_new_zipfile_serialization=False)
            return torch.storage._load_from_bytes, (buffer.getvalue(),)

    (tmp_path / "w.pkl").write_bytes(pickle.dumps(Storage()))
    with pytest.raises(InputError, match=r"refused as a pickle \(numbers of a tensor that torch refuses\)") as caught:
        read_pickle(tmp_path / "w.pkl")
    assert not any(word in str(caught.value) for word in ADVICE)


def test_read_torch_flipped_bits_give_tensors_or_input_error(tmp_path):
    torch.save({"a": torch.zeros(30), "b": torch.ones(2)}, tmp_path / "whole.pth")
    data, rng = (tmp_path / "whole.pth").read_bytes(), random.Random(1)
    for _ in range(300):
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "w.pth").write_bytes(flipped)
        try:
            read_torch(tmp_path / "w.pth")
        except InputError as error:
            message = str(error)
        else:
            continue
        assert not any(word in message for word in ADVICE), message
