"""Connections to web servers that keep to limits of time and size, and lead only to addresses that were checked.

Whoever wrote an address may not be allowed to reach what the machine that fetches it can reach. So each host is looked up once; if
any address of it is not a public one, nothing is sent, and the connection goes to the very address that was checked, so that a name
server cannot answer differently the second time. Name and certificate of the host stay those of the address.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import socket
import time
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3

from schemas.errors import UsageError

PARALLEL_READS = 32
"""Files that are fetched at once: they wait for servers, not for this machine."""

TIMED_OUT = "timed out"

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

    Raises:
        UsageError: a number is not positive.
    """

    allow_private_addresses: bool = False
    max_bytes: int = 100 << 20
    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    total_seconds: float = 300.0
    tries: int = 4

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            if not getattr(self, field.name) > 0:
                raise UsageError(f"{field.name} is {getattr(self, field.name)!r}, expected a number greater than 0")


PUBLIC_ACCESS = WebAccess()


class FailedError(Exception):
    """One request failed. Not an OSError, which urllib3 would take for one of its own.

    Args:
        reason: what is wrong, in words that do not depend on the run.
        may_pass: whether another try may succeed.
        pause: seconds that the server asks to wait before.
    """

    def __init__(self, reason: str, *, may_pass: bool = False, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.may_pass = may_pass
        self.pause = pause


def too_large(access: WebAccess) -> FailedError:
    """Return the error for a file that is larger than allowed."""
    return FailedError(f"larger than {access.max_bytes:,} bytes")


class Limits(NamedTuple):
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
            raise TimeoutError(TIMED_OUT)
        return min(seconds, left)


LIMITS: ContextVar[Limits] = ContextVar("LIMITS")
"""The limits of the present fetch: urllib3 makes and keeps the connections, and whoever uses one is in the context of a fetch."""


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


def proxy_of(address: str) -> str | None:
    """Return the proxy that the environment names for an address; None for a direct connection."""
    proxies = getproxies()
    if not proxies:
        return None
    try:
        parts = urlsplit(address)
        proxy = proxies.get(parts.scheme) or proxies.get("all")
        if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
            return None
    except ValueError:
        return None  # Not an address; whoever fetches it says so.
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
    manager.pool_classes_by_scheme = {"http": _HTTPPool, "https": _HTTPSPool}
    return manager


class _BoundedStream(io.RawIOBase):
    """The bytes of a connection; each read keeps to the limits of the fetch that it belongs to."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket) -> None:
        self._raw = raw
        self._connection = connection
        self._limits = LIMITS.get()
        # Headers and the framing of chunks come on top of the file. This bounds what no header announces.
        self._left = 2 * self._limits.access.max_bytes + (1 << 20)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._connection.settimeout(self._limits.timeout(self._limits.access.read_seconds))
        count = self._raw.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise too_large(self._limits.access)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose headers and body are read within limits."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp: Any = io.BufferedReader(_BoundedStream(self.fp.detach(), sock))


class _HTTPConnection(urllib3.connection.HTTPConnection):
    response_class = _Response

    def _new_conn(self) -> socket.socket:
        return _connect(self._dns_host, self.port or self.default_port)


class _HTTPSConnection(urllib3.connection.HTTPSConnection):
    response_class = _Response

    def _new_conn(self) -> socket.socket:
        return _connect(self._dns_host, self.port or self.default_port)


class _HTTPPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HTTPConnection


class _HTTPSPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HTTPSConnection


def _connect(host: str, port: int) -> socket.socket:
    """Look a host up, check all of its addresses, and connect to one of those that were checked."""
    limits = LIMITS.get()
    try:
        # However a host is written (127.1, 0x7f000001, 2130706433), what is checked is what it stands for.
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise FailedError("its host is unknown", may_pass=error.errno == socket.EAI_AGAIN) from error
    if not limits.access.allow_private_addresses and not all(is_public(str(place[0])) for *_, place in found):
        raise FailedError("its host has an address that is not public")
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
            reason = TIMED_OUT if isinstance(error, TimeoutError) else "cannot connect"
    raise FailedError(reason, may_pass=True)
