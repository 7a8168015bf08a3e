"""Files of users and of datasets, damaged at random; manifests and records of datasets also with digests that fit."""

import hashlib
import io
import json
import random
import re
import signal
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from schemas.fingerprints import sha256_of_json
from tests.builders import sign

Files = Mapping[str, bytes]  # Content of the files of a case, by their paths.


class Hang(BaseException):
    """Raised in a command that does not end; no command catches it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Hang(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**40, 10**30, 1.5, -0.0, 1e300),
    *("", "x", "3", "../x", "/etc/passwd", ".", "a\nb", "\u2028"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "2"], "0" * 64, "part-00000-of-00002.parquet", "features", [-1]),
    [2, 2],
]
_TEXTS = [
    *(b"../decoy/a.txt", b"/etc/passwd", b"\x00", b"\n", b"\xff\xfe", b"[" * 3000),
    *(b"a." * 500, b"'", b'"', b"{", b"]", b"nan"),
]
_NUMBERS = [b"-1", b"0", b"1e999", b"nan", b"1" * 30, b"9" * 5000, b"77777777777", b"\x80" + b"\xff" * 7, b"\xff" * 8, b"true"]
_VALUES = [
    *("[]", "{}", "''", "-1", "1e999", "nan", "[[1]]", "{ a = { b = 1 } }", "1979-05-27", "true", "'../decoy/a'"),
    *("9" * 11, "9" * 30),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container within a JSON value with every key or index in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def tar(members: Files, form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of files, and of a folder, a link and a record of pax."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form, pax_headers={"comment": "x"}) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(member, io.BytesIO(data))
        for name, kind in (("folder", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "../decoy/a.txt" if kind == tarfile.SYMTYPE else ""
            archive.addfile(member)
    return file.getvalue()


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[position_in(data, rng)] ^= 1 << rng.randrange(8)


def overwrite(data: bytearray, rng: random.Random) -> None:
    """Set an integer to an extreme."""
    code = rng.choice("BHIQ")
    size = struct.calcsize(f"<{code}")
    top = 1 << 8 * size
    value = rng.choice((0, 1, top - 1, top >> 1, (top >> 1) - 1, top - 512, top >> 4, 65536)) % top
    position = position_in(data, rng)
    data[position : position + size] = struct.pack(rng.choice("<>") + code, value)


def position_in(data: bytearray, rng: random.Random) -> int:
    """Return a random position, often in the header."""
    return rng.randrange(rng.choice((min(len(data), 64), min(len(data), 1024), len(data))))


def splice(data: bytearray, rng: random.Random) -> None:
    """Copy a block of the file, over another or between."""
    start, size, target = rng.randrange(len(data)), rng.randrange(1, 600), rng.randrange(len(data))
    block = data[start : start + size]
    data[target : target + rng.choice((0, len(block)))] = block


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def insert(data: bytearray, rng: random.Random) -> None:
    position = rng.randrange(len(data) + 1)
    data[position : position + rng.choice((0, 8))] = rng.choice(_TEXTS)


def renumber(data: bytearray, rng: random.Random) -> None:
    """Replace a number in text."""
    if numbers := list(re.finditer(rb"[0-9]+", data)):
        match = rng.choice(numbers)
        number = rng.choice(_NUMBERS)
        size = match.end() - match.start()
        data[match.start() : match.end()] = rng.choice((number, number[:size].rjust(size, b"0"), b"7" * size))


def retype(data: bytearray, rng: random.Random) -> None:
    """Set the type of a header in a tar."""
    position = 512 * rng.randrange(len(data) // 512 + 1) + 156
    data[position : position + 1] = rng.choice((b"L", b"K", b"S", b"x", b"g", b"X", b"0", b"5", b"7", b"\0", b"\xff"))


def edit_text(data: bytearray, rng: random.Random) -> None:
    """Replace, double or remove a line of TOML, or a value of it."""
    lines = bytes(data).split(b"\n")
    index = rng.randrange(len(lines))
    key, equals, _ = lines[index].partition(b" = ")
    new = [[], [lines[index]] * 2, [rng.choice(lines), lines[index]]]
    if equals and rng.random() < 0.7:
        new = [[key + equals + rng.choice(_VALUES).encode()]]
    lines[index : index + 1] = rng.choice(new)
    data[:] = b"\n".join(lines)


def edit_json(data: bytearray, rng: random.Random) -> None:
    """Replace or remove a value of JSON, and sign manifests and records again."""
    first, end, others = bytes(data).partition(b"\n") if b"record_sha256" in data else (data, b"", b"")
    content = json.loads(first)
    if found := list(places(content)):
        container, key = rng.choice(found)
        if rng.random() < 0.2:
            del container[key]
        elif isinstance(container, list) and rng.random() < 0.2:
            container.append(container[key])
        else:
            container[key] = rng.choice(VALUES)
    if "record_sha256" in content:
        if rng.random() < 0.5:
            rows = [b"[]", b'["a"]', b"7", b"{}", b"[1,2,3,4,5,6,7]"]
            others = b"".join(rng.choice((*rows, line)) + b"\n" for line in others.split(b"\n"))
        content["sources_sha256"] = hashlib.sha256(others).hexdigest()
        content.pop("record_sha256")
        content["record_sha256"] = sha256_of_json(content)
    elif "sha256" in content:
        if "fingerprint" in content and rng.random() < 0.5:
            parts = {name: content.get(name) for name in ("kind", "parameters", "inputs")}
            shards = content.get("shards")
            count = len(shards) if isinstance(shards, list) else 0
            content["fingerprint"] = sha256_of_json({**parts, "schema_version": 1, "shards": count})
        content = sign(content)
    data[:] = json.dumps(content).encode() + end + others


def seal(data: bytearray) -> None:
    """Write the checksums of a tar or PNG, without which little of a damaged one is read."""
    if data[257:262] == b"ustar":
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar":
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    elif data.startswith(b"\x89PNG"):
        start = 8
        while start + 12 <= len(data):
            (size,) = struct.unpack_from(">I", data, start)
            data[start + 8 + size : start + 12 + size] = struct.pack(">I", zlib.crc32(data[start + 4 : start + 8 + size]))
            start += 12 + size


def damage_member(data: bytes, rng: random.Random) -> bytes:
    """Damage a file in a zip or tar archive, so that headers and checksums fit."""
    file = io.BytesIO(data)
    if data.startswith(b"PK"):
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    else:
        with tarfile.open(fileobj=file) as archive:
            members = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    name = rng.choice(sorted(members))
    members |= damage({name: members[name]}, rng)
    if not data.startswith(b"PK"):
        return tar(members)
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def damage(files: Files, rng: random.Random) -> dict[str, bytes]:
    """Damage one file in one to three ways."""
    name = rng.choice(sorted(files))
    data = bytearray(files[name])
    ways = [flip, overwrite, overwrite, splice, cut, insert, renumber]
    if name.endswith(".toml"):
        ways += [edit_text] * 8
    if (data.startswith(b"PK") or name in ("features.tar", "regions.tar")) and rng.random() < 0.7:
        return {**files, name: damage_member(data, rng)}
    if name.endswith(".tar"):
        ways += [retype] * 2
    if (name.endswith(".json") or ".records" in name) and rng.random() < 0.7:
        edit_json(data, rng)
        return {**files, name: bytes(data)}
    for way in rng.choices(ways, k=rng.choice((1, 1, 2, 3))):
        if data:
            way(data, rng)
    if rng.random() < 0.7:
        seal(data)
    return {**files, name: bytes(data)}


def is_signed(data: bytes) -> bool:
    """Return whether a manifest or a record has the digest of what it holds."""
    try:
        content = json.loads(data.partition(b"\n")[0] if b"record_sha256" in data else data)
        if "record_sha256" in content:
            return content.pop("record_sha256") == sha256_of_json(content)
        return "sha256" in content and sign(content) == content
    except (ValueError, TypeError, RecursionError):
        return False
