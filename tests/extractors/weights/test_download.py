"""Weights by address, from web servers; object stores are the subject of tests/integration/test_object_stores.py."""

from __future__ import annotations

import base64
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from extractors.weights.download import fetch_weights_file, weights_cache_folder
from extractors.weights.resolve import Architecture, resolve_weights
from schemas.errors import InputError
from tests.extractors.weights.test_resolve import build, digest
from tests.web_server import Handler, serve

ARCHITECTURE = Architecture(build=build)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "home" / "hub" / "checkpoints"


@pytest.fixture
def site():
    with serve() as site:
        yield site


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith("-lock"))


def page(body: bytes, **headers: str):
    return lambda handler: handler.answer(200, body, **headers)


def test_fetch_weights_file_local_path_is_returned(tmp_path, cache):
    assert fetch_weights_file(f"file://{tmp_path}/a%20b.pth") == tmp_path / "a b.pth"
    assert fetch_weights_file("no/such.pth") == Path("no/such.pth")
    assert not cache.exists()


def test_resolve_weights_address_equals_file(site, tmp_path):
    state = build().state_dict()
    torch.save(state, tmp_path / "w.pth")
    site.pages["/models/w.pth"] = page((tmp_path / "w.pth").read_bytes(), ETag='"1"')
    found = resolve_weights(site.address("/models/w.pth"), ARCHITECTURE)
    assert found.parameters() == {"weights": {"sha256": digest(state)}, "untrained": False}
    assert found.path.parent == weights_cache_folder()


def test_fetch_weights_file_downloads_each_version_once(site, cache):
    address = site.address("/a%20b.pth")
    site.pages |= {"/a%20b.pth": page(b"one", ETag='"1"'), "/other/a%20b.pth": page(b"other", ETag='"1"')}
    first = fetch_weights_file(address)
    assert (first.read_bytes(), fetch_weights_file(address)) == (b"one", first)
    site.pages["/a%20b.pth"] = page(b"two", ETag='"2"')
    second = fetch_weights_file(address)
    assert (first.read_bytes(), second.read_bytes()) == (b"one", b"two")
    assert names(cache) == sorted([first.name, second.name])
    assert all(name.endswith("-a_b.pth") for name in names(cache))
    assert fetch_weights_file(site.address("/other/a%20b.pth")).read_bytes() == b"other"


def test_fetch_weights_file_without_etag_is_named_by_digest(site, cache):
    site.pages["/w.pth"] = b"one"
    first = fetch_weights_file(site.address("/w.pth"))
    assert fetch_weights_file(site.address("/w.pth")) == first
    site.pages["/w.pth"] = b"two"
    assert fetch_weights_file(site.address("/w.pth")).read_bytes() == b"two"
    assert (len(names(cache)), first.read_bytes()) == (2, b"one")


def test_fetch_weights_file_interrupted_download_leaves_no_file(site, cache):
    site.pages["/w.pth"] = page(b"x" * 10, ETag='"1"', Content_Length="1000", Connection="close")
    with pytest.raises(InputError, match=r"the download of '.*/w\.pth' broke off after 10 of 1,000 bytes: run again"):
        fetch_weights_file(site.address("/w.pth"))
    assert names(cache) == []


def test_fetch_weights_file_missing_object_raises(site, cache):
    with pytest.raises(InputError, match=r"there are no weights at 'http://.*/w\.pth': the server answers 404"):
        fetch_weights_file(site.address("/w.pth"))
    with pytest.raises(InputError, match=r"cannot download the weights 'http://127\.0\.0\.1:1/w\.pth' .*--weights PATH"):
        fetch_weights_file("http://127.0.0.1:1/w.pth")
    assert not cache.exists()


@pytest.mark.cluster
def test_fetch_weights_file_several_processes_download_once(site, cache):
    body = bytes(range(256)) * 40_000
    site.pages["/w.pth"] = page(body, ETag='"1"')
    code = (
        "import sys; from extractors.weights import download\n"
        "read, counts = download._download, []\n"
        "download._download = lambda *args: counts.append(1) or read(*args)\n"
        "path = download.fetch_weights_file(sys.argv[1]); print(path, len(path.read_bytes()), len(counts))"
    )
    command = [sys.executable, "-c", code, site.address("/w.pth")]
    root = Path(__file__).parents[3]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(4)]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    (path,) = names(cache)
    assert {(place, size) for place, size, _ in said} == {(str(cache / path), str(len(body)))}
    assert sum(int(count) for _, _, count in said) == 1


def test_fetch_weights_file_sends_user_and_password_only_to_the_web_server(monkeypatch):
    """The name server gets the host; the web server, and no other that it names, gets user and password."""
    hosts: list[str] = []
    resolve = socket.getaddrinfo

    def look_up(host: str, *more: object, **named: object):
        hosts.append(host)
        return resolve(host, *more, **named)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with serve() as site, serve() as other:
        other.pages["/w.pth"] = b"weights"

        def redirect(handler: Handler) -> None:
            handler.answer(302, Location=other.address("/w.pth", "localhost"))

        site.pages = {"/w.pth": b"weights", "/moved.pth": redirect}
        for name in ("w", "moved"):
            path = fetch_weights_file(f"http://us%40er:p@ss@127.0.0.1:{site.port}/{name}.pth")
            assert path.read_bytes() == b"weights"
        login = f"Basic {base64.b64encode(b'us@er:p@ss').decode()}"
        assert [headers.get("Authorization") for _, _, headers in site.requests] == [login] * len(site.requests)
        assert [headers.get("Authorization") for _, _, headers in other.requests] == [None] * len(other.requests)
        assert len(site.requests) > 1
        assert len(other.requests) > 0
        assert set(hosts) <= {"127.0.0.1", "localhost"}
        with pytest.raises(InputError, match=re.escape("no weights at 'http://***@127.0.0.1:")) as caught:
            fetch_weights_file(f"http://user:SECRETPW@127.0.0.1:{site.port}/none.pth?sig=SECRETSIG")
    assert "SECRET" not in str(caught.value)
