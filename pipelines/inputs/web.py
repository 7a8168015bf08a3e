"""HTTP and HTTPS downloads with limits and protection against SSRF.

The host of each hop is resolved once. If any of its addresses is not public, nothing is sent. The connection goes to a checked
address, so that a second DNS answer cannot redirect it; Host header and certificate are those of the URL. Messages of errors become
failure rows of datasets, so they do not depend on the machine or the run.
"""

import contextlib
import errno
import http.client
import io
import ipaddress
import re
import socket
import ssl
import string
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import DecodeError, HTTPError, InvalidHeader, SSLError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from schemas.errors import UsageError
from schemas.storage.locations import is_web_address

PARALLEL_READS = 32
"""Simultaneous downloads: they wait for servers, not for this machine."""

_TIMED_OUT = "timed out"

_HOSTS = 32  # Connection pools.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_MAX_REDIRECTS = 10
_FIRST_PAUSE = 0.5  # Seconds; doubles each time.
_CHUNK = 1 << 16
_DRAINED = 1 << 16  # Maximum size of an unneeded body that is read, so that its connection can be reused.
_T = TypeVar("_T")


@dataclass(frozen=True)
class WebAccess:
    """Limits of a download.

    Attributes:
        allow_private_addresses: download from private, loopback, link-local and other addresses that are not
            public, and through the proxies that the environment names, without any check.
        total_seconds: timeout of a download, with redirects, pauses and retries.
        max_attempts: number of attempts if the server is busy (429 or 5xx) or the connection fails.
        user_agent: the header User-Agent; empty for ``imagepivot/VERSION``.

    Raises:
        UsageError: the User-Agent has a character that headers cannot have.
    """

    allow_private_addresses: bool = False
    max_bytes: int = 100 << 20
    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    total_seconds: float = 300.0
    max_attempts: int = 4
    user_agent: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\x20-\x7e\xa0-\xff]*", self.user_agent):
            raise UsageError(
                f"--user-agent is {self.user_agent!r}, expected characters of Latin-1 without control "
                "characters, e.g. 'my-project/1.0 (mailto:me@example.org)'"
            )


PUBLIC_ACCESS = WebAccess()


@dataclass(eq=False)
class _RequestError(Exception):
    """A failed request. Not an OSError, which urllib3 would convert.

    Attributes:
        retryable: whether another attempt may succeed.
        pause: seconds before it.
    """

    reason: str
    retryable: bool = False
    pause: float = 0.0


def _too_large(access: WebAccess) -> _RequestError:
    return _RequestError(f"larger than {access.max_bytes:,} bytes")


class _Limits(NamedTuple):
    """Limits and deadline of one download."""

    access: WebAccess
    deadline: float

    def timeout(self, seconds: float) -> float:
        """Return the timeout of one step, cut at the deadline.

        Raises:
            TimeoutError: the deadline has passed.
        """
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(_TIMED_OUT)
        return min(seconds, remaining)


_LIMITS: ContextVar[_Limits] = ContextVar("_LIMITS")
"""Limits of the current download, for the pooled connections of urllib3."""


def is_public(address: str) -> bool:
    """Return whether an IP address, or the IPv4 address in an IPv6 one, is public.

    >>> is_public("93.184.215.14"), is_public("::ffff:10.0.0.1")
    (True, False)
    """
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
        if ip.is_site_local:
            return False
    special = ip.is_private or ip.is_loopback or ip.is_link_local or ip.is_multicast or ip.is_reserved or ip.is_unspecified
    return ip.is_global and not special


def _proxy_of(address: str) -> str | None:
    """Return the proxy of the environment for an address; None without one."""
    proxies = getproxies()
    try:
        parts = urlsplit(address)
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
    except ValueError:
        return None  # Invalid: the download fails with that reason.
    return proxy if "://" in proxy else f"http://{proxy}"


@lru_cache(maxsize=8)
def connections(access: WebAccess, proxy: str | None) -> urllib3.PoolManager:
    """Return the connection pools of this process."""
    options: dict[str, Any] = {
        "num_pools": _HOSTS,
        "maxsize": PARALLEL_READS,
        "timeout": urllib3.Timeout(connect=access.connect_seconds, read=access.read_seconds),
        "headers": {
            "User-Agent": access.user_agent or f"imagepivot/{version('imagepivot')}",
            "Accept": "*/*",
            "Accept-Encoding": "identity",
        },
    }
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        parts = urlsplit(proxy)
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        manager = urllib3.ProxyManager(proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=login), **options)
    manager.pool_classes_by_scheme = {
        "http": _checked_pool(urllib3.HTTPConnectionPool, urllib3.connection.HTTPConnection),
        "https": _checked_pool(urllib3.HTTPSConnectionPool, urllib3.connection.HTTPSConnection),
    }
    return manager


class _BoundedStream(io.RawIOBase):
    """Stream of a connection within the limits of the download."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        self._raw = raw
        self._connection = connection
        self._limits = _LIMITS.get()
        # With headers and chunk framing; a server need not announce a length.
        self._remaining_bytes = 2 * self._limits.access.max_bytes + (1 << 20)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(self._limits.timeout(self._limits.access.read_seconds))
        count = self._raw.readinto(buffer)
        self._remaining_bytes -= count or 0
        if self._remaining_bytes < 0:
            raise _too_large(self._limits.access)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """HTTP response with bounded headers and body."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_BoundedStream(self.fp.detach(), sock))


def _checked_pool(pool: Any, connection: Any) -> Any:
    """Return a pool class with checked connections and bounded responses."""

    class Connection(connection):
        response_class = _Response

        def _new_conn(self) -> socket.socket:
            return _connect_checked(self._dns_host, self.port or self.default_port)

    return type("Pool", (pool,), {"ConnectionCls": Connection})


def _connect_checked(host: str, port: int) -> socket.socket:
    """Resolve a host, check all of its addresses, and connect to one of them."""
    limits = _LIMITS.get()
    try:
        # Resolved forms are checked: 127.1, 0x7f000001 and 2130706433 are all 127.0.0.1.
        resolved = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _RequestError("its host is unknown", retryable=error.errno == socket.EAI_AGAIN) from error
    if not limits.access.allow_private_addresses and not all(is_public(str(place[0])) for *_, place in resolved):
        raise _RequestError("its host has an address that is not public")
    reason = "cannot connect"
    for family, kind, protocol, _, place in resolved:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(limits.timeout(limits.access.connect_seconds))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            reason = _TIMED_OUT if isinstance(error, TimeoutError) else "cannot connect"
    raise _RequestError(reason, retryable=True)


class FetchError(OSError):
    """A failed download; ``strerror`` is the reason, independent of the run."""


def check_proxy(address: str, access: WebAccess) -> None:
    """Check that an address is reached directly, not through a proxy.

    Raises:
        UsageError: the environment names a proxy for it, and private addresses are not allowed or it is not an HTTP proxy.
    """
    proxy = _proxy_of(address)
    if proxy is None:
        return
    place = f"cannot fetch {address!r}: the environment names a proxy for it ({urlsplit(address).scheme}_proxy or all_proxy)"
    if not access.allow_private_addresses:
        raise UsageError(
            f"{place}, and its connections cannot be checked. Give --allow-private-addresses to fetch "
            "through it unchecked, or name the host in no_proxy to connect directly"
        )
    if not is_web_address(proxy):
        raise UsageError(
            f"{place} that is not an http or https proxy: give an http or https proxy, or name the host in no_proxy"
        )


def fetch(address: str, access: WebAccess = PUBLIC_ACCESS) -> bytes:
    """Return the bytes of the file at an ``http://`` or ``https://`` address.

    Raises:
        FetchError: it is missing, refused, too large or too slow, or the server cannot be reached.
    """
    return _request_with_retries("GET", address, access, _read_body)


def web_version(address: str, access: WebAccess = PUBLIC_ACCESS) -> str:
    """Return the version of a file by a HEAD request.

    Returns:
        ETag, or else Last-Modified, and Content-Length, joined by a space; empty without these headers, or if the request fails.
    """
    with contextlib.suppress(FetchError):
        return _request_with_retries("HEAD", address, access, _version_of_response)
    return ""


def _request_with_retries(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make requests until one succeeds or fails for good, within the limits."""
    limits = _Limits(access, time.monotonic() + access.total_seconds)
    token = _LIMITS.set(limits)
    try:
        for attempt in range(access.max_attempts):
            try:
                return _follow(method, address, access, take)
            except _RequestError as error:
                reason, pause = error.reason, max(error.pause, _FIRST_PAUSE * 2**attempt)
                is_last = attempt + 1 == access.max_attempts or time.monotonic() + pause >= limits.deadline
                if is_last or not error.retryable:
                    break
            time.sleep(pause)
    finally:
        _LIMITS.reset(token)
    raise FetchError(errno.EIO, reason)


def _follow(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make one request and follow redirects; each hop is checked like the first."""
    for _ in range(_MAX_REDIRECTS + 1):
        if not is_web_address(address):
            raise _RequestError("redirected to something other than http and https")
        proxy = _proxy_of(address)
        if proxy is not None and not access.allow_private_addresses:
            raise _RequestError("cannot be checked behind a proxy")
        options: dict[str, Any] = {"redirect": False, "retries": False, "preload_content": False}
        with (
            _failures(),
            contextlib.closing(connections(access, proxy).urlopen(method, address, **options)) as response,
        ):
            target = response.get_redirect_location()
            if not target and response.status == 200:
                return take(response, access)
            _drain(response)
            if not target:
                pause = None
                with contextlib.suppress(InvalidHeader):
                    pause = urllib3.Retry().get_retry_after(response)
                # 501: the server does not implement the method.
                retryable = response.status == 429 or (500 <= response.status <= 599 and response.status != 501)
                raise _RequestError(f"HTTP {response.status}", retryable=retryable, pause=pause or 0.0)
            address = urljoin(address, _decode_target(target))
    raise _RequestError(f"more than {_MAX_REDIRECTS} redirects")


def _decode_target(target: str) -> str:
    """Return the target of a redirect, which http.client has decoded as Latin-1."""
    data = target.encode("latin-1")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return quote(data, safe=string.punctuation + " ")  # As curl asks for it.


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Convert the errors of urllib3."""
    try:
        yield
    except SSLError as error:
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args):
            raise _RequestError("its certificate is not valid") from error
        raise _RequestError("no secure connection", retryable=True) from error
    except (UrllibTimeoutError, TimeoutError) as error:
        raise _RequestError(_TIMED_OUT, retryable=True) from error
    except (ValueError, http.client.InvalidURL) as error:  # urllib3 raises its own kinds of ValueError for addresses.
        raise _RequestError("not a valid address") from error
    except DecodeError as error:
        raise _RequestError("its content encoding is broken") from error
    except (HTTPError, OSError, http.client.HTTPException) as error:
        raise _RequestError("connection broken", retryable=True) from error


def _read_body(response: Any, access: WebAccess) -> bytes:
    if (response.length_remaining or 0) > access.max_bytes:
        raise _too_large(access)
    chunks, size = [], 0
    for chunk in response.stream(_CHUNK):  # Content-Length may be missing or wrong.
        size += len(chunk)
        if size > access.max_bytes:
            raise _too_large(access)
        chunks.append(chunk)
    return b"".join(chunks)


def _version_of_response(response: Any, access: WebAccess) -> str:
    _drain(response)
    headers = response.headers
    return " ".join(filter(None, (headers.get("ETag") or headers.get("Last-Modified"), headers.get("Content-Length"))))


def _drain(response: Any) -> None:
    length = response.length_remaining
    if length is not None and length <= _DRAINED:
        response.drain_conn()
