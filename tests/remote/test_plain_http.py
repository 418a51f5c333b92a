"""Ranges by plain http: what is answered wrongly, connections that are reused, links, proxies, cancels.

Faults of whole loads are in `test_source.py` and `test_loads.py`, which read by plain http too.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from servers import Fault, HttpServer, Request
from support import eventually

import stio
from stio.errors import StorageError
from stio.runtime import memory
from stio.runtime.log import RareWarnings
from stio.runtime.operation import Operation
from stio.storage.base import Identity
from stio.storage.remote import plain_http
from stio.storage.remote.plain_http import NotServedError, PlainHttp, PlainObject, plain_address
from stio.storage.remote.requests import Patience
from stio.storage.remote.source import RemoteRoot

DATA = random.Random(5).randbytes(400_000)
STATE = Identity(-1, 1, len(DATA), 0, etag='"a"')

PROXIES = [name for word in ("http_proxy", "all_proxy", "no_proxy") for name in (word, word.upper())]


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def answering(*answers: Callable[[socket.socket], object]) -> Iterator[int]:
    """Run a server whose n-th connection is handled by the n-th function; give the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()
        thread.join(10)
        assert not thread.is_alive()


def receive_head(connection: socket.socket) -> bytes:
    head = b""
    while b"\r\n\r\n" not in head:
        got = connection.recv(1 << 16)
        if not got:
            return b""
        head += got
    return head


def answer(begin: int, end: int, *, extra: str = "", **fields: str) -> bytes:
    """Return a whole answer; None of the fields: a right one."""
    shown = {
        "Content-Range": f"bytes {begin}-{end - 1}/{len(DATA)}",
        "Content-Length": str(end - begin),
        "ETag": STATE.etag,
    } | {key.replace("_", "-"): value for key, value in fields.items()}
    lines = "".join(f"{key}: {value}\r\n" for key, value in shown.items() if value)
    return f"HTTP/1.1 206 Partial Content\r\n{lines}{extra}\r\n".encode() + DATA[begin:end]


def read(server: PlainHttp, port: int, begin: int, *sizes: int) -> bytes:
    region = memory.allocate(sum(sizes))
    at, regions = 0, []
    for nbytes in sizes:
        regions.append(region.sub(at, nbytes))
        at += nbytes
    server.read(f"http://127.0.0.1:{port}/x?a=b", begin, regions, STATE)
    return region.tobytes()


def once(data: bytes) -> Callable[[socket.socket], object]:
    """Return a server's side of a connection: one request, one answer."""

    def serve(connection: socket.socket) -> None:
        receive_head(connection)
        connection.sendall(data)

    return serve


def new_server(port: int) -> PlainHttp:
    return PlainHttp(("127.0.0.1", port), stall_seconds=0.3)


def test_a_range_fills_regions_however_it_arrives() -> None:
    def serve(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = receive_head(connection)
        assert head.startswith(b"GET /x?a=b HTTP/1.1\r\n")
        assert b'\r\nif-match: "a"\r\n' in head
        data = answer(1000, 301_000)
        for at in (1, 50, 150, 250, 300, len(data)):  # the head in pieces, then its end with a part of the body
            connection.sendall(data[:at])
            data = data[at:]

    with answering(serve) as port:
        assert read(new_server(port), port, 1000, 10, 1, 299_989) == DATA[1000:301_000]


WRONG = {
    "another range": answer(5, 105),
    "another size": answer(0, 100, Content_Range=f"bytes 0-99/{len(DATA) + 1}"),
    "no range": answer(0, 100, Content_Range=""),
    "another length": answer(0, 100, Content_Length="99"),
    "two lengths": answer(0, 100, extra="content-length: 7\r\n"),
    "another state": answer(0, 100, ETag='"b"'),
    "no state": answer(0, 100, ETag=""),
    "chunks": answer(0, 100, extra="Transfer-Encoding: chunked\r\n"),
    "gzip": answer(0, 100, extra="Content-Encoding: gzip\r\n"),
    "everything": answer(0, 100).replace(b"206", b"200"),
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(0, 100),
    "parts of a range": answer(0, 100, Content_Range="", extra="Content-Type: multipart/byteranges; boundary=x\r\n"),
    "bare line ends": answer(0, 100).replace(b"\r\n", b"\n"),
    "another page": answer(0, 100).replace(b"206 Partial Content", b"302 Found"),
    "old version": answer(0, 100).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "not http": b"\xff" * 500 + b"\r\n\r\n",
    "an endless head": b"HTTP/1.1 206 x\r\n" + b"a: b\r\n" * 5000,
    "more": answer(0, 100) + b"more",
    "less": answer(0, 100)[:-1],
    "a part of a head": answer(0, 100)[:30],
    "nothing": b"",
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_refused(data: bytes) -> None:
    with answering(once(data)) as port, pytest.raises(NotServedError):
        read(new_server(port), port, 0, 100)


def test_silence_and_a_refused_connection_end() -> None:
    released = threading.Event()
    for data in (b"", answer(0, 100)[:-50]):
        released.clear()

        def serve(connection: socket.socket, data: bytes = data) -> None:
            receive_head(connection)
            connection.sendall(data)
            assert released.wait(10)

        with answering(serve) as port:
            with pytest.raises(NotServedError, match="no bytes for"):
                read(new_server(port), port, 0, 100)
            released.set()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(NotServedError, match="ECONNREFUSED"):
        read(new_server(port), port, 0, 100)


@pytest.mark.parametrize("first", ["refused", "no such family"])
def test_a_host_with_an_address_that_does_not_work(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `localhost` has two, and a server listens at one of them."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        family, address = socket.AF_INET, closed.getsockname()
    if first == "no such family":  # as AF_INET6 is where the kernel has none
        family, address = socket.AddressFamily(socket.AF_IPX), ("::1", 1, 0, 0)

    def serve(connection: socket.socket) -> None:
        receive_head(connection)
        connection.sendall(answer(0, 100, extra="Connection: close\r\n"))

    with answering(serve, serve, serve) as port:
        found = [
            (family, socket.SOCK_STREAM, 6, "", address),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        server = new_server(port)
        for _ in range(3):
            assert read(server, port, 0, 100) == DATA[:100]


def test_no_descriptor_is_left(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a failure of this range, as others are, and no error of the operating system."""
    server.put("/a.bin", DATA)
    source = RemoteRoot(server.url, patience=Patience(num_attempts=1)).open("a.bin")

    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(plain_http, "socket", SimpleNamespace(**vars(socket) | {"socket": refuse}))
        with pytest.raises(NotServedError, match="Too many open files"):
            read(new_server(1), 1, 0, 100)
        region = memory.allocate(100)
        source.read_into(300_000, [region])
    assert region.tobytes() == DATA[300_000:300_100]


def test_a_forked_process_does_not_use_the_connections_of_its_parent(server: HttpServer) -> None:
    server.put("/a.bin", DATA)
    source = RemoteRoot(server.url).open("a.bin")
    source.read_into(300_000, [memory.allocate(10)])  # its connection is idle now
    pid = os.fork()
    if not pid:
        code = 1
        try:
            source.check_unchanged()
        except StorageError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_proxy_of_the_settings_is_used(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore takes it among the settings of the store too."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server.put("/bucket/a.bin", DATA)
    config = {"endpoint": "http://127.0.0.1:1", "proxy_url": server.url, "region": "us-east-1"}
    source = RemoteRoot("s3://bucket", config=config, patience=Patience(num_attempts=1)).open("a.bin")
    monkeypatch.setattr(PlainHttp, "read", None)
    region = memory.allocate(10)
    source.read_into(300_000, [region])
    assert region.tobytes() == DATA[300_000:300_010]


def test_a_server_that_sends_a_byte_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the head, or of the body: it is never silent, and yet the request ends."""
    monkeypatch.setattr(plain_http, "_REQUEST_SECONDS", 0.5)
    for begin in (0, answer(0, 300).index(b"\r\n\r\n") + 4):
        ended = threading.Event()

        def serve(connection: socket.socket, begin: int = begin, ended: threading.Event = ended) -> None:
            receive_head(connection)
            data = answer(0, 300)
            connection.sendall(data[:begin])
            for k in range(begin, begin + 200):
                if ended.wait(0.02):
                    return
                connection.sendall(data[k : k + 1])

        with answering(serve) as port:
            began = time.monotonic()
            with pytest.raises(NotServedError, match="too slowly"):
                read(PlainHttp(("127.0.0.1", port), stall_seconds=0.2), port, 0, 300)
            assert time.monotonic() - began < 2
            ended.set()


def test_a_connection_is_reused_and_one_that_was_closed_meanwhile_replaced() -> None:
    closed = threading.Event()

    def twice(connection: socket.socket) -> None:
        for begin in (0, 100):
            receive_head(connection)
            connection.sendall(answer(begin, begin + 100))
        connection.close()
        closed.set()

    with answering(twice, once(answer(200, 300, extra="Connection: close\r\n")), once(answer(300, 400))) as port:
        server = new_server(port)
        assert [read(server, port, begin, 100) for begin in (0, 100)] == [DATA[:100], DATA[100:200]]
        assert closed.wait(10)
        assert read(server, port, 200, 100) == DATA[200:300]
        assert server._idle == []
        assert read(server, port, 300, 100) == DATA[300:400]


def test_connections_are_closed_with_their_server_and_not_kept_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        receive_head(connection)
        connection.sendall(answer(0, 100))
        ended.append(connection.recv(1))

    with answering(serve, serve) as port:
        server = new_server(port)
        read(server, port, 0, 100)
        monkeypatch.setattr(plain_http, "_IDLE_SECONDS", -1.0)
        read(server, port, 0, 100)
        assert eventually(lambda: ended == [b""])
        del server
    assert ended == [b"", b""]


def test_a_cancel_ends_a_read() -> None:
    released, asked = threading.Event(), threading.Event()

    def serve(connection: socket.socket) -> None:
        receive_head(connection)
        connection.sendall(answer(0, 300_000)[:-100])
        asked.set()
        assert released.wait(10)

    with answering(serve) as port:
        server = PlainHttp(("127.0.0.1", port), stall_seconds=600)
        operation = Operation(lambda _: read(server, port, 0, 300_000), name="test").start()
        assert asked.wait(10)
        began = time.monotonic()
        operation.cancel()
        assert operation.join(5.0)
        assert time.monotonic() - began < 2
        assert operation.failure is None
        assert server._idle == []
        released.set()


def test_an_object_that_fails_again_and_again_is_read_by_obstore_alone(server: HttpServer) -> None:
    """A server that redirects, for example, gets two requests for a range only a few times."""
    server.put("/a.bin", DATA)
    source = RemoteRoot(server.url).open("a.bin")

    def plain_alone(number: int, request: Request) -> Fault | None:
        return None if "user-agent" in request.headers else Fault(status=302)

    server.fault = plain_alone
    for k in range(10):
        region = memory.allocate(10)
        source.read_into(200_000 + k, [region])
        assert region.tobytes() == DATA[200_000 + k : 200_010 + k]
    assert len(server.requests) == 1 + 10 + 3


def test_links_are_signed_again_before_they_expire() -> None:
    signed: list[float] = []

    def renew() -> tuple[str, float]:
        signed.append(time.monotonic())
        return f"http://127.0.0.1:{port}/x?a=b", time.monotonic() + 600

    with answering(once(answer(0, 100, extra="Connection: close\r\n")), once(answer(0, 100))) as port:
        one = PlainObject(
            new_server(port), ("http://127.0.0.1:1/old", time.monotonic()), renew, headers="", warnings=RareWarnings()
        )
        for _ in range(2):
            assert one.read(0, [memory.allocate(100)], STATE)
    assert len(signed) == 1


def test_objects_of_s3_are_read_by_signed_links(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.put_object(Bucket="bucket", Key="a b/ü+%.bin", Body=DATA)
    source = RemoteRoot("s3://bucket/a b").open("ü+%.bin")
    links: list[str] = []
    plain = PlainHttp.read

    def watched(self: PlainHttp, url: str, *arguments: Any) -> None:
        plain(self, url, *arguments)
        links.append(url)

    monkeypatch.setattr(PlainHttp, "read", watched)
    region = memory.allocate(1000)
    source.read_into(200_000, [region])
    assert region.tobytes() == DATA[200_000:201_000]
    assert len(links) == 1
    assert "X-Amz-Signature" in links[0]
    assert "Signature" not in f"{source!r} {source.path}"


def test_names_and_users_are_sent_as_obstore_sends_them(server: HttpServer) -> None:
    server.user = "Basic bWU6cHc="
    server.put("/d/a b%ü+#.bin", DATA)
    root = RemoteRoot(server.url.replace("//", "//me:pw@") + "/d?sig=1%2B2", patience=Patience(num_attempts=1))
    region = memory.allocate(10)
    root.open("a b%ü+#.bin").read_into(300_000, [region])
    assert region.tobytes() == DATA[300_000:300_010]
    by_obstore, by_plain_http = server.requests
    assert ("user-agent" in by_obstore.headers, "user-agent" in by_plain_http.headers) == (True, False)
    assert by_obstore.path == by_plain_http.path


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("http://host/x", {}, ("host", 80)),
        ("http://u:p@host:81/x", {}, ("host", 81)),
        ("http://[::1]:81/x", {}, ("::1", 81)),
        ("https://host/x", {}, None),
        ("http://host/x?sig=\u20ac", {}, None),
        ("http://host/x?a=b c", {}, None),
        ("http://host/x?a=\x0b", {}, None),
        ("http://host/x", {"http_proxy": "http://proxy:1"}, None),
        ("http://host/x", {"ALL_PROXY": "http://proxy:1"}, None),
        ("http://host/x", {"http_proxy": "http://proxy:1", "no_proxy": "host"}, ("host", 80)),
        ("http://host/x", {"https_proxy": "http://proxy:1"}, ("host", 80)),
    ],
)
def test_tls_and_proxies_are_left_to_obstore(
    url: str, environment: dict[str, str], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert plain_address(url) == expected


@pytest.mark.anyio
async def test_many_loads_at_one_time(server: HttpServer) -> None:
    server.put(
        "/m.safetensors",
        b"\x40"
        + bytes(7)
        + b'{"a":{"dtype":"U8","shape":[300000],"data_offsets":[0,300000]}}'.ljust(64)
        + DATA[:300_000],
    )
    found: list[bytes] = []

    async def load() -> None:
        tensors = await stio.load(f"{server.url}/m.safetensors")
        found.append(tensors["a"].numpy().tobytes())

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(load)
    assert found == [DATA[:300_000]] * 8
