"""A proxy on loopback between a client and a server of http, which breaks chosen requests."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Broken = Literal["refused", "expired", "conflict", "cut before", "cut after", "silent after"]
"""503, 403, 409 of S3; the connection ends before the request is passed on, or after it, without the answer; no answer
comes."""

_REFUSED = {
    "refused": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
    "conflict": (409, "ConditionalRequestConflict"),
}


class Proxy:
    """The proxy. `fault` gets the number of each request, counted from 0, its method and its path with the query."""

    def __init__(self, port: int) -> None:
        self.fault: Callable[[int, str, str], Broken | None] = lambda number, method, path: None
        self.port = port
        self.requests: list[str] = []
        self.bodies: list[bytes] = []
        self.answered_bytes = 0
        self.not_passed_on: set[str] = set()
        """Names of headers, in lower case."""
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            target_port = port
            the_proxy = proxy

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that left

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    target_port: int
    the_proxy: Proxy

    def log_message(self, format: str, *values: object) -> None:
        pass

    def _pass_on(self) -> None:
        proxy = self.the_proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with proxy.lock:
            number = len(proxy.requests)
            proxy.requests.append(f"{self.command} {self.path}")
            proxy.bodies.append(body if len(body) < 4096 else b"")
        fault = proxy.fault(number, self.command, self.path)
        if fault in _REFUSED:
            status, code = _REFUSED[fault]
            self._answer(status, [], f"<Error><Code>{code}</Code><Message>less</Message></Error>".encode())
            return
        if fault != "cut before":
            server = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=60)
            try:
                left_out = {"connection", *proxy.not_passed_on}
                headers = {key: value for key, value in self.headers.items() if key.lower() not in left_out}
                server.request(self.command, self.path, body, headers)
                answer = server.getresponse()
                data, fields = answer.read(), answer.getheaders()
            finally:
                server.close()
        if fault == "silent after":
            proxy.stopped.wait()
        if fault is not None:
            self.close_connection = True
            return
        self._answer(answer.status, fields, data)

    def _answer(self, status: int, fields: list[tuple[str, str]], data: bytes) -> None:
        self.send_response_only(status)
        for key, value in fields:
            if key.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(key, value)
        length = next((value for key, value in fields if key.lower() == "content-length"), str(len(data)))
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.the_proxy.answered_bytes += len(data)
            self.wfile.write(data)


for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
    setattr(_Handler, f"do_{method}", _Handler._pass_on)


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Run a proxy until the block ends."""
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.stop()
