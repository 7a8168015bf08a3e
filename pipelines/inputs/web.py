"""Files behind ``http://`` and ``https://`` addresses: redirects are followed by hand, and what may pass is tried again.

Every hop is checked, see `pipelines.inputs.connections`. Messages of errors say what is wrong with an address and nothing about the
machine or the run: they become rows of failures.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import urllib3
from urllib3.exceptions import DecodeError, HTTPError, InvalidHeader, SSLError
from urllib3.exceptions import TimeoutError as UrllibTimeoutError

from pipelines.inputs.connections import (
    LIMITS,
    PARALLEL_READS,
    PUBLIC_ACCESS,
    TIMED_OUT,
    FailedError,
    Limits,
    WebAccess,
    connections,
    proxy_of,
    too_large,
)
from schemas.errors import UsageError

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
    proxy = proxy_of(address)
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
    """Return the bytes of a file.

    Args:
        address: ``http://`` or ``https://``.
        access: what is allowed.

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


def versions_of(addresses: Iterable[str], access: WebAccess = PUBLIC_ACCESS) -> Iterator[str]:
    """Yield the `version_of` each of many addresses, in their order; `PARALLEL_READS` are asked at once."""
    rest = iter(addresses)
    ahead: deque[Future[str]] = deque()
    with ThreadPoolExecutor(PARALLEL_READS, thread_name_prefix="versions") as pool:
        while True:
            ahead.extend(pool.submit(version_of, one, access) for one in islice(rest, 2 * PARALLEL_READS - len(ahead)))
            if not ahead:
                return
            yield ahead.popleft().result()


def _insist(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make requests until one succeeds, none can succeed, or the tries or the time are used up."""
    limits = Limits(access, time.monotonic() + access.total_seconds)
    token = LIMITS.set(limits)
    try:
        for number in range(access.tries):
            try:
                return _follow(method, address, access, take)
            except FailedError as error:
                reason, pause = error.reason, max(error.pause, _FIRST_PAUSE * 2**number)
                if not error.may_pass or number + 1 == access.tries or time.monotonic() + pause >= limits.deadline:
                    break
            time.sleep(pause)
    finally:
        LIMITS.reset(token)
    raise FetchError(reason)


def _follow(method: str, address: str, access: WebAccess, take: Callable[[Any, WebAccess], _T]) -> _T:
    """Make one request, and follow redirects: each hop is looked up and checked like the first."""
    for _ in range(_MAX_REDIRECTS + 1):
        if not is_web_address(address):
            raise FailedError("redirected to something other than http and https")
        with _failures(), contextlib.closing(_request(method, address, access)) as response:
            target = response.get_redirect_location()
            if not target and response.status == 200:
                return take(response, access)
            _drain(response)
            if not target:
                raise _refusal(response)
            address = urljoin(address, target)
    raise FailedError(f"more than {_MAX_REDIRECTS} redirects")


def _request(method: str, address: str, access: WebAccess) -> Any:
    proxy = proxy_of(address)
    if proxy is not None and not access.allow_private_addresses:
        raise FailedError("cannot be checked behind a proxy")
    opened = connections(access, proxy)
    return opened.urlopen(method, address, headers=_headers(), redirect=False, retries=False, preload_content=False)


def _refusal(response: Any) -> FailedError:
    status, pause = response.status, None
    with contextlib.suppress(InvalidHeader):
        pause = urllib3.Retry().get_retry_after(response)
    # 501: the server does not know the method, and will not learn it.
    may_pass = status == 429 or (500 <= status <= 599 and status != 501)
    return FailedError(f"HTTP {status}", may_pass=may_pass, pause=pause or 0.0)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turn the errors of urllib3 into ours."""
    try:
        yield
    except SSLError as error:
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in error.args):
            raise FailedError("its certificate is not valid") from error
        raise FailedError("no secure connection", may_pass=True) from error
    except (UrllibTimeoutError, TimeoutError) as error:
        raise FailedError(TIMED_OUT, may_pass=True) from error
    except (ValueError, http.client.InvalidURL) as error:  # urllib3 raises its own kinds of ValueError for addresses.
        raise FailedError("not a valid address") from error
    except DecodeError as error:
        raise FailedError("its content encoding is broken") from error
    except (HTTPError, OSError, http.client.HTTPException) as error:
        raise FailedError("connection broken", may_pass=True) from error


def _body(response: Any, access: WebAccess) -> bytes:
    if (_length(response) or 0) > access.max_bytes:
        raise too_large(access)
    chunks, size = [], 0
    for chunk in response.stream(_CHUNK):  # A server need not tell the length, or the truth about it.
        size += len(chunk)
        if size > access.max_bytes:
            raise too_large(access)
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
