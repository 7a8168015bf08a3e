"""Fetching from real servers on this machine."""

from __future__ import annotations

import gzip
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from pipelines.inputs import web
from pipelines.inputs.web import PARALLEL_READS, FetchError, WebAccess, check_proxy, fetch, is_web_address, versions_of
from schemas.errors import UsageError
from tests.web_server import serve

HERE = WebAccess(allow_private_addresses=True, total_seconds=30)


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def site():
    with serve() as site:
        yield site


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


def test_a_file_is_fetched_whole_and_the_request_says_who_asks(site):
    site.pages["/a%20b.jpg?size=9"] = bytes(range(256)) * 5000
    assert fetch(site.address("/a b.jpg?size=9"), HERE) == bytes(range(256)) * 5000
    ((method, _, headers),) = site.requests
    assert method == "GET"
    assert headers["User-Agent"] == f"imagepivot/{version('imagepivot')}"
    assert headers["Host"] == f"127.0.0.1:{site.port}"


def test_one_connection_serves_many_files_and_missing_ones(site):
    site.pages["/a.jpg"] = b"a"
    for _ in range(5):
        assert fetch(site.address("/a.jpg"), HERE) == b"a"
        assert reason(site.address("/none.jpg")) == "HTTP 404"
    assert list(versions_of([site.address("/a.jpg")], HERE)) == ["1"]
    assert site.connections == 1


def test_a_body_that_is_compressed_all_the_same_is_unpacked(site):
    packed = gzip.compress(b"picture")
    site.pages["/a"] = lambda handler: handler.answer(200, packed, Content_Encoding="gzip")
    assert fetch(site.address("/a"), HERE) == b"picture"


def test_a_chunked_body_is_put_together(site):
    def chunked(handler):
        handler.answer(200, b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n", Content_Length="", Transfer_Encoding="chunked")

    site.pages["/a"] = chunked
    assert fetch(site.address("/a"), HERE) == b"abcdefg"


@pytest.mark.parametrize("number", [400, 401, 403, 404, 410, 501, 204, 206, 304])
def test_what_cannot_get_better_is_asked_for_once(site, pauses, number):
    site.pages["/a"] = status(number)
    assert reason(site.address("/a")) == f"HTTP {number}"
    assert (len(site.requests), pauses) == (1, [])


@pytest.mark.parametrize("address", ["http://", "http:///a.jpg", "http://[bad/a.jpg", "http://h:99999/a"])
def test_what_is_no_address_fails_alone(address):
    assert reason(address) in ("not a valid address", "its host is unknown")


def test_what_is_a_web_address():
    assert [is_web_address(text) for text in ("http://a", "HTTPS://a/b", "ftp://a", "file:///a", "a/http://b", "http:/a")] == [
        *(True, True, False, False, False, False)
    ]


# --- again -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [429, 500, 502, 503, 504])
def test_a_busy_server_is_asked_again_after_growing_pauses(site, pauses, number):
    site.pages["/a"] = in_turn(status(number), status(number), found(b"a"))
    assert fetch(site.address("/a"), HERE) == b"a"
    assert pauses == [0.5, 1.0]


def test_a_server_that_stays_busy_is_given_up(site, pauses):
    site.pages["/a"] = status(503)
    assert reason(site.address("/a")) == "HTTP 503"
    assert (len(site.requests), pauses) == (4, [0.5, 1.0, 2.0])


def test_the_server_says_how_long_to_wait(site, pauses):
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 20))
    site.pages["/a"] = in_turn(
        status(429, Retry_After="7"), status(503, Retry_After=date), status(503, Retry_After="soon"), found(b"a")
    )
    assert fetch(site.address("/a"), HERE) == b"a"
    assert pauses[0] == 7.0
    assert 10 < pauses[1] <= 20
    assert pauses[2] == 2.0


def test_a_wait_longer_than_the_time_left_is_not_begun(site, pauses):
    site.pages["/a"] = status(429, Retry_After="3600")
    assert reason(site.address("/a")) == "HTTP 429"
    assert (len(site.requests), pauses) == (1, [])


def test_a_connection_that_breaks_is_tried_again(site, pauses):
    def breaks(handler):
        handler.answer(200, b"half", Content_Length="8")
        handler.close_connection = True

    def hangs_up(handler):
        handler.close_connection = True

    site.pages["/a"] = in_turn(breaks, hangs_up, found(b"whole"))
    assert fetch(site.address("/a"), HERE) == b"whole"
    site.pages["/b"] = breaks
    assert reason(site.address("/b")) == "connection broken"


def test_a_server_that_is_gone(pauses):
    with serve() as site:
        address = site.address("/a")
    assert reason(address) == "cannot connect"
    assert len(pauses) == 3


# --- limits ----------------------------------------------------------------------------------------------------------

SMALL = WebAccess(allow_private_addresses=True, max_bytes=1000, total_seconds=30)
TOO_LARGE = "larger than 1,000 bytes"


def endless(start: bytes, piece: bytes):
    """An answer that never ends, without its headers' end where ``start`` has none."""

    def send(handler):
        handler.close_connection = True
        handler.wfile.write(start)
        while True:
            handler.wfile.write(piece)

    return send


def test_the_greatest_size_is_allowed_and_one_byte_more_is_not(site, pauses):
    site.pages |= {"/a": bytes(1000), "/b": bytes(1001)}
    assert fetch(site.address("/a"), SMALL) == bytes(1000)
    assert reason(site.address("/b"), SMALL) == TOO_LARGE
    assert pauses == []


HEADERS = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEADERS + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "page",
    [
        endless(HEADERS + b"Connection: close\r\n\r\n", bytes(4096)),
        endless(HEADERS + b"Content-Length: x\r\n\r\n", bytes(4096)),
        endless(CHUNKED, b"400\r\n" + bytes(1024) + b"\r\n"),
        lambda handler: handler.answer(200, gzip.compress(bytes(10_000)), Content_Encoding="gzip"),
    ],
    ids=["no length", "wrong length", "chunks", "compressed"],
)
def test_what_a_server_does_not_say_about_the_size_does_not_help_it(site, pauses, page):
    site.pages["/a"] = page
    assert reason(site.address("/a"), SMALL) == TOO_LARGE
    assert len(site.requests) == 1


def test_framing_that_never_ends_is_cut_off(site, pauses):
    site.pages["/a"] = endless(CHUNKED, b"0" * 4096)
    assert reason(site.address("/a"), SMALL) in (TOO_LARGE, "connection broken")  # Some versions of urllib3 look for it.


def dripping(start: bytes):
    def send(handler):
        handler.close_connection = True
        handler.wfile.write(start)
        while True:
            handler.wfile.write(b"x")
            time.sleep(0.02)

    return send


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [b"", HEADERS + b"X: ", HEADERS + b"Content-Length: 900\r\n\r\n", CHUNKED + b"400\r\n"],
    ids=["status", "headers", "body", "chunk"],
)
def test_a_server_that_drips_is_cut_off(site, start):
    site.pages["/a"] = dripping(start)
    assert reason(site.address("/a"), WebAccess(allow_private_addresses=True, total_seconds=0.3)) == "timed out"
    assert len(site.requests) == 1


def test_a_silent_server_is_cut_off_and_asked_again(site, pauses):
    site.pages["/a"] = in_turn(lambda handler: time.sleep(0.5), found(b"a"))
    assert fetch(site.address("/a"), WebAccess(allow_private_addresses=True, read_seconds=0.1)) == b"a"
    assert pauses == [0.5]


@pytest.mark.parametrize("field", ["max_bytes", "connect_seconds", "read_seconds", "total_seconds", "tries"])
def test_limits_are_positive(field):
    with pytest.raises(UsageError, match=f"{field} is 0, expected a number greater than 0"):
        WebAccess(**{field: 0})


# --- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [301, 302, 303, 307, 308])
def test_redirects_are_followed_whatever_form_they_have(site, number):
    site.pages["/x/a"] = status(number, Location="../b?c")
    site.pages["/b?c"] = status(number, Location=f"//localhost:{site.port}/d")
    site.pages["/d"] = b"d"
    assert fetch(site.address("/x/a"), HERE) == b"d"
    assert site.paths == ["/x/a", "/b?c", "/d"]


def test_redirects_end(site):
    site.pages["/a"] = status(302, Location="/a")
    assert reason(site.address("/a")) == "more than 10 redirects"
    assert len(site.requests) == 11


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/a", "file:///etc/passwd", "gopher://127.0.0.1:25/"])
def test_redirects_lead_to_the_web_only(site, target):
    site.pages["/a"] = status(302, Location=target)
    assert reason(site.address("/a")) == "redirected to something other than http and https"


def test_a_redirect_that_leads_nowhere(site):
    site.pages["/a"] = status(302)
    assert reason(site.address("/a")) == "HTTP 302"
    site.pages["/b"] = status(302, Location="http://[bad")
    assert reason(site.address("/b")) == "not a valid address"


# --- proxies ---------------------------------------------------------------------------------------------------------


def test_behind_a_proxy_nothing_can_be_checked(site, monkeypatch):
    monkeypatch.setenv("http_proxy", site.address(""))
    with pytest.raises(UsageError, match=r"cannot fetch 'http://a.test/b': the environment names a proxy .*http_proxy"):
        check_proxy("http://a.test/b", WebAccess())
    assert reason("http://a.test/b", WebAccess()) == "cannot be checked behind a proxy"
    check_proxy("https://a.test/b", WebAccess())
    monkeypatch.setenv("no_proxy", "a.test")
    check_proxy("http://a.test/b", WebAccess())
    assert site.requests == []


def test_a_proxy_is_used_where_everything_is_allowed(site, monkeypatch):
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
def test_versions_are_what_servers_tell_in_the_order_of_the_addresses(site, pauses):
    changed = "Wed, 21 Oct 2015 07:28:00 GMT"
    site.pages |= {
        "/tag": lambda handler: handler.answer(200, b"abc", ETag='"5d8c"', Last_Modified=changed),
        "/changed": lambda handler: handler.answer(200, b"abc", Last_Modified=changed),
        "/size": b"abcd",
        "/nothing": lambda handler: handler.answer(200, Content_Length=""),
        "/moved": status(302, Location="/tag"),
        "/large": lambda handler: handler.answer(200, ETag='W/"1"', Content_Length=str(10**12)),
        "/busy": in_turn(status(503), lambda handler: handler.answer(200, b"a", ETag='"1"')),
        "/no-head": status(405),
        "/unknown-head": status(501),
    }
    paths = [*site.pages, "/missing"]
    addresses = [site.address(path) for path in paths] * 20
    expected = ['"5d8c" 3', f"{changed} 3", "4", "", '"5d8c" 3', 'W/"1" 1000000000000', '"1" 1', "", "", ""]
    site.pages["/busy"] = in_turn(*[status(503), lambda handler: handler.answer(200, b"a", ETag='"1"')] * 40)
    assert len(addresses) > 2 * PARALLEL_READS
    assert list(versions_of(addresses, HERE))[:10] == expected
    assert {method for method, _, _ in site.requests} == {"HEAD"}
    assert pauses  # One server was asked again.


def test_a_server_that_cannot_be_asked_has_no_version(pauses):
    with serve() as site:
        address = site.address("/a")
    assert list(versions_of([address, "http://[bad"], HERE)) == ["", ""]
    assert list(versions_of([address])) == [""]
    assert list(versions_of([])) == []
