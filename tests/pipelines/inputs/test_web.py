"""Fetching from real servers on this machine, and the checks of the addresses that are connected to."""

from __future__ import annotations

import gzip
import threading
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from pipelines.inputs import web
from pipelines.inputs.images.opening import open_images
from pipelines.inputs.web import (
    PARALLEL_READS,
    FetchError,
    WebAccess,
    check_proxy,
    fetch,
    is_public,
    web_version,
)
from schemas.errors import UsageError
from tests.web_server import serve

pytestmark = pytest.mark.usefixtures("no_proxies")

HERE = WebAccess(allow_private_addresses=True, total_seconds=30)


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses between tries, none of which is made."""
    made: list[float] = []
    monkeypatch.setattr(web, "time", SimpleNamespace(sleep=made.append, monotonic=time.monotonic))
    return made


def reason(address: str, access: WebAccess = HERE) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(address, access)
    assert caught.value.__cause__ is None  # The failure row takes its message from the error itself.
    return caught.value.strerror


def in_turn(*answers):
    """A page that answers each request differently."""
    rest = iter(answers)
    return lambda handler: next(rest)(handler)


def status(number: int, **headers: str):
    return lambda handler: handler.answer(number, b"no", **headers)


def found(body: bytes):
    return lambda handler: handler.answer(200, body)


# --- what is asked for and what comes back ---------------------------------------------------------------------------


def test_fetch_returns_all_bytes_and_sends_a_user_agent(site):
    site.pages["/a%20b.jpg?size=9"] = bytes(range(256)) * 5000
    assert fetch(site.address("/a b.jpg?size=9"), HERE) == bytes(range(256)) * 5000
    ((method, _, headers),) = site.requests
    assert method == "GET"
    assert headers["User-Agent"] == f"imagepivot/{version('imagepivot')}"
    assert headers["Host"] == f"127.0.0.1:{site.port}"


def test_fetch_sends_the_given_user_agent_to_every_hop(site):
    site.pages |= {"/a": status(302, Location="/b"), "/b": b"b"}
    agent = "my project/1.0 (mailto:zo\xeb@example.org)"
    access = WebAccess(allow_private_addresses=True, user_agent=agent)
    assert (fetch(site.address("/a"), access), web_version(site.address("/b"), access)) == (b"b", "1")
    assert [headers["User-Agent"] for _, _, headers in site.requests] == [agent] * 3


@pytest.mark.parametrize("agent", ["a\r\nHost: b", "a\n", "\x00", "\x7f", "\x85", "写", "\udcff"])
def test_user_agent_that_no_header_can_have_is_refused(agent):
    with pytest.raises(UsageError, match=r"--user-agent is .*, expected characters of Latin-1 without control characters"):
        WebAccess(user_agent=agent)


def test_one_connection_serves_many_files_and_missing_ones(site):
    site.pages["/a.jpg"] = b"a"
    for _ in range(5):
        assert fetch(site.address("/a.jpg"), HERE) == b"a"
        assert reason(site.address("/none.jpg")) == "HTTP 404"
    assert web_version(site.address("/a.jpg"), HERE) == "1"
    assert site.connections == 1


def test_compressed_or_chunked_body_is_decoded(site):
    packed = gzip.compress(b"picture")
    site.pages["/a"] = lambda handler: handler.answer(200, packed, Content_Encoding="gzip")
    assert fetch(site.address("/a"), HERE) == b"picture"
    chunks = b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    site.pages["/b"] = lambda handler: handler.answer(200, chunks, Content_Length="", Transfer_Encoding="chunked")
    assert fetch(site.address("/b"), HERE) == b"abcdefg"


@pytest.mark.parametrize("number", [400, 401, 403, 404, 410, 501, 204, 206, 302, 304])
def test_fetch_of_permanent_errors_does_not_retry(site, pauses, number):
    site.pages["/a"] = status(number)
    assert reason(site.address("/a")) == f"HTTP {number}"
    assert (len(site.requests), pauses) == (1, [])


# --- again -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [429, 500, 502, 503, 504])
def test_fetch_retries_with_exponential_backoff(site, pauses, number):
    site.pages["/a"] = in_turn(status(number), status(number), found(b"a"))
    assert fetch(site.address("/a"), HERE) == b"a"
    assert pauses == [0.5, 1.0]
    pauses.clear()
    site.pages["/b"] = status(number)
    assert reason(site.address("/b")) == f"HTTP {number}"
    assert (site.paths.count("/b"), pauses) == (4, [0.5, 1.0, 2.0])


def test_fetch_respects_retry_after(site, pauses):
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    site.pages["/a"] = in_turn(
        status(429, Retry_After="7"), status(503, Retry_After=date), status(503, Retry_After="soon"), found(b"a")
    )
    assert fetch(site.address("/a"), HERE) == b"a"
    assert pauses[0] == 7.0
    assert 10 < pauses[1] <= 20
    assert pauses[2] == 2.0


def test_fetch_does_not_wait_past_the_deadline(site, pauses):
    site.pages["/a"] = status(429, Retry_After="3600")
    assert reason(site.address("/a")) == "HTTP 429"
    assert (len(site.requests), pauses) == (1, [])


def test_fetch_retries_broken_connections(site, pauses):
    def breaks(handler):
        handler.answer(200, b"half", Content_Length="8")
        handler.close_connection = True

    def hangs_up(handler):
        handler.close_connection = True

    site.pages["/a"] = in_turn(breaks, hangs_up, found(b"whole"))
    assert fetch(site.address("/a"), HERE) == b"whole"
    site.pages["/b"] = breaks
    assert reason(site.address("/b")) == "connection broken"


def test_fetch_from_closed_port_fails(pauses):
    with serve() as site:
        address = site.address("/a")
    assert reason(address) == "cannot connect"
    assert len(pauses) == 3
    assert [web_version(text, HERE) for text in (address, "http://[bad")] == ["", ""]
    assert web_version(address) == ""


# --- limits ----------------------------------------------------------------------------------------------------------

SMALL = WebAccess(allow_private_addresses=True, max_bytes=1000, total_seconds=30)
TOO_LARGE = "larger than 1,000 bytes"


def endless(start: bytes, piece: bytes, pause: float = 0.0):
    """An answer that never ends, without its headers' end where ``start`` has none."""

    def send(handler):
        handler.close_connection = True
        handler.wfile.write(start)
        while True:
            handler.wfile.write(piece)
            time.sleep(pause)

    return send


def test_fetch_limits_size_exactly(site, pauses):
    site.pages |= {"/a": bytes(1000), "/b": bytes(1001)}
    assert fetch(site.address("/a"), SMALL) == bytes(1000)
    assert reason(site.address("/b"), SMALL) == TOO_LARGE
    assert pauses == []


HEADERS = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"


def test_silent_server_is_cut_off_and_asked_again(site, pauses):
    site.pages["/a"] = in_turn(lambda handler: time.sleep(0.5), found(b"a"))
    assert fetch(site.address("/a"), WebAccess(allow_private_addresses=True, read_seconds=0.1)) == b"a"
    assert pauses == [0.5]


def test_deadline_ends_before_the_timeout_of_a_read(site):
    over, waited = threading.Event(), []
    site.pages["/a"] = lambda handler: waited.append(over.wait(10))
    assert reason(site.address("/a"), WebAccess(allow_private_addresses=True, total_seconds=0.1)) == "timed out"
    assert waited == []
    over.set()


# --- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [301, 302, 303, 307, 308])
def test_fetch_follows_redirects_of_any_form(site, number):
    site.pages["/x/a"] = status(number, Location="../b?c")
    site.pages["/b?c"] = status(number, Location=f"//localhost:{site.port}/d")
    site.pages["/d"] = b"d"
    assert fetch(site.address("/x/a"), HERE) == b"d"
    assert site.paths == ["/x/a", "/b?c", "/d"]


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/café.png".encode(), "/caf%C3%A9.png"),
        ("/café.png".encode("latin-1"), "/caf%E9.png"),
        ("/Å/à".encode(), "/%C3%85/%C3%A0"),  # As Latin-1 the last bytes are a line end and a blank.
        ("//LOCALHOST/é".encode(), "/%C3%A9"),
    ],
)
def test_fetch_follows_redirects_to_addresses_that_are_not_ascii(site, target, path):
    def redirect(handler):
        place = target.replace(b"LOCALHOST", f"localhost:{site.port}".encode())
        handler.wfile.write(b"HTTP/1.1 302 Found\r\nLocation: " + place + b"\r\nContent-Length: 0\r\n\r\n")

    site.pages |= {"/x/a": redirect, path: b"found"}
    assert fetch(site.address("/x/a"), HERE) == b"found"
    assert site.paths == ["/x/a", path]


# --- proxies ---------------------------------------------------------------------------------------------------------


def test_fetch_through_allowed_proxy(site, monkeypatch):
    monkeypatch.setenv("all_proxy", f"http://me:secret%21@127.0.0.1:{site.port}")
    site.pages["http://a.test/b"] = b"b"
    check_proxy("http://a.test/b", HERE)
    assert fetch("http://a.test/b", HERE) == b"b"
    headers = {name.lower(): value for name, value in site.requests[0][2].items()}
    assert headers["proxy-authorization"] == "Basic bWU6c2VjcmV0IQ=="
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:1080")
    with pytest.raises(UsageError, match="that is not an http or https proxy"):
        check_proxy("http://a.test/b", HERE)


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_with_versions_returns_headers_in_order(site, pauses, tmp_path):
    changed = "Wed, 21 Oct 2015 07:28:00 GMT"
    pages = {
        "/tag": lambda handler: handler.answer(200, b"abc", ETag='"5d8c"', Last_Modified=changed),
        "/changed": lambda handler: handler.answer(200, b"abc", Last_Modified=changed),
        "/size": b"abcd",
        "/nothing": lambda handler: handler.answer(200, Content_Length=""),
        "/moved": status(302, Location="/tag"),
        "/large": lambda handler: handler.answer(200, ETag='W/"1"', Content_Length=str(10**12)),
        "/busy": in_turn(status(503), *[lambda handler: handler.answer(200, b"a", ETag='"1"')] * 20),
        "/no-head": status(405),
        "/unknown-head": status(501),
    }
    site.pages |= pages
    paths = [*pages, "/missing"]
    addresses = [site.address(path) for path in paths] * 20
    expected = ['"5d8c" 3', f"{changed} 3", "4", "", '"5d8c" 3', 'W/"1" 1000000000000', '"1" 1', "", "", ""]
    assert len(addresses) > 2 * PARALLEL_READS
    (tmp_path / "t.csv").write_text("image_id,uri\n" + "".join(f"{n},{address}\n" for n, address in enumerate(addresses)))
    images = open_images(tmp_path / "t.csv", allow_private_addresses=True)
    assert [ref.version for ref in images.with_versions(list(images.refs()))][:10] == expected
    assert {method for method, _, _ in site.requests} == {"HEAD"}
    assert pauses == [0.5]  # One server was asked again.


# --- addresses that are not public ------------------------------------------------------------------------------------


PRIVATE = [
    *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
    *("192.0.2.1", "198.18.0.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "100::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
    *("2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"),
]
PUBLIC = [
    *("1.1.1.1", "93.184.215.14", "172.15.255.255", "172.32.0.1", "192.167.0.1", "223.255.255.255"),
    *("2606:4700::1111", "2a00:1450:4001:82a::200e", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e", "2002:5db8:d70e::1"),
]


@pytest.mark.parametrize(("address", "public"), [*((text, False) for text in PRIVATE), *((text, True) for text in PUBLIC)])
def test_addresses_are_public_or_not(address, public):
    assert is_public(address) is public
