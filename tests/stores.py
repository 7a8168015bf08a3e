"""Object stores on this machine: emulators, an S3-compatible store, and a proxy that counts and delays requests."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote, unquote_plus

if TYPE_CHECKING:
    import pytest

LOCAL = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_EC2_METADATA_DISABLED": "true"}
SETTINGS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS")
SOURCES = {
    "s3": "no emulator: pip install 'moto[server]'",
    "gs": "no emulator: pip install 'gcp-storage-emulator'",
    "versitygw": "no versitygw, in build/stores or on the path: make build/stores/versitygw",
}
BUILT = Path(__file__).parent.parent / "build/stores"
_ASKED = "/requests so far"
_CUT = "/network cut/"
_LARGEST_HEAD = 1 << 20


@dataclass(frozen=True)
class Store:
    """An object store that runs on this machine, with a bucket named ``bucket``.

    Attributes:
        scheme: ``s3`` or ``gs``.
        port: where it answers.
        maker: name of the program: ``s3`` and ``gs`` are emulators, ``versitygw`` is an S3-compatible store over a folder.
    """

    scheme: str
    port: int
    maker: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make the command use it."""
        return (
            {**LOCAL, **KEYS, "AWS_ENDPOINT_URL": self.url}
            if self.scheme == "s3"
            else {**LOCAL, "STORAGE_EMULATOR_HOST": self.url}
        )

    def address(self, path: str) -> str:
        return f"{self.scheme}://bucket/{path}"


def use(environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a store, and clear cached clients."""
    from schemas.storage.folder import open_bucket  # Here, since the proxy is a process that needs none of it.

    open_bucket.cache_clear()
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


class MemoryBucket:
    """A bucket in memory with a number per write as tag: the methods of `schemas.storage.object_store.Bucket`."""

    def __init__(self) -> None:
        self.store, self.objects = self, dict[str, tuple[bytes, str]]()
        self._writes = count(1)

    def pages(self, prefix: str, *, by_folder: bool = False) -> Any:
        from schemas.storage.object_store import Page

        keys = sorted(key for key in self.objects if key.startswith(prefix))
        ends = {key: key.find("/", len(prefix)) + 1 if by_folder else 0 for key in keys}
        folders = sorted({key[:end] for key, end in ends.items() if end})
        yield Page([self.head(key) for key in keys if not ends[key]], folders, True)

    def head(self, key: str) -> Any:
        from schemas.storage.object_store import FileInfo

        if key not in self.objects:
            return None
        data, tag = self.objects[key]
        return FileInfo(key, len(data), "1", tag)

    def read(self, key: str, start: int = 0, size: int | None = None) -> bytes:
        if key not in self.objects:
            raise FileNotFoundError
        return self.objects[key][0][start : None if size is None else start + size]

    def write(self, key: str, file: Any, if_match: str | None, writer: str) -> str:
        from schemas.storage.storage_errors import RefusedError

        tag = self.objects[key][1] if key in self.objects else None
        if if_match not in ("", tag):
            raise RefusedError("conditionNotMet", 412)
        self.objects[key] = file.read(), str(next(self._writes))
        return self.objects[key][1]

    def copy(self, key: str, origin: Any, origin_key: str) -> None:
        self.write(key, io.BytesIO(origin.read(origin_key)), "", "")

    def delete(self, key: str, if_match: str) -> None:
        if key in self.objects and if_match in ("", self.objects[key][1]):
            del self.objects[key]


def untagged(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return files of a dataset without tags in their records, which differ between writes."""
    return {name: _without_tags(data) if name.startswith(".records/") else data for name, data in files.items()}


def _without_tags(data: bytes) -> bytes:
    first, _, rest = data.partition(b"\n")
    content = {key: value for key, value in json.loads(first).items() if key not in ("tags", "record_sha256")}
    return json.dumps(content).encode() + rest


def is_installed(maker: str) -> bool:
    if maker == "versitygw":
        return _versitygw() is not None
    return find_spec("moto" if maker == "s3" else "gcp_storage_emulator") is not None


def _versitygw() -> str | None:
    return shutil.which("versitygw", path=f"{BUILT}{os.pathsep}{os.environ['PATH']}")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def emulator(maker: str, environment: Mapping[str, str] = {}) -> Iterator[Store]:
    """Run a store with an empty bucket.

    Google's emulator ignores conditions and returns listings as one page: `_GoogleProxy` implements both as documented by Google.

    Args:
        maker: see `Store`.
        environment: further variables of the emulator; with any, no bucket is created.
    """
    store = Store("gs" if maker == "gs" else "s3", free_port(), maker)
    port = str(store.port)
    if maker == "versitygw":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "bucket").mkdir()
            root = {"ROOT_ACCESS_KEY": KEYS["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": KEYS["AWS_SECRET_ACCESS_KEY"]}
            command = (_versitygw() or "", "--port", f"127.0.0.1:{port}", "--keep-alive", "posix", folder)
            with _process(*command, url=store.url, environment=root):
                yield store
        return
    arguments = {
        "s3": ("moto.server", "-H", "127.0.0.1", "-p", port),
        "gs": ("gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", port, "--in-memory", "--quiet"),
    }[maker]
    with _process(sys.executable, "-m", *arguments, url=store.url, environment={**store.environment, **environment}):
        if not environment:
            _make_bucket(store)
        if maker == "s3":
            yield store
            return
        before = Store("gs", free_port(), maker)
        with _process(sys.executable, __file__, str(before.port), port, "0", "google", url=before.url, environment={}):
            yield before


def _make_bucket(store: Store) -> None:
    place, data, method = {"s3": ("/bucket", b"", "PUT"), "gs": ("/storage/v1/b?project=test", b'{"name": "bucket"}', "POST")}[
        store.scheme
    ]
    request = urllib.request.Request(store.url + place, data=data, method=method, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


@contextmanager
def _process(*command: str, url: str, environment: Mapping[str, str]) -> Iterator[None]:
    """Run a server until the block ends."""
    server = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not _answers(url):
            assert server.poll() is None, f"{command} ended with {server.returncode}"
            assert time.monotonic() < until, f"{command} does not answer"
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait(timeout=30)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


# --- far away --------------------------------------------------------------------------------------------------------


class Request(NamedTuple):
    method: str
    path: str
    size: int


class Requests(NamedTuple):
    """Requests to a store.

    Attributes:
        all: the requests, in order of arrival.
        at_once: maximum number of concurrent requests.
        answered: bytes of all responses, with headers.
    """

    all: list[Request]
    at_once: int
    answered: int

    def __len__(self) -> int:
        return len(self.all)


@dataclass(frozen=True)
class FarStore(Store):
    """A store behind a proxy that delays every request."""

    def asked(self) -> Requests:
        """Return the requests since the last call."""
        with urllib.request.urlopen(self.url + _ASKED.replace(" ", "%20"), timeout=30) as answer:
            found = json.load(answer)
        return Requests([Request(*each) for each in found["all"]], found["at_once"], found["answered"])

    def cut(self, how: str, seconds: float, *, after: int, only: str = "") -> None:
        """Cut the network temporarily.

        Args:
            how: ``drop`` closes connections, ``busy`` responds 503, ``stall`` responds after the cut, ``torn`` sends half of each
                response.
            seconds: duration.
            after: number of requests that still succeed.
            only: suffix of the paths to cut; empty for all.
        """
        address = self.url + f"{_CUT}{how}/{seconds}/{after}/{only}".replace(" ", "%20")
        with urllib.request.urlopen(address, timeout=30) as answer:
            answer.read()


@contextmanager
def far_away(store: Store, seconds: float) -> Iterator[FarStore]:
    """Put a proxy in front of a store that delays each request by ``seconds``."""
    far = FarStore(store.scheme, free_port(), store.maker)
    arguments = (sys.executable, __file__, str(far.port), str(store.port), str(seconds), "any")
    with _process(*arguments, url=far.url, environment={}):
        far.asked()
        yield far


class _Proxy:
    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._seconds = seconds
        self._all: list[Request] = []
        self._now = self._at_once = self._answered = 0
        self._how, self._cut_seconds, self._cut_after, self._only = "", 0.0, 0, ""
        self._cut_until = 0.0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                line, headers = _parsed(await reader.readuntil(b"\r\n\r\n"))
                method, path, _ = line.split(" ")
                if "expect" in headers:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await _body(reader, headers)
                if path == _ASKED.replace(" ", "%20"):
                    writer.write(_answer("HTTP/1.1 200 OK", {}, self._taken()))
                elif path.startswith(_CUT.replace(" ", "%20")):
                    self._how, seconds, after, self._only = path.rpartition("cut/")[2].split("/")
                    self._cut_seconds, self._cut_after, self._cut_until = float(seconds), len(self._all) + int(after), 0.0
                    writer.write(_answer("HTTP/1.1 200 OK", {}, b""))
                else:
                    self._all.append(Request(method, path, len(body)))
                    self._now += 1
                    self._at_once = max(self._at_once, self._now)
                    try:
                        await asyncio.sleep(self._seconds)
                        if (left := self._cut_left(path)) and self._how == "drop":
                            break
                        if left and self._how == "busy":
                            writer.write(_answer("HTTP/1.1 503 Service Unavailable", {}, b""))
                            continue
                        if left and self._how == "stall":
                            await asyncio.sleep(left)
                        answer = await self._ask(method, path, headers, body)
                        if left and self._how == "torn":
                            writer.write(answer[: len(answer) // 2])
                            break
                        writer.write(answer)
                        self._answered += len(answer)
                    finally:
                        self._now -= 1
                await writer.drain()
                if headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _cut_left(self, path: str) -> float:
        if not self._how or len(self._all) <= self._cut_after or not path.partition("?")[0].endswith(self._only):
            return 0.0
        self._cut_until = self._cut_until or time.monotonic() + self._cut_seconds
        return max(0.0, self._cut_until - time.monotonic())

    def _taken(self) -> bytes:
        taken = json.dumps({"all": self._all, "at_once": self._at_once, "answered": self._answered}).encode()
        self._cut_after -= len(self._all)
        self._all, self._at_once, self._answered = [], 0, 0
        return taken

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        sent = {k: v for k, v in headers.items() if k not in ("connection", "transfer-encoding", "content-length", "expect")}
        sent |= {"connection": "close", "content-length": str(len(body))}
        writer.write(_head(f"{method} {path} HTTP/1.1", sent) + body)
        await writer.drain()
        whole = await reader.read()
        writer.close()
        head, _, data = whole.partition(b"\r\n\r\n")
        line, found = _parsed(head)
        if found.pop("transfer-encoding", "") == "chunked":
            chunks = asyncio.StreamReader()
            chunks.feed_data(data)
            data = await _body(chunks, {"transfer-encoding": "chunked"})
        length = found.pop("content-length", "0") if method == "HEAD" else None
        found.pop("connection", None)
        return _answer("HTTP/1.1 " + line.partition(" ")[2], found, data, length)


class _GoogleProxy(_Proxy):
    """Adds ``ifGenerationMatch`` and pages of listings to Google's emulator.

    Changes of objects are serialized. Conditions are compared with the object's generation in the emulator, for an upload in
    several requests at the first and the last one.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._changing = asyncio.Lock()
        self._uploads: dict[str, str] = {}

    async def _ask(self, method: str, path: str, headers: dict[str, str], body: bytes) -> bytes:
        place, _, query = path.partition("?")
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        if method == "GET":
            answer = await super()._ask(method, path, headers, body)
            is_listing = re.fullmatch(r"(/storage/v1)?/b/[^/]+/o", place) and answer.startswith(b"HTTP/1.1 200")
            return _page(answer, asked) if is_listing and "maxResults" in asked else answer
        async with self._changing:
            name = self._object_of(place, asked, body)
            if "ifGenerationMatch" in asked and asked["ifGenerationMatch"] != await self._generation(name):
                return _answer("HTTP/1.1 412 Precondition Failed", {"content-type": "application/json"}, b"{}")
            answer = await super()._ask(method, path, headers, body)
            if upload := re.search(rb"upload_id=([^&\s]+)", answer.partition(b"\r\n\r\n")[0]):
                self._uploads[unquote_plus(upload.group(1).decode())] = name
            return answer

    def _object_of(self, place: str, asked: dict[str, str], body: bytes) -> str:
        if "upload_id" in asked:
            return self._uploads[asked["upload_id"]]
        if place.startswith("/upload/"):
            return asked.get("name") or json.loads(re.search(rb"\{.*?\}(?=\s*(\r\n--|$))", body, re.DOTALL).group())["name"]
        return unquote(place.partition("/o/")[2].removesuffix("/compose"))

    async def _generation(self, name: str) -> str:
        answer = await super()._ask("GET", f"/storage/v1/b/bucket/o/{quote(name, safe='')}", {}, b"")
        head, _, data = answer.partition(b"\r\n\r\n")
        return json.loads(data)["generation"] if b" 200 " in head.partition(b"\r\n")[0] else "0"


def _page(answer: bytes, asked: Mapping[str, str]) -> bytes:
    """Return a page of a listing, of objects and folders."""
    head, _, data = answer.partition(b"\r\n\r\n")
    whole = json.loads(data)
    found = {item["name"]: item for item in whole.get("items") or ()} | dict.fromkeys(whole.get("prefixes") or ())
    names = sorted(name for name in found if name > asked.get("pageToken", ""))
    page = names[: int(asked["maxResults"])]
    items = [found[name] for name in page if found[name] is not None]
    cut = {"kind": whole["kind"], "items": items, "prefixes": [name for name in page if found[name] is None]}
    if len(names) > len(page):
        cut["nextPageToken"] = page[-1]
    line, headers = _parsed(head)
    headers.pop("content-length", None)
    return _answer(line, headers, json.dumps(cut).encode())


def _parsed(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    return first, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", 0)))
    parts = []
    while size := int((await reader.readline()).partition(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return b"".join(parts)


def _head(line: str, headers: Mapping[str, str]) -> bytes:
    return "\r\n".join([line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode("latin-1")


def _answer(line: str, headers: Mapping[str, str], data: bytes, length: str | None = None) -> bytes:
    counted = {} if " 204" in line else {"content-length": length if length is not None else str(len(data))}
    return _head(line, {**headers, **counted}) + data


async def _main(port: int, store: int, seconds: float, kind: str) -> None:
    proxy = {"any": _Proxy, "google": _GoogleProxy}[kind](store, seconds)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", port, limit=_LARGEST_HEAD, backlog=1000)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]))
