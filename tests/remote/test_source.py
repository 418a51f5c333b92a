"""Objects of a store as sources: the contract of all sources, requests, answers that are refused."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from servers import Fault, HttpServer

from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    StallTimeoutError,
    StioError,
    StorageError,
)
from stio.remote.requests import Patience, failure_of
from stio.remote.source import RemoteRoot
from stio.runtime import memory
from stio.runtime.operation import Operation
from stio.storage.base import Requests, Source
from stio.testing import SourceContract, read_guarded

PATIENT = Patience(num_attempts=4, first_pause_seconds=0.01, longest_pause_seconds=0.02, stall_seconds=0.3)
DATA = random.Random(3).randbytes(700_001)


def source_of(server: HttpServer, data: bytes = DATA, *, patience: Patience = PATIENT, **options: Any) -> Source:
    server.put("/dir/a.bin", data)
    return RemoteRoot(f"{server.url}/dir", patience=patience, **options).open("a.bin")


class TestRemoteSource(SourceContract):
    """The tests of all storages, over http."""

    @pytest.fixture(autouse=True)
    def _server(self, server: HttpServer) -> None:
        self.server = server

    def create(self, directory: Path, data: bytes) -> Source:
        return source_of(self.server, data)

    def overwrite(self, data: bytes) -> None:
        self.server.put("/dir/a.bin", data)

    def test_c90_shrunk_file(self, source: Source) -> None:
        """Unlike a file, a replaced object has none of the old bytes: every read of it is refused."""
        read_guarded(source, 0, 5)  # the first bytes came with the opening
        self.overwrite(self.DATA[:5000])
        with pytest.raises(ChangedDuringReadError):
            source.check_unchanged()


class TestRemoteSourceWithoutHead(TestRemoteSource):
    """The same, with content that did not come with the opening, in requests of two pages."""

    DATA = random.Random(8).randbytes((128 << 10) + 3 * 4096 + 577)

    def create(self, directory: Path, data: bytes) -> Source:
        return source_of(self.server, data, requests=Requests(8192, 4, 0))

    def test_c90_shrunk_file(self, source: Source) -> None:
        self.overwrite(self.DATA[:140_000])
        with pytest.raises(ChangedDuringReadError) as caught:
            read_guarded(source, 132_000, 100)
        assert caught.value.path == source.path
        assert "test_" not in str(caught.value)


def test_opening_and_one_read_are_two_requests(server: HttpServer) -> None:
    source = source_of(server)
    read_guarded(source, 0, 1000)
    assert read_guarded(source, 600_000, 10) == DATA[600_000:600_010]
    assert [request.headers["range"] for request in server.requests] == ["bytes=0-131071", "bytes=600000-600009"]


def test_an_empty_object(server: HttpServer) -> None:
    source = source_of(server, b"")
    assert source.identity.nbytes == 0
    source.check_unchanged()
    server.put("/dir/a.bin", b"x")
    with pytest.raises(ChangedDuringReadError):
        source.check_unchanged()


def test_a_long_read_is_several_requests(server: HttpServer) -> None:
    source = source_of(server, requests=Requests(65536, 8, 0))
    assert read_guarded(source, 140_000, 500_000) == DATA[140_000:640_000]
    ranges = [request.headers["range"].removeprefix("bytes=").split("-") for request in server.requests[1:]]
    assert len(ranges) == 4
    assert all(int(last) - int(first) < 2 * 65536 for first, last in ranges)


def nth(number: int, fault: Fault) -> object:
    return lambda k, request: fault if k == number else None


FAULTS = {
    "503": Fault(status=503, body=b"<Code>SlowDown</Code><Message>less</Message>"),
    "500": Fault(status=500),
    "429": Fault(status=429),
    "408": Fault(status=408),
    "cut": Fault(cut_bytes=100),
    "short": Fault(length=-7),
    "long": Fault(length=7),
    "shifted": Fault(shift=5),
    "reset": Fault(reset=True),
    "stall": Fault(hang_after=0),
    "silence": Fault(hang=True),
}


@pytest.mark.matrix
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_c92_c93_c94_one_failure_is_repeated(server: HttpServer, fault: Fault, number: int) -> None:
    server.fault = nth(number, fault)
    source = source_of(server)
    assert read_guarded(source, 300_000, 3000, 5) == DATA[300_000:303_005]
    source.check_unchanged()
    assert len(server.requests) == 4


@pytest.mark.matrix
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_c92_c93_c94_failures_without_end(server: HttpServer, fault: Fault) -> None:
    """The last cause is kept."""
    source = source_of(server)
    server.fault = lambda number, request: fault
    with pytest.raises(StorageError) as caught:
        read_guarded(source, 300_000, 3000)
    assert caught.value.path == source.path
    stalls = fault.hang or fault.hang_after >= 0
    attempts = PATIENT.num_stalls if stalls else PATIENT.num_attempts
    assert len(server.requests) == 1 + attempts
    assert f"in {attempts} attempts" in str(caught.value)
    assert isinstance(caught.value, StallTimeoutError) == stalls
    if fault.body:
        assert "SlowDown: less" in str(caught.value)


REFUSED = {
    "403": (Fault(status=403, body=b"<Code>AccessDenied</Code>"), StorageError, "credentials"),
    "401": (Fault(status=401), StorageError, "credentials"),
    "404": (Fault(status=404), ChangedDuringReadError, "removed"),
    "412": (Fault(status=412), ChangedDuringReadError, "replaced"),
    "no ranges": (Fault(unranged=True), StorageError, "ignores Range"),
    "other state": (Fault(etag='"other"'), ChangedDuringReadError, "replaced"),
    "400": (Fault(status=400), StorageError, "failed"),
}


@pytest.mark.matrix
@pytest.mark.parametrize(("fault", "kind", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_c91_refusals_are_not_repeated(server: HttpServer, fault: Fault, kind: type[StioError], words: str) -> None:
    source = source_of(server)
    server.fault = lambda number, request: fault
    with pytest.raises(kind, match=words):
        read_guarded(source, 300_000, 3000)
    assert len(server.requests) == 2


def test_c91_a_server_that_ignores_if_match(server: HttpServer) -> None:
    server.honours_if_match = False
    source = source_of(server)
    server.put("/dir/a.bin", DATA[::-1])
    with pytest.raises(ChangedDuringReadError):
        read_guarded(source, 300_000, 3000)
    assert server.requests[-1].headers["if-match"]


def test_weak_etags_are_compared_and_not_sent(server: HttpServer) -> None:
    server.weak_etags = True
    source = source_of(server)
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    assert "if-match" not in server.requests[-1].headers
    server.put("/dir/a.bin", DATA[::-1])
    with pytest.raises(ChangedDuringReadError):
        read_guarded(source, 300_000, 10)


def test_an_expired_signature_is_signed_again(server: HttpServer) -> None:
    expired = Fault(status=403, body=b"<Code>ExpiredToken</Code><Message>it has expired</Message>")
    source = source_of(server)
    server.fault = nth(1, expired)
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    server.fault = lambda number, request: expired
    with pytest.raises(StorageError, match="have expired") as caught:
        read_guarded(source, 300_000, 10)
    assert "ExpiredToken: it has expired" in str(caught.value)
    assert len(server.requests) == 5


@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(hang_after=10), Fault(status=503)])
def test_a_cancel_is_heard(server: HttpServer, fault: Fault) -> None:
    """It is heard while the store is silent, and in the pause before another attempt."""
    patience = Patience(stall_seconds=600, first_pause_seconds=600, longest_pause_seconds=600)
    source = source_of(server, patience=patience)
    server.fault = lambda number, request: fault
    asked = threading.Event()

    def read(operation: Operation[None]) -> None:
        asked.set()
        read_guarded(source, 300_000, 3000)

    operation = Operation(read, name="test").start()
    asked.wait()
    operation.cancel()
    assert operation.join(5.0)
    assert operation.failure is None


def test_user_and_query_are_sent_and_not_shown(server: HttpServer) -> None:
    server.user = "Basic bWU6cHc="
    server.put("/dir/a.bin", DATA)
    root = RemoteRoot(server.url.replace("//", "//me:pw@") + "/dir?X-Signature=SECRET", patience=PATIENT)
    source = root.open("a.bin")
    assert server.requests[-1].path == "/dir/a.bin?X-Signature=SECRET"
    server.fault = lambda number, request: Fault(status=503)
    with pytest.raises(StioError) as busy:
        source.check_unchanged()
    server.fault = lambda number, request: None
    with pytest.raises(CheckpointNotFoundError) as missing:
        root.open("b.bin")
    with pytest.raises(CheckpointNotFoundError) as unlisted:
        root.listdir()
    for error in (busy.value, missing.value, unlisted.value):
        shown = f"{error} {error!r} {error.__cause__} {vars(error)}"
        assert "SECRET" not in shown
        assert "pw" not in shown
        assert server.url in shown
        assert error.__context__ is None or error.__suppress_context__


def test_names_are_encoded_once(server: HttpServer) -> None:
    server.put("/a dir/b%20c é.bin", b"x")
    source = RemoteRoot(f"{server.url}/a%20dir").open("b%20c é.bin")
    assert read_guarded(source, 0, 1) == b"x"


def test_a_repeated_request_has_the_name_and_the_user_of_the_first(server: HttpServer) -> None:
    server.user = "Basic bWU6cHc="
    server.put("/d/a b%ü+#.bin", DATA)
    source = RemoteRoot(server.url.replace("//", "//me:pw@") + "/d?sig=1%2B2", patience=PATIENT).open("a b%ü+#.bin")
    server.fault = nth(1, Fault(status=503))
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    _, first, second = server.requests
    for name in ("authorization", "range"):
        assert first.headers[name] == second.headers[name]
    assert first.path == second.path


def test_no_server(server: HttpServer) -> None:
    url = server.url
    server.stop()
    with pytest.raises(StorageError, match="cannot be reached in 4 attempts|refused") as caught:
        RemoteRoot(url, patience=PATIENT).open("a.bin")
    assert "refused" in str(caught.value)


@pytest.mark.matrix
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("call", ["read", "check"])
def test_a_forked_process_is_refused(server: HttpServer, call: str) -> None:
    source = source_of(server)
    source.read_into(300_000, [memory.allocate(10)])  # its connection is idle now
    pid = os.fork()
    if not pid:
        code = 1
        try:
            source.read_into(300_000, [memory.allocate(10)]) if call == "read" else source.check_unchanged()
        except StorageError as error:
            code = 0 if "spawn" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_attempts_are_logged(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    """The first is a warning, which is shown without logging; others follow after growing pauses."""
    source = source_of(server)
    caplog.set_level("INFO", logger="stio")
    server.fault = nth(1, Fault(hang=True))
    read_guarded(source, 300_000, 10)
    server.fault = nth(3, Fault(status=503, body=b"<Code>SlowDown</Code>"))
    read_guarded(source, 300_000, 10)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert f"{source.path}: attempt 1 of 3 failed (stalled)" in caplog.text
    assert "attempt 1 of 4 failed (busy: SlowDown)" in caplog.text


@pytest.mark.parametrize(
    ("reason", "is_slow"), [("Name or service not known", True), ("Temporary failure in name resolution", False)]
)
def test_a_name_that_no_host_has_gets_few_attempts(reason: str, is_slow: bool) -> None:
    """A name server that does not answer may do so later."""
    text = f"Generic error. Debug source: kind: Connect, dns error: failed to lookup address information: {reason}"
    failure = failure_of(OSError(text))
    assert (failure.kind, failure.may_succeed, failure.is_slow) == ("unreachable", True, is_slow)


def test_a_server_that_is_not_there_is_told_at_the_first_repeat(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, however many threads find it so."""
    server.put("/dir/a.bin", DATA)
    root = RemoteRoot(f"{server.url.replace('//', '//me:PASSWORD@')}/dir?sig=SECRET", patience=PATIENT)
    source = root.open("a.bin")
    server.fault = lambda number, request: Fault(reset=True)  # for the connection that is open
    server.stop()

    def read(operation: Operation[None]) -> None:
        with pytest.raises(StorageError):
            read_guarded(source, 300_000, 10)

    operations = [Operation(read, name="test").start() for _ in range(8)]
    assert all(operation.join(20) and operation.failure is None for operation in operations)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(rf"{source.path}: attempt 1 of 4 failed \((unreachable|broken): the connection was", line)
    assert "SECRET" not in line
    assert "PASSWORD" not in line


def test_no_credentials(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the metadata service of a machine says is no answer of the store."""
    server.fault = lambda number, request: Fault(status=404)
    config = {"metadata_endpoint": f"{server.url}/latest/api/token", "endpoint": server.url}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(StorageError, match=r"no credentials were found \(in 3 attempts\); set those"):
        RemoteRoot("s3://bucket", config=config, patience=PATIENT).open("a")


def test_without_etags_size_and_time_are_compared(server: HttpServer) -> None:
    server.fault = lambda number, request: Fault(etag="")
    source = source_of(server)
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    server.put("/dir/a.bin", DATA + b"x")
    with pytest.raises(ChangedDuringReadError):
        source.check_unchanged()


# Answers as no store sends them.


@contextmanager
def answering(answer: Callable[[socket.socket, int, int], object]) -> Iterator[str]:
    """Run a server that answers the first range rightly, and others by a function of connection, begin and end."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while head := receive_head(connection):
                begin, last = map(int, head.lower().partition(b"bytes=")[2].partition(b"\r\n")[0].split(b"-"))
                if begin:
                    answer(connection, begin, last + 1)
                    return
                connection.sendall(answer_of(0, last + 1))

    def accept() -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
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


def answer_of(begin: int, end: int, *, extra: str = "", **fields: str) -> bytes:
    """Return a whole answer; empty fields are left out."""
    shown = {
        "Content-Range": f"bytes {begin}-{end - 1}/{len(DATA)}",
        "Content-Length": str(end - begin),
        "ETag": '"a"',
    } | {key.replace("_", "-"): value for key, value in fields.items()}
    lines = "".join(f"{key}: {value}\r\n" for key, value in shown.items() if value)
    return f"HTTP/1.1 206 Partial Content\r\n{lines}{extra}\r\n".encode() + DATA[begin:end]


BEGIN, END = 300_000, 300_100
RIGHT = answer_of(BEGIN, END)

WRONG = {
    "another range": answer_of(BEGIN + 5, END + 5),
    "another size": answer_of(BEGIN, END, Content_Range=f"bytes {BEGIN}-{END - 1}/{len(DATA) + 1}"),
    "no range": answer_of(BEGIN, END, Content_Range=""),
    "another length": answer_of(BEGIN, END, Content_Length="99"),
    "two lengths": answer_of(BEGIN, END, extra="content-length: 7\r\n"),
    "another state": answer_of(BEGIN, END, ETag='"b"'),
    "no state": answer_of(BEGIN, END, ETag=""),
    "chunks": answer_of(BEGIN, END, extra="Transfer-Encoding: chunked\r\n"),
    "everything": RIGHT.replace(b"206", b"200"),
    "parts of a range": answer_of(BEGIN, END, Content_Range="", Content_Type="multipart/byteranges; boundary=x"),
    "another page": RIGHT.replace(b"206 Partial Content", b"302 Found"),
    "not http": b"\xff" * 500 + b"\r\n\r\n",
    "an endless head": b"HTTP/1.1 206 x\r\n" + b"a: b\r\n" * 200_000,
    "less": RIGHT[:-1],
    "a part of a head": RIGHT[:30],
    "nothing": b"",
}


@pytest.mark.matrix
@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_refused(data: bytes) -> None:
    """None of its bytes reaches the caller's memory."""
    region = memory.allocate(END - BEGIN)
    with answering(lambda connection, begin, end: connection.sendall(data)) as url:
        source = RemoteRoot(url, patience=PATIENT).open("x.bin")
        with pytest.raises(StorageError):
            source.read_into(BEGIN, [region])
    assert region.tobytes() == bytes(END - BEGIN)


ODD = {
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + RIGHT,
    "old version": RIGHT.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "more": RIGHT + b"more",
}


@pytest.mark.parametrize("data", ODD.values(), ids=ODD.keys())
def test_an_odd_answer_with_the_right_bytes(data: bytes) -> None:
    with answering(lambda connection, begin, end: connection.sendall(data)) as url:
        source = RemoteRoot(url, patience=PATIENT).open("x.bin")
        assert read_guarded(source, BEGIN, END - BEGIN) == DATA[BEGIN:END]


def test_a_range_fills_regions_however_it_arrives() -> None:
    def serve(connection: socket.socket, begin: int, end: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = answer_of(begin, end)
        for at in (1, 50, 150, 250, 300, len(data)):  # the head in pieces, then its end with a part of the body
            connection.sendall(data[:at])
            data = data[at:]

    with answering(serve) as url:
        source = RemoteRoot(url, patience=PATIENT).open("x.bin")
        assert read_guarded(source, 200_000, 10, 1, 299_989) == DATA[200_000:500_000]


def test_a_proxy_of_the_environment_is_used(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", server.url)
    server.put("/dir/a.bin", DATA)
    source = RemoteRoot("http://no-such-host.invalid/dir", patience=PATIENT).open("a.bin")
    server.fault = nth(1, Fault(status=503))
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    assert [request.path for request in server.requests] == ["http://no-such-host.invalid/dir/a.bin"] * 3


def test_a_proxy_of_the_settings_is_used(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    server.put("/bucket/a.bin", DATA)
    server.fault = nth(1, Fault(status=503))
    config = {"endpoint": "http://127.0.0.1:1", "proxy_url": server.url, "region": "us-east-1"}
    source = RemoteRoot("s3://bucket", config=config, patience=PATIENT).open("a.bin")
    assert read_guarded(source, 300_000, 10) == DATA[300_000:300_010]
    assert len(server.requests) == 3
