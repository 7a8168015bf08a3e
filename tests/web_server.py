"""A real web server on this machine, whose answers a test writes."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class WebServer:
    """A server. A page is its body, or a function that answers a request through the handler.

    Attributes:
        pages: by path.
        requests: method, path and headers of every request, in the order of their arrival.
        connections: number of connections that were made.
        names: host names that clients asked for in their TLS handshakes.
    """

    pages: dict[str, bytes | Callable[[Handler], None]] = field(default_factory=dict)
    requests: list[tuple[str, str, Mapping[str, str]]] = field(default_factory=list)
    connections: int = 0
    names: list[str | None] = field(default_factory=list)
    port: int = 0
    scheme: str = "http"

    def address(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.requests]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    site: WebServer

    def setup(self) -> None:
        self.site.connections += 1
        super().setup()

    def do_GET(self) -> None:
        self.site.requests.append((self.command, self.path, dict(self.headers)))
        page = self.site.pages.get(self.path)
        if page is None:
            self.answer(404, b"nothing here")
        elif isinstance(page, bytes):
            self.answer(200, page)
        else:
            page(self)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | named).items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # Clients that hang up are what many of these tests are about.


@contextmanager
def serve(tls: ssl.SSLContext | None = None) -> Iterator[WebServer]:
    """Serve on a free port of the loopback interface while the block runs."""
    site = WebServer(scheme="https" if tls else "http")
    server = _Server(("127.0.0.1", 0), type("Bound", (Handler,), {"site": site}))
    if tls is not None:
        tls.sni_callback = lambda connection, name, context: site.names.append(name)
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    site.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
