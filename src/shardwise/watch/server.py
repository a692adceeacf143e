"""Serve a run as a local page: three static files and one data endpoint.

The server listens on the loopback interface unless another address is given. It answers only GET
requests for known names; no part of a request becomes a path. The Host header must name this
server, so that no page of another site can read the data through a DNS name that resolves here.
"""

import ipaddress
import json
import platform
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from shardwise.errors import WatchError
from shardwise.listening import is_loopback
from shardwise.watch.run import Run

PAGES = {
    "/": ("watch.html", "text/html"),
    "/watch.css": ("watch.css", "text/css"),
    "/watch.js": ("watch.js", "text/javascript"),
    "/chart.js": ("chart.js", "text/javascript"),
    "/format.js": ("format.js", "text/javascript"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
FRESH_S = 0.5  # seconds between reads of a run's files
TIMEOUT_S = 10.0


class WatchServer:
    """Serve a run until closed."""

    def __init__(self, run: Run, host: str = "127.0.0.1", port: int = 0) -> None:
        self.run, self.host = run, host
        self._lock, self._read_at = threading.Lock(), 0.0
        self._pages = {
            path: (files("shardwise.watch").joinpath("page", name).read_bytes(), kind)
            for path, (name, kind) in PAGES.items()
        }
        self._server = _listen(self, host, port)
        self.port = int(self._server.server_address[1])

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def serve(self) -> None:
        """Answer requests until `close`."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving; may be called from another thread."""
        self._server.shutdown()
        self._server.server_close()

    def knows(self, host: str) -> bool:
        """Return whether a Host header names this server, not any DNS name that resolves here."""
        name, port = _split_host(host)
        if name is None or (80 if port is None else port) != self.port:
            return False
        if name in ("localhost", self.host.lower()) or is_loopback(name):
            return True
        if is_loopback(self.host):
            return False
        try:  # unlike a name, an address cannot be pointed here by others
            ipaddress.ip_address(name)
        except ValueError:
            return name == platform.node().lower()
        return True

    def page(self, path: str) -> tuple[bytes, str] | None:
        """Return a file of the page by its address."""
        return self._pages.get(path)

    def data(self, query: str) -> bytes:
        """Return the data that is new since the state in a query."""
        fields = parse_qs(query, max_num_fields=8)
        generation, width, first = (
            _parse_int(fields.get(name, [""])[0]) for name in ("generation", "width", "from")
        )
        with self._lock:
            if time.monotonic() - self._read_at >= FRESH_S:
                self.run.poll()
                self._read_at = time.monotonic()
            state = self.run.to_json(generation, width, first)
        return json.dumps(state, allow_nan=False).encode()


def _parse_int(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 12 else -1


def _split_host(host: str) -> tuple[str | None, int | None]:
    """Return the name and port of a Host header."""
    try:
        parts = urlsplit(f"//{host}")
        return (parts.hostname if parts.netloc == host else None), parts.port
    except ValueError:
        return None, None


def _listen(owner: WatchServer, host: str, port: int) -> ThreadingHTTPServer:
    class Handler(_Handler):
        watch = owner

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore browsers that disconnect."""

    try:
        return Server((host, port), Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WatchError(
            f"cannot serve at {host} port {port}: {reason}", hint="--port 0 picks a free port"
        ) from None


class _Handler(BaseHTTPRequestHandler):
    """Handle a connection."""

    watch: WatchServer
    timeout = TIMEOUT_S
    server_version, sys_version = "shardwise", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if not self.watch.knows(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, b"Host header not allowed\n", "text/plain")
            return
        address = urlsplit(self.path)
        if address.path == "/data":
            try:
                self._answer(HTTPStatus.OK, self.watch.data(address.query), "application/json")
            except WatchError as error:
                text = json.dumps({"error": str(error)}).encode()
                self._answer(HTTPStatus.OK, text, "application/json")
            except ValueError:
                self._answer(HTTPStatus.BAD_REQUEST, b"invalid query\n", "text/plain")
            return
        page = self.watch.page(address.path)
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain")
        else:
            self._answer(HTTPStatus.OK, *page)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request, or one with another method."""
        self.close_connection = True
        is_method = code == HTTPStatus.NOT_IMPLEMENTED
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_method else HTTPStatus(code)
        self._answer(
            status, b"only GET is supported\n" if is_method else b"invalid request\n", "text/plain"
        )

    def _answer(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""
