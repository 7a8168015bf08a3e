import os
import pickle
import random
import struct
from collections import OrderedDict

import numpy as np
import pytest
import torch

from extractors.weights.restricted_pickle import read_pickle
from schemas.errors import InputError

ARRAYS = {
    "float32": np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4),
    "float16": np.array([0.5, -2], dtype=np.float16),
    "big-endian": np.arange(6, dtype=">f8").reshape(3, 2),
    "by columns": np.asfortranarray(np.arange(12, dtype=np.float32).reshape(3, 4)),
    "strided": np.arange(20, dtype=np.int64)[::3],
    "scalar array": np.array(7, dtype=np.int64),
    "bytes of text": np.frombuffer(b"(\x80\x04latin\xff\xfe\n", dtype=np.uint8),
    "empty": np.zeros((0, 5), dtype=np.float32),
    "flags": np.array([True, False]),
}
PLAIN = {"__author__": "Öl", "matching_heuristics": True, "n": [1, -(2**70), 2.5, None], "t": (b"", b"\xff\x00", "", ("x",))}


def write(tmp_path, content: bytes):
    path = tmp_path / "weights.pkl"
    path.write_bytes(content)
    return path


def refused(tmp_path, content: bytes, match: str) -> None:
    with pytest.raises(InputError, match=match):
        read_pickle(write(tmp_path, content))


# --- what is read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_read_pickle_arrays_and_containers(tmp_path, protocol):
    content = OrderedDict(model=OrderedDict(ARRAYS), number=np.float32(1.5), **PLAIN)
    read = read_pickle(write(tmp_path, pickle.dumps(content, protocol)))
    assert list(read) == ["model", "number", *PLAIN]
    assert (read["number"], type(read["number"])) == (1.5, float)
    assert {name: read[name] for name in PLAIN} == PLAIN
    for name, expected in ARRAYS.items():
        found = read["model"][name]
        assert isinstance(found, np.ndarray), name
        assert (found.shape, found.dtype.newbyteorder("=")) == (expected.shape, expected.dtype.newbyteorder("=")), name
        np.testing.assert_array_equal(found, expected)


def test_read_pickle_numpy_1_module_names(tmp_path):
    content = pickle.dumps(ARRAYS["float32"], 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    assert b"numpy.core.multiarray" in content
    read = read_pickle(write(tmp_path, content))
    np.testing.assert_array_equal(read, ARRAYS["float32"])


def test_read_pickle_of_python_2(tmp_path):
    # cPickle.dumps({"w": numpy.array([1, 2], "<f4")}, 2) of Python 2.7: strings are bytes, and so is the content of arrays.
    content = (
        b"\x80\x02}q\x01U\x01wcnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87Rq\x04"
        b"(K\x01K\x02\x85cnumpy\ndtype\nq\x05U\x02f4K\x00K\x01\x87Rq\x06(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x08\x00\x00\x80?\x00\x00\x00@tbs."
    )
    read = read_pickle(write(tmp_path, content))
    assert list(read) == ["w"]
    assert read["w"].dtype == np.float32
    np.testing.assert_array_equal(read["w"], [1, 2])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_read_pickle_tensors(tmp_path, protocol):
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors = {"whole": base, "view": base[1:3, ::2], "turned": base.T, "half": base.bfloat16(), "one": torch.tensor(3)}
    read = read_pickle(write(tmp_path, pickle.dumps(tensors, protocol)))
    assert list(read) == list(tensors)
    for name, expected in tensors.items():
        assert read[name].dtype == expected.dtype
        assert torch.equal(read[name], expected), name


# --- what is refused ---------------------------------------------------------------------------------------------------


class Call:
    """Pickled, it is a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "function", [os.system, eval, exec, getattr, __import__, np.load, torch.load, np.empty, OrderedDict.fromkeys]
)
def test_read_pickle_functions_raise_and_are_not_called(tmp_path, protocol, function):
    trace = tmp_path / "ran"
    content = pickle.dumps({"model": {"w": Call(function, f"touch {trace}")}}, protocol)
    refused(tmp_path, content, rf"refused as a pickle \(it asks for .*({function.__name__}|getattr)")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", "the instruction STRING"),
        (b"(S'true'\nios\nsystem\n.", "the instruction STRING"),
        (b"(ios\nsystem\n.", "the instruction INST"),
        (b"\x80\x02cos\nsystem\n.", "asks for posix.system|asks for os.system"),
        (b"\x80\x02Ptaken\n.", "the instruction PERSID"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"\x80\x02cnumpy\nndarray\nK\x05\x85\x81.", "the instruction NEWOBJ"),
        (b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.fromkeys\x93.", "asks for collections.OrderedDict.fromkeys"),
        (b"\x80\x02c__main__\n<array>\nq\x01.", "asks for __main__.<array>"),
        (b"\x80\x04\x8c\x00\x8c\x07<array>\x93.", "asks for .<array>"),
        (b"\x80\x05\x97.", "the instruction NEXT_BUFFER"),
        (b"\x80\x02cnumpy\ndtype\n}X\x05\x00\x00\x00_callcnumpy\nndarray\nsb.", "__dict__"),
        (b"\x80\x02cnumpy\ndtype\nN}X\x05\x00\x00\x00_callcnumpy\nndarray\ns\x86b.", "sets _call of a function"),
        (b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x03\x00\x00\x00zip\x86R.", "bytes of a str in 'zip'"),
        (b"\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R.", "an array holds object, not numbers"),
        (b"\x80\x02cnumpy\ndtype\nX\x05\x00\x00\x00f4,O8\x89\x88\x87R.", "an array's type is 'f4,O8'"),
        (b"\x80\x02cnumpy\ndtype\n]X\x01\x00\x00\x00O\x85R.", "not callable"),
        (b"\x80\x02]cnumpy\nndarray\na", "pickle exhausted"),
        (b"\x80\x09.", "protocol"),
    ],
)
def test_read_pickle_other_programs_raise(tmp_path, program, what):
    refused(tmp_path, program, what)


def test_read_pickle_arrays_of_objects_and_records_raise(tmp_path):
    refused(tmp_path, pickle.dumps(np.array([{}, None], dtype=object)), "holds object, not numbers")
    refused(tmp_path, pickle.dumps(np.zeros(2, dtype=[("a", "f4")])), "not numbers|not a number's")
    refused(tmp_path, pickle.dumps(np.array(["a"])), "not numbers")
    refused(tmp_path, pickle.dumps(np.zeros(2, dtype="M8[s]")), "not numbers")


def test_read_pickle_claimed_lengths_allocate_no_memory(tmp_path):
    refused(tmp_path, b"\x80\x04\x8e" + struct.pack("<Q", 2**50) + b"abc.", "expected 1125899906842624 bytes")
    refused(tmp_path, b"\x80\x05\x96" + struct.pack("<Q", 2**50) + b"abc.", "expected 1125899906842624 bytes")
    refused(tmp_path, b"\x80\x02Nr" + struct.pack("<I", 2**32 - 1) + b".", "memo position 4294967295 after 2 instructions")
    for shape in ((2**40,), (2**32, 2**32), (-1,)):
        array = pickle.dumps(np.zeros(3, dtype=np.float32), 2).replace(pickle.dumps((3,), 2)[2:5], pickle.dumps(shape, 2)[2:-3])
        refused(tmp_path, array, "bytes for an array of shape|an array of shape")


def test_read_pickle_limits_total_bytes(tmp_path):
    array = pickle.dumps(np.arange(1000, dtype=np.float32), 5)
    make = array[array.index(b"\x8c") : -1]  # without the frame and the stop
    assert read_pickle(write(tmp_path, b"\x80\x05" + make + b".")).shape == (1000,)
    text = b"\x80\x02X" + struct.pack("<I", 10**6) + b"a" * 10**6 + b"q\x00c_codecs\nencode\nq\x01("
    refused(tmp_path, text + b"h\x01h\x00X\x06\x00\x00\x00latin1\x86R" * 5 + b"t.", "makes more bytes than the file has")


def test_read_pickle_invalid_storages_and_views_raise(tmp_path):
    content = pickle.dumps(torch.arange(6.0), 2)
    assert content.count(b"K\x00K\x06\x85q") == 1
    refused(tmp_path, content.replace(b"K\x00K\x06\x85q", b"K\x00K\x60\x85q"), "out of bounds")
    evil = pickle.dumps({"a": Call(os.system, "true")}, 2)
    load = b"\x80\x02ctorch.storage\n_load_from_bytes\n"
    refused(tmp_path, load.replace(b"\x02", b"\x04") + b"C" + bytes([len(evil)]) + evil + b"\x85R.", "a tensor without bytes")


def test_read_pickle_deep_and_recursive_containers(tmp_path):
    deep = read_pickle(write(tmp_path, b"\x80\x02]" + b"]" * 20_000 + b"a" * 20_000 + b"."))
    assert isinstance(deep, list)
    loop = read_pickle(write(tmp_path, b"\x80\x02]q\x00h\x00a."))
    assert loop[0] is loop


def test_read_pickle_damaged_file_raises(tmp_path):
    content = pickle.dumps({"model": {"w": ARRAYS["float32"][:1, :1], "n": ARRAYS["scalar array"]}, "t": torch.zeros(2)}, 2)
    for length in range(5, len(content), 5):
        with pytest.raises(InputError):
            read_pickle(write(tmp_path, content[:length]))
    chance, survived = random.Random(0), 0
    for _ in range(200):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] = chance.randrange(256)
        try:
            read_pickle(write(tmp_path, bytes(damaged)))
            survived += 1
        except InputError:
            continue
    assert survived < 200
