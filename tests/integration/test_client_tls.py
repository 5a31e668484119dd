"""Over TCP with TLS: verified against the given authority, and nothing is sent where it cannot be."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

import sublet
from sublet import aio
from sublet.wire.version import WIRE_VERSION


class Office(NamedTuple):
    url: str
    ca: str
    seen: list[str]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    """Something that says hello over TLS, below a path, as a proxy would serve it."""
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    request = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    command = [*request.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers['authorization']}")
            hello = {"wire": WIRE_VERSION, "wire_oldest": WIRE_VERSION, "version": "1", "pid": 1}
            body = json.dumps(hello).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            return

    class Server(HTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            return  # a client that does not trust us hangs up

    server = Server(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Office(f"https://localhost:{server.server_port}/lab", str(cert), seen)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.needs("openssl")
def test_a_trusted_office_is_greeted_with_the_token(office: Office) -> None:
    with sublet.connect(office.url, token="sublet_x", ca=office.ca):
        pass

    async def main() -> None:
        async with await aio.connect(office.url, token="sublet_x", ca=office.ca):
            pass

    asyncio.run(main())
    assert office.seen == ["/lab/v1/hello Bearer sublet_x"] * 2


@pytest.mark.needs("openssl")
def test_an_office_that_is_not_trusted_hears_nothing(office: Office) -> None:
    """The certificate is refused before the token is sent."""
    with pytest.raises(sublet.Disconnected, match=r"(?i)certificate") as caught:
        sublet.connect(office.url, token="sublet_x")
    assert not caught.value.sent
    with pytest.raises(sublet.Disconnected, match=r"(?i)certificate|verify"):
        asyncio.run(aio.connect(office.url, token="sublet_x"))
    assert office.seen == []
