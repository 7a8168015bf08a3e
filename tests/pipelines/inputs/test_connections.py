"""Which addresses are connected to: the checks, against real servers on this machine."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl

import pytest

from pipelines.inputs import connections
from pipelines.inputs.connections import is_public
from pipelines.inputs.web import PUBLIC_ACCESS, FetchError, WebAccess, fetch
from tests.web_server import serve

HERE = WebAccess(allow_private_addresses=True, total_seconds=30)
NOT_PUBLIC = "its host has an address that is not public"


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    connections.connections.cache_clear()


@pytest.fixture
def site():
    with serve() as site:
        site.pages["/a"] = b"a"
        yield site


def reason(address: str, access: WebAccess = PUBLIC_ACCESS) -> str:
    with pytest.raises(FetchError) as caught:
        fetch(address, access)
    return caught.value.strerror


@pytest.fixture
def names(monkeypatch):
    """Names that are looked up here: each answers with its lists of addresses in turn, the last one for ever."""
    known: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        if host not in known:
            return real(host, port, *args, **kwargs)
        found = known[host].pop(0) if len(known[host]) > 1 else known[host][0]
        return [entry for address in found for entry in real(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.fixture
def one_is_public(monkeypatch):
    """Stand-in for the internet: 127.0.0.1 counts as public, and nothing else on this machine does."""
    monkeypatch.setattr(connections, "is_public", lambda address: address == "127.0.0.1")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1", "192.168.1.1"),
        *("192.0.2.1", "198.18.0.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fec0::1", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "100::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1"),
        *("2002:7f00:1::", "2002:a00:1::", "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::1"),
    ],
)
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "93.184.215.14", "172.15.255.255", "172.32.0.1", "192.167.0.1", "223.255.255.255"),
        *("2606:4700::1111", "2a00:1450:4001:82a::200e", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e", "2002:5db8:d70e::1"),
    ],
)
def test_addresses_that_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "LOCALHOST.", "127.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "0.0.0.0", "0"),
        *("[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "user@127.0.0.1", "127%2e0.0.1"),
        *("10.0.0.1", "192.168.0.1", "169.254.169.254", "[fe80::1]", "[fd00::1]", "224.0.0.1"),
    ],
)
def test_nothing_is_sent_to_this_machine_or_its_network_however_it_is_written(site, host):
    assert reason(site.address("/a", host)) in (NOT_PUBLIC, "its host is unknown")
    assert site.connections == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]"])
def test_the_same_is_fetched_where_it_is_allowed(site, host):
    assert fetch(site.address("/a", host), HERE) == b"a"


@pytest.mark.parametrize(
    "addresses", [["127.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["::1", "127.0.0.1"]]
)
def test_a_name_is_refused_if_any_of_its_addresses_is_private(site, names, one_is_public, addresses):
    names["photos.test"] = [addresses]
    if len(addresses) == 1:
        assert fetch(site.address("/a", "photos.test"), WebAccess()) == b"a"
    else:
        assert reason(site.address("/a", "photos.test")) == NOT_PUBLIC
        assert site.connections == 0


def test_the_address_that_was_checked_is_the_one_connected_to(site, names, one_is_public):
    # The second answer of the name server would lead elsewhere.
    names["photos.test"] = [["127.0.0.1"], ["127.0.0.2"]]
    assert fetch(site.address("/a", "photos.test"), WebAccess()) == b"a"
    assert names["photos.test"] == [["127.0.0.2"]]
    assert site.requests[0][2]["Host"] == f"photos.test:{site.port}"


@pytest.mark.parametrize("target", ["//127.0.0.2:{}/a", "http://rebound.test:{}/a", "http://[::1]:{}/a", "http://0:{}/a"])
def test_redirects_are_checked_like_the_first_address(site, names, one_is_public, target):
    names["photos.test"], names["rebound.test"] = [["127.0.0.1"]], [["127.0.0.2"]]
    site.pages["/moved"] = lambda handler: handler.answer(302, Location=target.format(site.port))
    assert reason(site.address("/moved", "photos.test")) == NOT_PUBLIC
    assert site.paths == ["/moved"]


def test_an_unknown_host(names):
    assert reason("http://no-such-host.invalid/a") == "its host is unknown"


def test_of_several_addresses_one_that_answers_is_enough(site, names):
    names["photos.test"] = [["127.0.0.2", "127.0.0.1"]]
    assert fetch(site.address("/a", "photos.test"), HERE) == b"a"


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


def test_the_certificate_is_that_of_the_name_although_a_checked_address_is_connected_to(
    secure, names, one_is_public, monkeypatch
):
    site, trusted = secure
    names |= {"photos.test": [["127.0.0.1"]], "other.test": [["127.0.0.1"]]}
    monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
    for _ in range(2):
        assert fetch(site.address("/a", "photos.test"), WebAccess()) == bytes(range(256)) * 1000
    assert (site.names, site.connections) == (["photos.test"], 1)
    assert reason(site.address("/a", "other.test")) == "its certificate is not valid"
    assert reason(site.address("/a", "127.0.0.1")) == "its certificate is not valid"


def test_an_untrusted_certificate_is_refused_even_where_all_addresses_are_allowed(secure, names):
    site, _ = secure
    names["photos.test"] = [["127.0.0.1"]]
    assert reason(site.address("/a", "photos.test"), HERE) == "its certificate is not valid"
    assert site.requests == []


def test_a_server_that_speaks_no_tls(site):
    access = WebAccess(allow_private_addresses=True, tries=1)
    assert reason(site.address("/a").replace("http:", "https:"), access) == "no secure connection"


def test_the_addresses_of_the_tests_are_what_they_are_called():
    assert ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton("0x7f.1"))).is_loopback
