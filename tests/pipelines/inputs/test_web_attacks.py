"""Addresses and servers of strangers: nothing private is reached, and no answer takes more bytes or time than allowed.

In all tests ``site``, a server at 127.0.0.1, is on the internet, and all other addresses of this machine are not.
"""

from __future__ import annotations

import datetime
import gzip
import socket
import ssl
import time
import tracemalloc
import zlib

import pytest

from pipelines.inputs import web
from pipelines.inputs.web import FetchError, WebAccess, fetch, web_version
from tests.pipelines.inputs.test_web import CHUNKED, HEADERS, endless, in_turn, status
from tests.web_server import serve

pytestmark = pytest.mark.usefixtures("no_proxies", "internet")

ACCESS = WebAccess(max_bytes=1000, total_seconds=30, max_attempts=2)
NOT_PUBLIC, UNKNOWN = "its host has an address that is not public", "its host is unknown"
OTHER_SCHEME, INVALID = "redirected to something other than http and https", "not a valid address"
TOO_LARGE, BROKEN, PROXY = "larger than 1,000 bytes", "connection broken", "cannot be checked behind a proxy"


@pytest.fixture
def internet(monkeypatch) -> dict[str, list[str]]:
    """Names with their answers in turn, the last one forever: an address each, or several with commas."""
    names = {"public.test": ["127.0.0.1"], "private.test": ["127.0.0.2"]}
    names |= {"both.test": ["127.0.0.1,127.0.0.2"], "mixed.test": ["127.0.0.2,127.0.0.1"]}
    look_up, is_public = socket.getaddrinfo, web.is_public

    def resolve(host, *arguments, **options):
        answers = names.get(host.lower().rstrip("."), [host])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [place for address in answer.split(",") for place in look_up(address, *arguments, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(web, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    monkeypatch.setattr(web, "_FIRST_PAUSE", 0.0)
    return names


def outcome(address: str, access: WebAccess = ACCESS) -> bytes | str:
    """Return the bytes of an address, or else the reason of the failure."""
    try:
        return fetch(address, access)
    except FetchError as error:
        return error.strerror


# --- hosts -----------------------------------------------------------------------------------------------------------

SPELLINGS = [
    *("127.0.0.2", "127.2", "127.0.2", "2130706434", "0x7f000002", "0x7F.0x0.0x0.0x2", "0x7f.2", "0177.0.0.2", "017700000002"),
    *(
        "00000177.0.0.2",
        "0x0000007f.2",
        "127.0.0.2.",
        "private.test",
        "PRIVATE.test",
        "private.test.",
        "both.test",
        "mixed.test",
    ),
    *("[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::127.0.0.2]", "[::ffff:127.0.0.2]"),
    *("[::FFFF:7F00:2]", "[0:0:0:0:0:ffff:7f00:2]"),
    *("[::ffff:0:127.0.0.2]", "[64:ff9b::127.0.0.2]", "[64:ff9b:1::7f00:2]", "[2002:7f00:2::]", "[::1%25lo]", "[::1%lo]"),
    *("[fe80::1]", "[fc00::1]", "[fec0::1]", "[ff02::1]", "[2001:0:7f00:2::]", "[::127.0.0.1]", "[::ffff:127.0.0.3]"),
    *("0.0.0.0", "0", "0x0", "0.0", "000000", "169.254.169.254", "0xa9fea9fe", "2852039166", "0251.0376.0251.0376", "10.1"),
    *("192.168.257", "172.16.1", "100.64.1", "198.18.1", "224.0.0.1", "240.1", "255.255.255.255"),
    *("１２７.0.0.2", "127。0。0。2", "①②⑦.0.0.2", "127.0.0.٢", "pri\u00advate.test", "ｐｒｉｖａｔｅ.test"),
    *("127%2e0%2e0%2e2", "%31%32%37.2", "public.test%00.127.0.0.2", "127.0.0.2%00.public.test"),
    *("127.0.0.2\x00", "localhost\x00"),
    *("public.test@127.0.0.2", "public.test:80@127.0.0.2", "127.0.0.1@127.0.0.2", "a%40public.test@127.0.0.2", "@127.0.0.2"),
    *("127.0.0.2\\@", "127.0.0.2 ", "\t127.0.0.2", "", ".", "*"),
]


@pytest.mark.parametrize("host", SPELLINGS)
def test_private_hosts_are_refused_in_all_spellings(site, host):
    address = f"http://{host}:{site.port}/a"
    assert outcome(address) in (NOT_PUBLIC, UNKNOWN, INVALID)
    if "\x00" not in host:
        target = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + address.encode() + b"\r\n\r\n"
        site.pages["/moved"] = lambda handler: handler.wfile.write(target)
        assert outcome(site.address("/moved")) in (NOT_PUBLIC, UNKNOWN, INVALID)
    assert set(site.paths) <= {"/moved"}


@pytest.mark.parametrize(
    "address",
    [
        *("http://public.test#@127.0.0.2:{}/a", "http://public.test?@127.0.0.2:{}/a", "http://public.test/@127.0.0.2:{}/a"),
        *("http://public.test:{}/@127.0.0.2/../a", "http://public.test:{}\\@127.0.0.2/a", "http://public.test:{}//127.0.0.2/a"),
    ],
)
def test_other_hosts_after_the_first_are_not_reached(site, internet, monkeypatch, address):
    """Parsers differ about the end of a host; the checked host is the one that is asked."""
    asked = []
    connect = socket.socket.connect
    monkeypatch.setattr(socket.socket, "connect", lambda sock, place: (asked.append(place[0]), connect(sock, place))[1])
    assert outcome(address.format(site.port)) in (b"a", INVALID, UNKNOWN, NOT_PUBLIC, "cannot connect", "HTTP 404")
    assert set(asked) <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("answers", "pages", "words"),
    [
        (["127.0.0.1", "127.0.0.2"], {"/a": in_turn(*[status(503, Connection="close")] * 2)}, NOT_PUBLIC),  # Before a retry.
        (["127.0.0.1", "127.0.0.2"], {"/a": status(302, Location="/b", Connection="close"), "/b": b"b"}, NOT_PUBLIC),
        (["127.0.0.1", "127.0.0.2"], {"/a": b"a"}, ""),  # The checked address is that of the connection.
    ],
)
def test_names_with_other_addresses_later_are_checked_again(site, internet, answers, pages, words):
    internet["photos.test"] = list(answers)
    site.pages |= {
        path: (lambda handler, page=page: (page(handler), setattr(handler, "close_connection", True)))
        if callable(page)
        else page
        for path, page in pages.items()
    }
    address = site.address("/a", "photos.test")
    assert outcome(address) == (words or b"a")
    assert "/b" not in site.paths


# --- redirects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hops", [1, 5, 10])
@pytest.mark.parametrize(
    ("target", "words"),
    [
        *((f"http://{host}/a", NOT_PUBLIC) for host in ("private.test", "public.test@127.0.0.2")),
        *((f"//{host}/a", NOT_PUBLIC) for host in ("127.0.0.2", "[::1]")),
        ("https://127.0.0.2/a", NOT_PUBLIC),
        *((f"{scheme}:///etc/passwd", OTHER_SCHEME) for scheme in ("file", "FILE", "ftp")),
        *((text, OTHER_SCHEME) for text in ("data:image/png;base64,AAAA", "http:/etc/passwd", "http+unix://%2Ftmp%2Fs/a")),
        ("http://[bad", INVALID),
    ],
)
def test_chains_of_redirects_end_before_private_hosts_and_other_schemes(site, hops, target, words):
    for hop in range(hops):
        site.pages[f"/{hop}"] = status(302, Location=f"/{hop + 1}" if hop + 1 < hops else target)
    result = outcome(site.address("/0"))
    if target == "http:/etc/passwd":  # Relative to the server, for urllib.
        assert result in (OTHER_SCHEME, "HTTP 404", "more than 10 redirects")
    else:
        assert result == words
    assert site.paths[:hops] == [f"/{hop}" for hop in range(hops)]


def test_redirects_have_one_deadline_and_an_end(site):
    site.pages |= {f"/{hop}": status(302, Location=f"/{hop + 1}") for hop in range(50)}
    assert outcome(site.address("/0")) == "more than 10 redirects"
    assert len(site.paths) == 11
    site.pages["/slow"] = lambda handler: (time.sleep(0.1), handler.answer(302, Location="/slow"))
    assert outcome(site.address("/slow"), WebAccess(total_seconds=0.25)) == "timed out"


@pytest.mark.parametrize("length", ["1000000000000", "-1", "x"])
def test_endless_body_of_a_redirect_is_not_read(site, length):
    start = f"HTTP/1.1 302 Found\r\nLocation: /a\r\nContent-Length: {length}\r\n\r\n".encode()
    site.pages["/moved"] = endless(start, bytes(4096))
    assert fetch(site.address("/moved"), ACCESS) == b"a"


# --- proxies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("start", ["http://public.test/a", "redirect"])
def test_proxies_of_the_environment_are_not_used_unchecked(site, monkeypatch, name, start):
    """A proxy resolves names itself, so that no address can be checked."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    site.pages["/moved"] = status(302, Location="http://public.test/a")
    assert outcome(site.address("/moved") if start == "redirect" else start) == PROXY


@pytest.mark.parametrize("host", ["public.test@127.0.0.2", "direct.test@private.test", "direct.test.private.test"])
def test_hosts_without_proxy_are_checked(monkeypatch, internet, host):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "127.0.0.2,private.test,direct.test")
    internet["direct.test.private.test"] = ["10.0.0.1"]
    assert outcome(f"http://{host}/a") == NOT_PUBLIC


# --- answers ---------------------------------------------------------------------------------------------------------

ZEROS = bytes(1 << 20)
BOMB = gzip.compress(ZEROS * 64)


def answer(head: bytes, body: bytes = b""):
    """An answer of these bytes, after which the server hangs up."""

    def send(handler):
        handler.close_connection = True
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + body)

    return send


ANSWERS = {
    "endless body": (endless(HEADERS + b"\r\n", bytes(4096)), TOO_LARGE),
    "endless chunks": (endless(CHUNKED, b"400\r\n" + bytes(1024) + b"\r\n"), TOO_LARGE),
    "endless chunk extension": (endless(CHUNKED + b"1;", b"x" * 4096), (TOO_LARGE, BROKEN)),
    "endless status": (endless(b"", b"x" * 4096), (TOO_LARGE, BROKEN)),
    "endless header": (endless(HEADERS + b"x: ", b"y" * 4096), (TOO_LARGE, BROKEN)),
    "endless interim answers": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100), (TOO_LARGE, BROKEN)),
    "chunk of 2^80 bytes": (answer(b"Transfer-Encoding: chunked", b"f" * 20 + b"\r\nxx"), (TOO_LARGE, BROKEN)),
    "length too large": (answer(b"Content-Length: 900", b"half"), BROKEN),
    "length above the limit": (answer(b"Content-Length: 1001", b"half"), TOO_LARGE),
    "gzip bomb": (answer(b"Content-Encoding: gzip\r\nContent-Length: %d" % len(BOMB), BOMB), TOO_LARGE),
    "gzip in gzip": (answer(b"Content-Encoding: gzip, gzip", gzip.compress(BOMB)), TOO_LARGE),
    "broken gzip": (answer(b"Content-Encoding: gzip", BOMB[:50] + b"x" * 50), ("its content encoding is broken", TOO_LARGE)),
    "deflate bomb": (answer(b"Content-Encoding: deflate", zlib.compress(ZEROS * 64)), TOO_LARGE),
}


SLOW = ("endless interim answers",)  # A MiB of short lines, all traced.


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ANSWERS])
def test_answers_take_no_more_than_the_limit(site, name):
    """The limit of 1,000 bytes leaves two thousand and a MiB for headers and frames."""
    site.pages["/a"], words = ANSWERS[name]
    tracemalloc.start()
    try:
        result = outcome(site.address("/a"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result in (words if isinstance(words, tuple) else (words,))
    assert peak < 16 << 20
    assert len(site.requests) == (2 if result == BROKEN else 1)
    assert len(web_version(site.address("/a"), ACCESS)) <= 100


def test_length_below_the_body_cuts_the_body(site):
    """The rest is no answer to the next request."""
    site.pages["/a"] = lambda handler: handler.wfile.write(
        HEADERS + b"Content-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\n\r\nforged"
    )
    site.pages["/b"] = b"b"
    assert fetch(site.address("/a"), ACCESS) == b"ab"
    assert fetch(site.address("/b"), ACCESS) == b"b"


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [b"", HEADERS, HEADERS + b"Content-Length: 900\r\n\r\n", CHUNKED, CHUNKED + b"400\r\n", b"HTTP/1.1 302 Found\r\n"],
)
def test_slow_answers_end_at_the_deadline(site, start):
    site.pages["/a"] = endless(start, b"x", pause=0.05)
    assert outcome(site.address("/a"), WebAccess(total_seconds=0.4, read_seconds=0.2)) == "timed out"
    assert len(site.requests) == 1


def test_fetch_tries_all_addresses_of_a_host(site, internet):
    assert outcome("http://no-such-host.invalid/a") == UNKNOWN
    internet["photos.test"] = ["127.0.0.2,127.0.0.1"]
    assert fetch(site.address("/a", "photos.test"), WebAccess(allow_private_addresses=True)) == b"a"
    assert site.requests[0][2]["Host"] == f"photos.test:{site.port}"


# --- certificates ----------------------------------------------------------------------------------------------------


@pytest.fixture
def secure(tmp_path):
    """A server with a certificate for ``photos.test``, and the file that makes a client trust it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "photos.test")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    certificate = (
        builder.not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("photos.test")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (tmp_path / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with serve(context) as site:
        site.pages["/a"] = bytes(range(256)) * 1000
        yield site, tmp_path / "cert.pem"


def test_fetch_checks_the_certificate_of_the_host_name(secure, internet, monkeypatch):
    site, trusted = secure
    internet |= {"photos.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]}
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    for _ in range(2):
        assert fetch(site.address("/a", "photos.test"), WebAccess()) == bytes(range(256)) * 1000
    assert (site.names, site.connections) == (["photos.test"], 1)
    assert outcome(site.address("/a", "other.test"), WebAccess()) == "its certificate is not valid"
    assert outcome(site.address("/a", "127.0.0.1"), WebAccess()) == "its certificate is not valid"


def test_fetch_refuses_untrusted_certificates(secure, internet):
    site, _ = secure
    internet["photos.test"] = ["127.0.0.1"]
    assert outcome(site.address("/a", "photos.test")) == "its certificate is not valid"
    assert site.requests == []


def test_fetch_without_tls_fails(site):
    assert outcome(site.address("/a").replace("http:", "https:")) == "no secure connection"
