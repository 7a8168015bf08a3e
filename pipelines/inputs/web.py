"""Files at ``http://`` and ``https://`` addresses, over connections that keep to limits of time and size.

The author of an address may not be allowed to reach what this machine can reach. So the host of each hop is looked up once. If any
address of it is not a public one, nothing is sent, and the connection goes to the very address that was checked, so that a name
server cannot answer differently the second time. Name and certificate of the host stay those of the address. Messages of errors say
what is wrong with an address and nothing about the machine or the run: they become rows of failures.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import DecodeError, HTTPError, InvalidHeader, SSLError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from schemas.errors import UsageError

PARALLEL_READS = 32
"""Files that are fetched at once: they wait for servers, not for this machine."""

_TIMED_OUT = "timed out"

_HOSTS = 32  # Hosts whose connections are kept.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class WebAccess:
    """What may be fetched, and how long it may take.

    Attributes:
        allow_private_addresses: fetch from private, loopback, link-local and other addresses that are not public, and through the
            proxies that the environment names; nothing is checked then.
        max_bytes: greatest size of a file.
        connect_seconds: time for one connection.
        read_seconds: time that a server may be silent.
        total_seconds: time for everything: redirects, pauses and further tries included.
        tries: how often a file is asked for when the server is busy (429 or 5xx) or the connection fails.
    """

    allow_private_addresses: bool = False
    max_bytes: int = 100 << 20
    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    total_seconds: float = 300.0
    tries: int = 4


PUBLIC_ACCESS = WebAccess()


class _FailedError(Exception):
    """One request failed; another may succeed, after a pause in seconds. Not an OSError, which urllib3 would take for its own."""

    def __init__(self, reason: str, *, may_pass: bool = False, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_pass = may_pass
        self.pause = pause


def _too_large(access: WebAccess) -> _FailedError:
    """Return the error for a file that is larger than allowed."""
    return _FailedError(f"larger than {access.max_bytes:,} bytes")


class _Limits(NamedTuple):
    """What the connections and responses of one fetch must keep to."""

    access: WebAccess
    deadline: float

    def timeout(self, seconds: float) -> float:
        """Return the seconds that one step may take.

        Raises:
            TimeoutError: no time is left.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(_TIMED_OUT)
        return min(seconds, left)


_LIMITS: ContextVar[_Limits] = ContextVar("_LIMITS")
"""The limits of the present fetch: urllib3 makes and keeps the connections, and each is used in the context of a fetch."""


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet; of an IPv6 address that holds an IPv4 address, whether that is.

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
    """Return the proxy that the environment names for an address; None for a direct connection."""
    proxies = getproxies()
    try:
        parts = urlsplit(address)
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
    except ValueError:
        return None  # Not an address, as fetching it will say.
    return proxy if "://" in proxy else f"http://{proxy}"


@lru_cache(maxsize=8)
def connections(access: WebAccess, proxy: str | None) -> urllib3.PoolManager:
    """Return the connections of this process, which are kept for the next file of the same host."""
    options: dict[str, Any] = {
        "num_pools": _HOSTS,
        "maxsize": PARALLEL_READS,
        "timeout": urllib3.Timeout(connect=access.connect_seconds, read=access.read_seconds),
    }
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        parts = urlsplit(proxy)
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else None
        manager = urllib3.ProxyManager(proxy, proxy_headers=urllib3.make_headers(proxy_basic_auth=login), **options)
    manager.pool_classes_by_scheme = {
        "http": _checked(urllib3.HTTPConnectionPool, urllib3.connection.HTTPConnection),
        "https": _checked(urllib3.HTTPSConnectionPool, urllib3.connection.HTTPSConnection),
    }
    return manager


class _BoundedStream(io.RawIOBase):
    """The bytes of a connection; each read keeps to the limits of the fetch that it belongs to."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        self._raw = raw
        self._connection = connection
        self._limits = _LIMITS.get()
        # Headers and the framing of chunks come on top of the file. This bounds what no header announces.
        self._left = 2 * self._limits.access.max_bytes + (1 << 20)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(self._limits.timeout(self._limits.access.read_seconds))
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise _too_large(self._limits.access)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose headers and body are read within limits."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_BoundedStream(self.fp.detach(), sock))


def _checked(pool: Any, connection: Any) -> Any:
    """Return a class of pools whose connections are checked, and whose responses are read within limits."""

    class Connection(connection):
        response_class = _Response

        def _new_conn(self) -> socket.socket:
            return _connect(self._dns_host, self.port or self.default_port)

    return type("Pool", (pool,), {"ConnectionCls": Connection})


def _connect(host: str, port: int) -> socket.socket:
    """Look a host up, check all of its addresses, and connect to one of those that were checked."""
    limits = _LIMITS.get()
    try:
        # However a host is written (127.1, 0x7f000001, 2130706433), what is checked is what it stands for.
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise _FailedError("its host is unknown", may_pass=error.errno == socket.EAI_AGAIN) from error
    if not limits.access.allow_private_addresses and not all(is_public(str(place[0])) for *_, place in found):
        raise _FailedError("its host has an address that is not public")
    reason = "cannot connect"
    for family, kind, protocol, _, place in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(limits.timeout(limits.access.connect_seconds))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.connect(place)
            return connection
        except OSError as error:
            connection.close()
            reason = _TIMED_OUT if isinstance(error, TimeoutError) else "cannot connect"
    raise _FailedError(reason, may_pass=True)


_MAX_REDIRECTS = 10
_FIRST_PAUSE = 0.5  # Seconds; each further pause is twice as long.
_CHUNK = 1 << 16
_DRAINED = 1 << 16  # Up to this size the body of an answer without a file is read, so that its connection can be used again.

_T = TypeVar("_T")


class FetchError(OSError):
    """A file could not be fetched; ``strerror`` says why, in words that do not depend on the run."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, reason)


def is_web_address(location: str) -> bool:
    """Return whether a location is an ``http://`` or ``https://`` address."""
    return location[:8].lower().startswith(("http://", "https://"))


def check_proxy(address: str, access: WebAccess) -> None:
    """Check that an address is reached directly: what a proxy connects to cannot be checked from here.

    Raises:
        UsageError: the environment names a proxy for it, and either not everything is allowed, or it is not an HTTP proxy.
    """
    proxy = _proxy_of(address)
    if proxy is None:
        return
    place = f"cannot fetch {address!r}: the environment names a proxy for it ({urlsplit(address).scheme}_proxy or all_proxy)"
    if not access.allow_private_addresses:
        raise UsageError(
            f"{place}, and what a proxy connects to cannot be checked. Give --allow-private-addresses to fetch through it "
            "unchecked, or name the host in no_proxy to connect directly"
        )
    if not is_web_address(proxy):
        raise UsageError(f"{place} that is not an http or https proxy: give such a one, or name the host in no_proxy")


def fetch(address: str, access: WebAccess = PUBLIC_ACCESS) -> bytes:
    """Return the bytes of the file at an ``http://`` or ``https://`` address.

    Raises:
        FetchError: it is missing, refused, too large or too slow, or the server cannot be reached.
    """
    return _insist("GET", address, access, _body)


def version_of(address: str, access: WebAccess = PUBLIC_ACCESS) -> str:
    """Ask with HEAD which version of a file a server has.

    Returns:
        The ETag, or else the time of the last change, and behind it the number of bytes, as far as the server tells; empty if it
        tells none of these, or cannot be asked.
    """
    with contextlib.suppress(FetchError):
        return _insist("HEAD", address, access, _version)
    return ""


def _insist(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make requests until one succeeds, none can succeed, or the tries or the time are used up."""
    limits = _Limits(access, time.monotonic() + access.total_seconds)
    token = _LIMITS.set(limits)
    try:
        for number in range(access.tries):
            try:
                return _follow(method, address, access, take)
            except _FailedError as error:
                reason, pause = error.reason, max(error.pause, _FIRST_PAUSE * 2**number)
                if not error.may_pass or number + 1 == access.tries or time.monotonic() + pause >= limits.deadline:
                    break
            time.sleep(pause)
    finally:
        _LIMITS.reset(token)
    raise FetchError(reason)


def _follow(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make one request, and follow redirects: each hop is looked up and checked like the first."""
    for _ in range(_MAX_REDIRECTS + 1):
        if not is_web_address(address):
            raise _FailedError("redirected to something other than http and https")
        with _failures(), contextlib.closing(_request(method, address, access)) as response:
            target = response.get_redirect_location()
            if not target and response.status == 200:
                return take(response, access)
            _drain(response)
            if not target:
                raise _refusal(response)
            address = urljoin(address, target)
    raise _FailedError(f"more than {_MAX_REDIRECTS} redirects")


def _request(method: str, address: str, access: WebAccess) -> Any:
    proxy = _proxy_of(address)
    if proxy is not None and not access.allow_private_addresses:
        raise _FailedError("cannot be checked behind a proxy")
    opened = connections(access, proxy)
    return opened.urlopen(method, address, headers=_headers(), redirect=False, retries=False, preload_content=False)


def _refusal(response: Any) -> _FailedError:
    status, pause = response.status, None
    with contextlib.suppress(InvalidHeader):
        pause = urllib3.Retry().get_retry_after(response)
    # 501: the server does not know the method, and will not learn it.
    may_pass = status == 429 or (500 <= status <= 599 and status != 501)
    return _FailedError(f"HTTP {status}", may_pass=may_pass, pause=pause or 0.0)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn the errors of urllib3 into ours."""
    try:
        yield
    except SSLError as error:
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args):
            raise _FailedError("its certificate is not valid") from error
        raise _FailedError("no secure connection", may_pass=True) from error
    except (UrllibTimeoutError, TimeoutError) as error:
        raise _FailedError(_TIMED_OUT, may_pass=True) from error
    except (ValueError, http.client.InvalidURL) as error:  # urllib3 raises its own kinds of ValueError for addresses.
        raise _FailedError("not a valid address") from error
    except DecodeError as error:
        raise _FailedError("its content encoding is broken") from error
    except (HTTPError, OSError, http.client.HTTPException) as error:
        raise _FailedError("connection broken", may_pass=True) from error


def _body(response: Any, access: WebAccess) -> bytes:
    if (_length(response) or 0) > access.max_bytes:
        raise _too_large(access)
    chunks, size = [], 0
    for chunk in response.stream(_CHUNK):  # A server need not tell the length, or the truth about it.
        size += len(chunk)
        if size > access.max_bytes:
            raise _too_large(access)
        chunks.append(chunk)
    return b"".join(chunks)


def _version(response: Any, access: WebAccess) -> str:
    _drain(response)
    length = _length(response)
    mark = response.headers.get("ETag") or response.headers.get("Last-Modified")
    return " ".join(part for part in (mark, "" if length is None else str(length)) if part)


def _length(response: Any) -> int | None:
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


def _drain(response: Any) -> None:
    length = _length(response)
    if length is not None and (length <= _DRAINED or response.length_remaining == 0):
        response.drain_conn()


@lru_cache(maxsize=1)
def _headers() -> dict[str, str]:
    return {"User-Agent": f"imagepivot/{version('imagepivot')}", "Accept": "*/*", "Accept-Encoding": "identity"}
