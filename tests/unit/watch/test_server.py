"""The server of the page answers only GET requests for known paths under its own name."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import WatchError
from shardwise.watch.run import Run
from shardwise.watch.server import WatchServer
from tests.support.runs import add_rows, make_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WatchServer]:
    server = WatchServer(Run(make_run(tmp_path / "run", 5, model="<script>alert(1)</script>")))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    yield server
    server.close()
    thread.join(5)


def request(
    server: WatchServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.port}")
    connection.endheaders()
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response, body


def test_the_page_is_complete_and_its_policy_strict(server: WatchServer) -> None:
    page, body = request(server, "/")
    assert page.status == 200
    assert b"alert(1)" not in body
    assert page.getheader("Content-Security-Policy", "").startswith("default-src 'none'")
    assert page.getheader("X-Content-Type-Options") == "nosniff"
    for path in ("/watch.css", "/watch.js", "/chart.js", "/format.js"):
        assert request(server, path)[0].status == 200


def test_data_is_sent_incrementally(server: WatchServer) -> None:
    first = json.loads(request(server, "/data")[1])
    assert first["history"]["step"] == [1, 2, 3, 4, 5]
    add_rows(server.run.folder, range(6, 8))
    server._read_at = 0.0
    query = f"/data?generation={first['generation']}&width=1&from=4"
    assert json.loads(request(server, query)[1])["history"]["step"] == [5, 6, 7]
    assert json.loads(request(server, "/data?from=-1&width=x&generation=%C3%A9")[1])["step"] == 7


@pytest.mark.parametrize(
    "path", ["/../run.json", "/..%2f..%2fetc/passwd", "/run.json", "//etc/passwd", "/watch.html"]
)
def test_no_request_becomes_a_path(server: WatchServer, path: str) -> None:
    assert request(server, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "BREW"])
def test_other_methods_are_refused(server: WatchServer, method: str) -> None:
    answer, _ = request(server, "/", method)
    assert (answer.status, answer.getheader("Allow")) == (405, "GET")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1:1",
        "",
        "127.0.0.1:{port}@x",
        "10.0.0.1:{port}",
    ],
)
def test_other_host_names_are_refused(server: WatchServer, host: str) -> None:
    assert request(server, "/data", host=host.format(port=server.port))[0].status == 403
    assert request(server, "/data", host=f"localhost:{server.port}")[0].status == 200


def test_a_run_that_becomes_corrupt_is_reported(server: WatchServer) -> None:
    (server.run.folder / "run.json").write_text("{")
    server._read_at = 0.0
    assert "run.json:1" in json.loads(request(server, "/data")[1])["error"]


def test_a_port_in_use_is_reported(server: WatchServer) -> None:
    with pytest.raises(WatchError, match=f"port {server.port}"):
        WatchServer(server.run, port=server.port)
