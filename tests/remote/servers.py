"""Servers on loopback for the tests of remote stores: one of http with faults, and moto's for S3."""

from __future__ import annotations

import hashlib
import importlib
import logging
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK_BYTES = 64 << 10


@dataclass(slots=True)
class Fault:
    """What one answer does instead of its duty. None of the fields: nothing."""

    status: int = 0
    """Answer with this status and no object."""
    body: bytes = b""
    """Body of that answer."""
    location: str = ""
    """Location of that answer."""
    cut_bytes: int = 0
    """Close the connection when so many bytes of the body are left."""
    length: int = 0
    """Send so many bytes more (or less) than the range has, with a Content-Length that fits."""
    shift: int = 0
    """Say, and send, a range that begins so many bytes later."""
    unranged: bool = False
    """Ignore Range."""
    etag: str | None = None
    """Send another ETag; empty: none."""
    hang: bool = False
    """Send nothing until the server is stopped."""
    hang_after: int = -1
    """Send nothing more after so many bytes of the body."""
    reset: bool = False
    """Close the connection at once."""


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]


class RunningServer(ThreadingHTTPServer):
    """A server on a free port of loopback, with TLS if there are a certificate and a key; it runs until `stop`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, handler: type[BaseHTTPRequestHandler], certificate: tuple[str, str] | None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that left: what it does is for the tests to judge

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


@dataclass
class HttpServer:
    """A server of byte strings by path, with ETags, ranges and If-Match, as a store of objects has them.

    `fault` gets the number of each request, counted from 0, and the request.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    fault: Callable[[int, Request], Fault | None] = lambda number, request: None
    latency_seconds: float = 0.0
    bytes_per_second: float = 0.0
    honours_if_match: bool = True
    weak_etags: bool = False
    requests: list[Request] = field(default_factory=list)
    max_at_once: int = 0
    user: str = ""
    certificate: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.under_way = 0
        store = self

        class Handler(_Handler):
            server_store = store

        self.server = RunningServer(Handler, self.certificate)

    @property
    def url(self) -> str:
        return f"http{'s' * (self.certificate is not None)}://127.0.0.1:{self.server.server_port}"

    def put(self, path: str, data: bytes) -> None:
        self.objects[path] = data

    def stop(self) -> None:
        self.stopped.set()
        self.server.stop()

    def etag(self, data: bytes) -> str:
        tag = f'"{_md5(data)}"'
        return f"W/{tag}" if self.weak_etags else tag


@lru_cache(maxsize=16)
def _md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()  # once for an object, and not for each of its ranges


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_store: HttpServer

    def log_message(self, format: str, *values: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        store = self.server_store
        request = Request(self.command, self.path, {key.lower(): value for key, value in self.headers.items()})
        with store.lock:
            number = len(store.requests)
            store.requests.append(request)
        self._answer(store.fault(number, request) or Fault())

    def _answer(self, fault: Fault) -> None:
        store = self.server_store
        if fault.hang:
            store.stopped.wait()
        if fault.reset or fault.hang:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        with store.lock:
            store.under_way += 1
            store.max_at_once = max(store.max_at_once, store.under_way)
        time.sleep(store.latency_seconds)
        with store.lock:  # before the answer: whoever has it may send the next request
            store.under_way -= 1
        if fault.status:
            self._status(fault.status, fault.body, fault.location)
            return
        if store.user and self.headers.get("Authorization") != store.user:
            self._status(401)
            return
        data = store.objects.get(unquote(urlsplit(self.path).path))
        if data is None:
            self._status(404)
            return
        etag = store.etag(data) if fault.etag is None else fault.etag
        wanted = self.headers.get("If-Match")
        if wanted and store.honours_if_match and wanted != etag:
            self._status(412)
            return
        begin, end, status = 0, len(data), 200
        text = self.headers.get("Range")
        if text and not fault.unranged:
            first, _, last = text.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last or len(data)) + 1, len(data)), 206
            if begin >= len(data):
                self._status(416)
                return
        begin, end = begin + fault.shift, min(end + fault.shift, len(data))
        body = (data[begin:end] + b"\xee" * max(fault.length, 0))[: end - begin + fault.length]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "HEAD":
            return
        self._send(body[: len(body) - fault.cut_bytes] if fault.hang_after < 0 else body[: fault.hang_after])
        if fault.hang_after >= 0:
            store.stopped.wait()
        if fault.cut_bytes or fault.hang_after >= 0:
            self.close_connection = True

    def _status(self, status: int, body: bytes = b"", location: str = "") -> None:
        self.send_response(status)
        if location:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, body: bytes) -> None:
        rate, view = self.server_store.bytes_per_second, memoryview(body)
        if not rate:
            self.wfile.write(view)
            return
        began, sent = time.perf_counter(), 0
        while sent < len(view):
            self.wfile.write(view[sent : sent + CHUNK_BYTES])
            sent += CHUNK_BYTES
            ahead = sent / rate - (time.perf_counter() - began)
            if ahead > 0:
                time.sleep(ahead)


@contextmanager
def http_server(**settings: Any) -> Iterator[HttpServer]:
    """Run a server until the block ends."""
    server = HttpServer(**settings)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def s3_server() -> Iterator[tuple[Any, str]]:
    """Run moto's server for S3 until the block ends; give a client of boto3 and the endpoint."""
    boto3 = importlib.import_module("boto3")
    server = importlib.import_module("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        )
        client.create_bucket(Bucket="bucket")
        yield client, endpoint
    finally:
        server.stop()


def new_certificate(folder: Path) -> tuple[str, tuple[str, str]]:
    """Make an authority, and a certificate for 127.0.0.1 by it; return the authority's file, and certificate and key."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "2")
    openssl("req", *new_key, "-keyout", "leaf.key", "-out", "leaf.csr", "-subj", "/CN=leaf")
    (folder / "leaf.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "leaf.ext")
    openssl("x509", "-req", "-in", "leaf.csr", "-out", "leaf.pem", *signed)
    return str(folder / "ca.pem"), (str(folder / "leaf.pem"), str(folder / "leaf.key"))


@contextmanager
def azure_server(program: str, folder: Path) -> Iterator[str]:
    """Run azurite, which plays Azure's store, until the block ends; give its endpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(folder),
        "--silent",
        "--disableTelemetry",
    )
    running = subprocess.Popen([program, *options, "--skipApiVersionCheck"], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until or running.poll() is not None:
                    raise
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/devstoreaccount1"
    finally:
        running.terminate()
        running.wait()
