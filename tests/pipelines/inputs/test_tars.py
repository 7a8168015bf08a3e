import io
import tarfile

import pytest

from pipelines.inputs.tars import tar_members
from schemas.errors import InputError
from tests.pipelines.inputs.reading import write_tar


def tars(tmp_path):
    one = write_tar(tmp_path / "1", {"a": b"1" * 700, "b": b""}.items(), tarfile.GNU_FORMAT)
    two = write_tar(tmp_path / "2", {"c" * 200: b"3" * 512, "d": b"4"}.items(), tarfile.PAX_FORMAT)
    return one.read_bytes(), two.read_bytes()


def read(data):
    members = tar_members(io.BytesIO(data), len(data), "x.tar")
    return [(member.name, data[member.offset_data :][: member.size]) for member in members]


def independently(data):
    with tarfile.open(fileobj=io.BytesIO(data), ignore_zeros=True) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]


@pytest.mark.parametrize("gap", [1024, 1536, 10240, 2 << 20])
def test_joined_tars_give_the_members_of_all(tmp_path, gap):
    one, two = tars(tmp_path)
    joined = one.rstrip(b"\0") + bytes(-len(one.rstrip(b"\0")) % 512 + gap) + two
    names = ["a", "b", "c" * 200, "d"]
    assert [name for name, _ in read(joined)] == names
    assert read(joined) == independently(joined)
    assert read(joined + one + bytes(100)) == independently(joined + one)


def test_other_bytes_after_the_end_mark_are_refused(tmp_path):
    one, two = tars(tmp_path)
    for tail in (b"garbage" * 100, b"x", two[512:], bytes(100) + two):
        with pytest.raises(InputError, match=r"'x\.tar' holds [\d,]+ bytes after its end mark, at byte 10240"):
            read(one + tail)
    with pytest.raises(InputError, match=r"is not a whole tar: at byte .* it ends within the member"):
        read(one + two[:2600])


def test_a_zeroed_header_is_refused(tmp_path):
    one, _ = tars(tmp_path)
    with pytest.raises(InputError, match="at byte 512: found bytes after a single block of zeros, expected two"):
        read(bytes(512) + one[512:])
    three = write_tar(tmp_path / "3", {"a": b"1", "b": b"", "c": b"2"}.items()).read_bytes()
    with pytest.raises(InputError, match="at byte 1536: found bytes after a single block"):
        read(three[:1024] + bytes(512) + three[1536:])


def test_member_of_negative_size_is_an_error():
    """Reproduces a tar of which the members were listed for ever: a size of -512 leads back to the same header."""

    def header(name: bytes, size: bytes) -> bytes:
        fields = bytearray(512)
        fields[: len(name)], fields[100:108], fields[108:124] = name, b"0000644\0", b"0000000\0" * 2
        fields[124:136], fields[136:148], fields[156:157], fields[257:265] = size, b"%011o\0" % 0, b"0", b"ustar\x0000"
        fields[148:156] = b" " * 8
        fields[148:156] = b"%06o\0 " % sum(fields)
        return bytes(fields)

    data = header(b"a.txt", b"%011o\0" % 0) + header(b"b.jpg", b"\xff" * 10 + b"\xfe\0") + bytes(1024)
    with pytest.raises(InputError, match=r"'t\.tar' is not a whole tar: at byte \d+"):
        list(tar_members(io.BytesIO(data), len(data), "t.tar"))
