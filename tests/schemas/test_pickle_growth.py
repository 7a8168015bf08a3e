"""Files of torch.save that would fill memory are refused; what torch and Python 2 write is not."""

import io
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from schemas.pickle_growth import check_growth

COPIES = 2000
PAIRS = b"](" + b"".join(b"J" + struct.pack("<i", n) + b"N\x86" for n in range(20_000)) + b"e"
TEXT = b"X" + struct.pack("<i", 100_000) + b"x" * 100_000
REPEATED = {
    "OrderedDict": (b"ccollections\nOrderedDict\n", PAIRS, b"h\x00h\x01\x85R"),
    "set": (b"c__builtin__\nset\n", PAIRS, b"h\x00h\x01\x85R"),
    "Counter": (b"ccollections\nCounter\n", PAIRS, b"h\x00h\x01\x85R"),
    "encode": (b"c_codecs\nencode\n", TEXT, b"h\x00h\x01X\x06\x00\x00\x00latin1\x86R"),
    "state": (b"ccollections\nOrderedDict\n", b"}(" + PAIRS[2:-1].replace(b"\x86", b"") + b"u", b"h\x00)Rh\x01b"),
    "new object": (b"ccollections\nOrderedDict\n", PAIRS, b"h\x00h\x01\x85\x81"),
}
"""A function, an argument, and the call that is repeated with both."""


def repeated(name):
    function, argument, call = REPEATED[name]
    return b"\x80\x02" + function + b"q\x000" + argument + b"q\x010](" + call * COPIES + b"e."


def filled(name=b"builtins"):
    return b"\x80\x02c" + name + b"\nbytearray\nJ" + struct.pack("<i", 2_000_000_000) + b"\x85R."


def zipped(program, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return file.getvalue()


def old(program):
    """As torch before version 1.6."""
    plain = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    return b"".join([*plain, program, pickle.dumps([], 2)])


FILES = {
    **{f"{name} in {kind.__name__}": kind(repeated(name)) for name in REPEATED for kind in (zipped, old)},
    **{
        f"{name.decode()} in {kind.__name__}": kind(filled(name))
        for name in (b"builtins", b"__builtin__")
        for kind in (zipped, old)
    },
    "lists in a compressed archive": zipped(b"\x80\x02](" + b"]" * 10_000_000 + b"e.", zipfile.ZIP_DEFLATED),
    "memo position": zipped(b"\x80\x02]r\xff\xff\xff\x7f."),
}


@pytest.mark.parametrize("name", FILES)
def test_file_that_would_fill_memory_is_refused(name):
    with pytest.raises(pickle.UnpicklingError, match=r"make more than the file holds|to more than 8 times|memo position"):
        check_growth(io.BytesIO(FILES[name]))


def contents():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    yield {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    yield {"tokens": tuple(map(str, range(1000))), "numbers": list(range(1000)), "bytes": bytearray(b"abc" * 1000)}
    yield [torch.nn.Parameter(torch.ones(3)), torch.ones(2).bfloat16(), torch.Size((2, 3)), {1, 2, 3}, torch.float16]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("content", list(contents()), ids=["training", "plain", "types"])
def test_file_of_torch_is_read_from_its_start(content, is_zip):
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=is_zip)
    check_growth(file)
    assert file.tell() == 0
    assert str(torch.load(file, weights_only=True)) == str(content)


def test_dictionary_of_python_2_is_no_growth():
    pairs = [[f"layer{n}.weight", n] for n in range(1000)]
    program = pickle.dumps(pairs, 2)[2:-1]  # Python 2 gave OrderedDict a list of pairs.
    file = io.BytesIO(zipped(b"\x80\x02ccollections\nOrderedDict\n" + program + b"\x85R."))
    check_growth(file)
    assert torch.load(file, weights_only=True) == OrderedDict(pairs)


CHILD = """
import resource, sys
from extractors.weights.checkpoints import read_state_dict
from pathlib import Path
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
for path in sys.argv[1:]:
    try:
        read_state_dict(Path(path))
    except Exception as error:
        print(type(error).__name__, "MemoryError" in str(error))
"""


@pytest.mark.slow
def test_weights_are_refused_within_256_mib(tmp_path):
    paths = [tmp_path / f"{n}.pth" for n in range(len(FILES))]
    for path, data in zip(paths, FILES.values(), strict=True):
        path.write_bytes(data)
    pickled = tmp_path / "array.pkl"
    pickled.write_bytes(repeated("OrderedDict"))
    command = [sys.executable, "-c", CHILD, *map(str, paths), str(pickled)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["InputError False"] * (len(FILES) + 1), done.stderr[-500:]
