"""A web server on this machine, with no proxy before it."""

from collections.abc import Iterator

import pytest

from pipelines.inputs import web
from tests.web_server import WebServer, serve


@pytest.fixture
def no_proxies(monkeypatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    web.connections.cache_clear()


@pytest.fixture
def site(no_proxies) -> Iterator[WebServer]:
    with serve() as site:
        site.pages["/a"] = b"a"
        yield site
