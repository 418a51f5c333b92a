"""Faults 331, 337, 341, 342, 343 and 345: environments, servers and stores as users have them."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from clocks import Clock
from counts import eighth
from crash.zygote import Zygote
from remote.servers import HttpServer, RunningServer, http_server, new_certificate
from safetensors.torch import save as as_bytes
from support import eventually, run_python

import stio
from stio import clock as clock_of_stio
from stio import sync
from stio.cli.main import main
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, StallTimeoutError, StioError, StorageError
from stio.remote import requests
from stio.remote.pulls import pull
from stio.remote.requests import Patience, RequestFailure, patience_of
from stio.remote.source import RemoteRoot
from stio.runtime import calls
from stio.runtime.calls import Call
from stio.runtime.operation import Operation, is_interrupted
from stio.runtime.workers import WorkerPool
from stio.storage.open import SingleFileRoot

TENSORS = {"w": torch.arange(1000.0), "v": torch.ones(3, 5)}
DATA = as_bytes(TENSORS)
QUICK = Patience(num_attempts=2, first_pause_seconds=0.01, stall_seconds=5)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    """Give each test an environment without stores and proxies."""
    pytest.importorskip("obstore")
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "HF_", "SSL_CERT", "IDENTITY_")) or name.lower().endswith(
            "_proxy"
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


def one_file(url: str, **options: Any) -> Any:
    """Return a file of a server, with options."""
    return SingleFileRoot(RemoteRoot(url, **options), "model.safetensors")


def loads(url: Any) -> None:
    """Require that a load gives `TENSORS`."""
    found = sync.load(url)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


# Fault 337: what obstore would panic at.

SECRET = "SECRETvalue0123"

BASES: dict[str, Callable[[str], dict[str, str]]] = {
    "s3": lambda url: {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": SECRET,
        "AWS_REGION": "eu-west-1",
    },
    "az": lambda url: {
        "AZURE_STORAGE_ENDPOINT": f"{url}/account",
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_TOKEN": SECRET,
    },
    "gs": lambda url: {"GOOGLE_BASE_URL": url, "GOOGLE_SKIP_SIGNATURE": "true"},
}

OTHERS = {
    "s3": (
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT",
        "AWS_DEFAULT_REGION",
        "AWS_TOKEN",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ENDPOINT_URL_STS",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_METADATA_ENDPOINT",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
        "AWS_SKIP_SIGNATURE",
        "AWS_UNSIGNED_PAYLOAD",
        "AWS_REQUEST_PAYER",
        "AWS_S3_EXPRESS",
        "AWS_CHECKSUM_ALGORITHM",
        "AWS_SERVER_SIDE_ENCRYPTION",
        "AWS_SSE_CUSTOMER_KEY_BASE64",
        "AWS_BUCKET",
        "AWS_USER_AGENT",
        "AWS_PROXY_URL",
        "AWS_PROFILE",
        "AWS_CA_BUNDLE",
        "SSL_CERT_FILE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "HTTP_PROXY",
    ),
    "az": (
        "AZURE_ENDPOINT",
        "AZURE_STORAGE_ACCOUNT",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_CLIENT_ID",
        "AZURE_CLIENT_SECRET",
        "AZURE_TENANT_ID",
        "AZURE_AUTHORITY_HOST",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_MSI_ENDPOINT",
        "IDENTITY_ENDPOINT",
        "AZURE_CONTAINER_NAME",
        "AZURE_USE_EMULATOR",
    ),
    "gs": (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_BEARER_TOKEN",
        "SERVICE_ACCOUNT",
    ),
}

VALUES = ("", " ", "\n", "x", "a b", "a\nb", "\x01", "ключ", '"q"', "ftp://h/x", "127.0.0.1:9", "http://", "/no/such")


def variants(value: str) -> list[str]:
    """Return what a variable may have in place of a value."""
    base = value or SECRET
    return [*VALUES, f"{base}\n", f"\n{base}", f" {base}\r\n", f'"{base}"', base[:-1] + "\n" + base[-1]]


VARIABLES = [(scheme, name) for scheme in BASES for name in (*BASES[scheme]("http://x"), *OTHERS[scheme])]


@pytest.mark.matrix
@pytest.mark.parametrize("save", [False, True], ids=["load", "save"])
@pytest.mark.parametrize(("scheme", "name"), VARIABLES)
def test_c337_any_environment_is_an_answer_or_a_storage_error(
    scheme: str, name: str, save: bool, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable of each store: missing, empty, with spaces, newlines, quotes, other schemes."""
    base = BASES[scheme](server.url)
    for path in ("/bucket/m.safetensors", "/account/bucket/m.safetensors"):
        server.put(path, DATA)
    for value in eighth([None, *variants(base.get(name, ""))], VARIABLES.index((scheme, name)) + 4 * save):
        environment = {**base, **({} if value is None else {name: value})}
        if value is None:
            environment.pop(name, None)
        if name.startswith(("AWS_WEB", "AWS_ROLE", "AWS_CONT", "AWS_METADATA", "AWS_ENDPOINT_URL_STS")):
            environment.pop("AWS_ACCESS_KEY_ID")
            environment.pop("AWS_SECRET_ACCESS_KEY")
            environment.setdefault("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
        if name.startswith(("AZURE_CLIENT", "AZURE_TENANT", "AZURE_AUTH", "AZURE_FED", "AZURE_MSI", "IDENTITY")):
            environment.pop("AZURE_STORAGE_TOKEN")
            environment.setdefault("AZURE_AUTHORITY_HOST", "http://127.0.0.1:9")
        with monkeypatch.context() as context:
            for key, one in environment.items():
                if "\0" not in one:
                    context.setenv(key, one)
            try:
                root = RemoteRoot(f"{scheme}://bucket", patience=Patience(num_attempts=1, stall_seconds=2))
                sync.save(TENSORS, root) if save else root.open("m.safetensors").close()
            except (StorageError, CheckpointNotFoundError) as error:
                shown = f"{error} {error!r} {error.__cause__}"
                assert SECRET not in shown or value == SECRET or "account file" in shown  # the path of a file is shown
                assert pickle.loads(pickle.dumps(error)).args == error.args


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\n\n"])
@pytest.mark.parametrize("name", sorted(BASES["s3"]("")))
def test_c337_the_newline_of_a_file_is_named(
    name: str, end: str, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in BASES["s3"](server.url).items():
        monkeypatch.setenv(key, value + end if key == name else value)
    with pytest.raises(StorageError, match=f"{name} has white space at an end.*correct it, or unset it") as caught:
        sync.load("s3://bucket/m.safetensors")
    assert SECRET not in f"{caught.value} {caught.value!r}"
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL_S3", "minio:9000"),
        ("AWS_ENDPOINT_URL_S3", f"http://{SECRET}\n:9000"),
        ("AWS_ACCESS_KEY_ID", f"{SECRET}\nx"),
        ("AWS_SKIP_SIGNATURE", "maybe"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "a\nb"),
        ("AZURE_STORAGE_ACCOUNT_KEY", f"{SECRET}!"),
        ("AZURE_STORAGE_TOKEN", f"{SECRET}\nx"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", f'"{SECRET}"'),
        ("GOOGLE_APPLICATION_CREDENTIALS", f'{{"private_key": "{SECRET}"}}'),
    ],
)
def test_c337_the_variable_is_named_and_its_value_is_not_shown(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = {"AW": "s3", "AZ": "az", "GO": "gs"}[name[:2]]
    base = BASES[scheme]("http://127.0.0.1:9")
    for other in ("AWS_SESSION_TOKEN", "AZURE_STORAGE_TOKEN"):
        base.pop(other, None)
    for key, one in {**base, name: value}.items():
        monkeypatch.setenv(key, one)
    with pytest.raises(StorageError, match=name) as caught:
        sync.load(f"{scheme}://bucket/m.safetensors")
    assert SECRET not in f"{caught.value} {caught.value!r}"


@pytest.mark.parametrize("url", ["s3://my bucket/x", "gs://b\nc/x", "az://b c/x", 's3://"b"/x', "s3://b%20c/x"])
def test_c337_a_bucket_that_no_store_can_have(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    for call in (lambda: sync.load(url), lambda: sync.save(TENSORS, url), lambda: RemoteRoot(url)):
        with pytest.raises(StorageError, match="no (bucket|container) has such a name"):
            call()


@pytest.mark.parametrize("url", ['http://h"o/x', "http://h o/x", "http://h<o/x", "http://h%0Ao/x"])
def test_c337_a_host_that_no_server_has(url: str) -> None:
    with pytest.raises(StioError):
        sync.load(url)


class PanicException(BaseException):
    """As pyo3 raises it."""


def panic(*values: object, **options: object) -> Any:
    raise PanicException("called `Result::unwrap()` on an `Err` value")


@pytest.mark.slow
def test_c337_a_panic_at_any_place_is_a_storage_error(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's thread, on stio's own, in requests, uploads and the making of a store."""
    obstore = pytest.importorskip("obstore")
    for key, value in BASES["s3"](server.url).items():
        monkeypatch.setenv(key, value)
    for name in ("get", "list_with_delimiter", "put", "sign", "head", "delete"):
        with monkeypatch.context() as context:
            context.setattr(obstore, name, panic)
            for call in (
                lambda: sync.load("s3://bucket/x/"),
                lambda: sync.load("s3://bucket/m.safetensors"),
                lambda: sync.save(TENSORS, RemoteRoot("s3://bucket/y", patience=Patience(num_attempts=1))),
            ):
                with pytest.raises(StioError):
                    call()
    with monkeypatch.context() as context:
        context.setattr(import_module("obstore.store"), "S3Store", panic)
        with pytest.raises(StorageError, match="panic"):
            sync.load("s3://bucket/x/")


@pytest.mark.parametrize("run", ["operation", "call", "call on a thread", "pool"])
def test_c337_panics_of_any_library_become_errors(run: str) -> None:
    with pytest.raises(StorageError, match="a panic"):
        if run == "operation":
            Operation(panic, name="x").result()
        elif run == "call":
            Call(panic).result()
        elif run == "call on a thread":
            Call(panic, on_own_thread=True).result()
        else:
            pool = WorkerPool("x")
            pool.start(panic, 2)
            pool.join()
            pool.raise_error()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_c337_what_ends_a_program_is_no_panic(kind: type[BaseException]) -> None:
    def work(*values: object) -> None:
        raise kind

    with pytest.raises(kind):
        Call(work).result()
    with pytest.raises(kind):
        Operation(work, name="x").result()


def test_c337_a_variable_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match=r"set AZURE_STORAGE_ACCOUNT_NAME$"):
        sync.save(TENSORS, "az://container/m")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")  # the advice
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
    RemoteRoot("az://container/m").close()


def test_c337_a_task_of_a_server_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not end unseen, and the tasks beside it go on."""

    async def serve() -> None:
        beside = asyncio.create_task(asyncio.sleep(0.2, "went on"))
        calls = (stio.load("s3://bucket/m.safetensors") for _ in range(3))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, StorageError) and "obstore has failed inside" in str(one) for one in found)
        assert "AWS_ENDPOINT_URL_S3" in str(found[0])
        assert await beside == "went on"

    for key, value in {**BASES["s3"]("http://127.0.0.1:9"), "AWS_CA_BUNDLE": "/no/such"}.items():
        monkeypatch.setenv(key, value)
    obstore = pytest.importorskip("obstore")
    monkeypatch.setattr(obstore, "get", panic)
    monkeypatch.setattr(obstore, "list_with_delimiter", panic)
    asyncio.run(serve())


@pytest.mark.matrix
@pytest.mark.costly("a server that stands for a store, in the same process")
@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_TOKEN"])
@pytest.mark.parametrize("value", ["http://127.0.0.1:9\n", "http://127.0.0.1:9 x", "ключ"])
def test_c337_the_hub_too(zygote: Zygote, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    code = "import stio\ntry: stio.sync.load('hf://a/b')\nexcept stio.StorageError: print('typed')"
    values = {"HF_ENDPOINT": "http://127.0.0.1:9", name: value}
    for key, one in values.items():
        monkeypatch.setenv(key, one)
    assert "typed" in run_python(code, python=zygote.python).stdout


# Servers: a handler answers by a function, which gets the handler.


class Server:
    """A server whose answers a function makes; it counts requests and their times."""

    def __init__(self, answer: Callable[[Any, int], None], certificate: tuple[str, str] | None = None) -> None:
        self.times: list[float] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.stopped = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *values: object) -> None:
                pass

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.times.append(clock_of_stio.monotonic())
                outer.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
                answer(self, len(outer.times) - 1)

            def __getattr__(self, name: str) -> Any:
                return self.do_GET if name.startswith("do_") else super().__getattribute__(name)

        self.running = RunningServer(Handler, certificate)
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.running.server_port}"

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *values: object) -> None:
        self.stopped.set()
        self.running.stop()


def send(handler: Any, status: int, body: bytes = b"", **fields: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **fields}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    if handler.command != "HEAD":
        with suppress(OSError):
            handler.wfile.write(body)


def send_object(handler: Any, data: bytes = DATA, etag: str = '"1"') -> None:
    """Answer as a store does."""
    begin, end = 0, len(data)
    if text := handler.headers.get("Range"):
        first, last = text.removeprefix("bytes=").split("-")
        begin, end = int(first), min(int(last) + 1, len(data))
        send(handler, 206, data[begin:end], Content_Range=f"bytes {begin}-{end - 1}/{len(data)}", ETag=etag)
    else:
        send(handler, 200, data, ETag=etag)


S3 = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


def set_s3(monkeypatch: pytest.MonkeyPatch, url: str, **more: str) -> None:
    for name, value in {**S3, "AWS_ENDPOINT_URL_S3": url, **more}.items():
        monkeypatch.setenv(name, value)


# Fault 331: servers without ranges.


LARGE = {f"w{k}": torch.arange(k, k + (1 << 18), dtype=torch.float32) for k in range(24)}
LARGE_DATA = as_bytes(LARGE)


@pytest.fixture
def static(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Run the server of `python -m http.server` for a directory; give its URL and what was requested."""
    folder = tmp_path / "static"
    folder.mkdir()
    paths: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *values: Any) -> None:
            super().__init__(*values, directory=str(folder))

        def log_message(self, format: str, *values: object) -> None:
            paths.append(f"{self.command} {self.path}")

    running = RunningServer(Handler, None)
    yield f"http://127.0.0.1:{running.server_port}", folder, paths
    running.stop()


@pytest.mark.slow
def test_c331_a_load_reads_the_whole_file_in_order(
    static: tuple[str, Path, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    url, folder, _ = static
    (folder / "model.safetensors").write_bytes(LARGE_DATA)
    for place in (f"{url}/model.safetensors", url):
        found = sync.load(place)
        assert all(torch.equal(found[name], LARGE[name]) for name in LARGE)
    assert "sends no parts of files" in caplog.text
    found = sync.load(f"{url}/model.safetensors", names=["w20", "w3"])
    assert torch.equal(found["w3"], LARGE["w3"])
    assert torch.equal(found["w20"], LARGE["w20"])
    with sync.open(f"{url}/model.safetensors") as checkpoint:
        for name in ("w5", "w1", "w23"):
            assert torch.equal(checkpoint.read(name), LARGE[name])


def test_c331_the_file_is_requested_once_for_its_data(static: tuple[str, Path, list[str]]) -> None:
    url, folder, requests = static
    (folder / "model.safetensors").write_bytes(LARGE_DATA)
    sync.load(f"{url}/model.safetensors")
    assert (
        len(requests) <= 2 * 4
    )  # the range that is ignored, the header, the data, the look at the end; log lines twice


@pytest.mark.slow
def test_c331_memory_is_bounded(static: tuple[str, Path, list[str]]) -> None:
    url, folder, _ = static
    tensors = {"w": torch.arange(24 << 20, dtype=torch.float32)}
    sync.save(tensors, folder / "m.safetensors")
    found = sync.load(f"{url}/m.safetensors", budget_bytes=4 << 20)
    assert torch.equal(found["w"], tensors["w"])


@pytest.mark.slow
def test_c331_shards_and_pull(static: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    url, folder, _ = static
    sync.save(LARGE, folder / "model", max_shard_size="5MB")
    found = sync.load(f"{url}/model")
    assert all(torch.equal(found[name], LARGE[name]) for name in LARGE)
    result = CliRunner().invoke(main, ["pull", f"{url}/model", str(tmp_path / "here"), "--no-progress"])
    assert result.exit_code == 0, result.output
    found = sync.load(tmp_path / "here")
    assert all(torch.equal(found[name], LARGE[name]) for name in LARGE)


def test_c331_a_file_that_is_replaced_is_found(static: tuple[str, Path, list[str]]) -> None:
    url, folder, _ = static
    path = folder / "model.safetensors"
    path.write_bytes(LARGE_DATA)
    with sync.open(f"{url}/model.safetensors") as checkpoint:
        checkpoint.read("w1")
        os.utime(path, (1, 1))
        with pytest.raises(ChangedDuringReadError):
            checkpoint.read("w0")


@pytest.mark.matrix
@pytest.mark.parametrize("after", [1, 200_000, len(LARGE_DATA) - 5])
def test_c331_a_connection_that_breaks_is_made_again(after: int) -> None:
    """Also in the middle of the data; and a shorter file is an error."""

    def answer(handler: Any, number: int) -> None:
        cut = LARGE_DATA[:after] if number == 1 else LARGE_DATA
        handler.close_connection = True
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(LARGE_DATA)))
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(cut)

    with Server(answer) as server:
        found = sync.load(one_file(server.url, patience=QUICK), names=["w2"])
        assert torch.equal(found["w2"], LARGE["w2"])


async def _cancelled_load(url: str, moment: threading.Event) -> float:
    """Cancel a load at a moment; return the seconds until it has ended."""
    task = asyncio.create_task(stio.load(url))
    assert await asyncio.to_thread(moment.wait, 30)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - began


def test_c331_a_cancel_is_heard() -> None:
    sent = threading.Event()

    def answer(handler: Any, number: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(LARGE_DATA)))
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        with suppress(OSError):
            handler.wfile.write(LARGE_DATA[: 1 << 20])
            sent.set()
            server.stopped.wait(20)

    with Server(answer) as server:
        assert asyncio.run(_cancelled_load(f"{server.url}/m.safetensors", sent)) < 2


# Fault 341: connections that trickle.


@pytest.mark.parametrize("begin", [0, 1], ids=["header", "data"])
@pytest.mark.parametrize("by", ["ranges", "whole"])
def test_c341_a_connection_that_trickles_is_a_stall(
    begin: int, by: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is never silent for long; the rate is told."""
    monkeypatch.setattr(calls, "LOOK_SECONDS", 0.01)

    def answer(handler: Any, number: int) -> None:
        text = handler.headers.get("Range") if by != "whole" else None
        first, last = (text or f"bytes=0-{len(LARGE_DATA) - 1}").removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last) + 1, len(LARGE_DATA))
        handler.send_response(206 if text else 200)
        if text:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(LARGE_DATA)}")
        handler.send_header("Content-Length", str(end - start))
        handler.send_header("ETag", '"1"')
        handler.end_headers()
        with suppress(OSError):
            if number < begin * (1 if by != "whole" else 2):
                handler.wfile.write(LARGE_DATA[start:end])
                return
            for k, at in enumerate(range(start, end, 40)):
                handler.wfile.write(LARGE_DATA[at : at + 40])
                if k < 20:  # it is noticed by then
                    clock.advance(0.1)
                if server.stopped.wait(0.005):
                    return

    with Server(answer) as server:
        patience = Patience(num_attempts=2, num_stalls=2, stall_seconds=1.0)
        root = one_file(server.url, patience=patience)
        with pytest.raises(StallTimeoutError, match=r"sent (only|fewer than) [\d,]+ bytes/s for too long") as caught:
            sync.load(root)
        assert clock.seconds < 20
        assert caught.value.errno == errno.ETIMEDOUT


def test_c341_a_slow_connection_is_no_stall(clock: Clock) -> None:
    """Bytes that come late, but fast enough on the whole."""

    def answer(handler: Any, number: int) -> None:
        time.sleep(0.1)
        clock.advance(0.3)
        send_object(handler)

    with Server(answer) as server:
        loads(one_file(server.url, patience=Patience(num_attempts=1, stall_seconds=1.0)))


# Fault 342: stores that refuse requests for the moment.


def test_c342_a_store_may_be_busy_for_45_seconds() -> None:
    """With the default, whatever the jitter is; the clock is faster here."""
    patience = patience_of(None)
    for _ in range(200):
        attempt, now = 1, 0.0
        while now < 45:
            seconds = patience.pause_seconds(attempt)
            assert not patience.is_over(RequestFailure("busy", "", is_throttled=True), attempt, now, seconds)
            attempt, now = attempt + 1, now + seconds
    pauses = {patience.pause_seconds(3) for _ in range(20)}
    assert len(pauses) > 10


def test_c342_no_patience_is_a_number_of_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "pause", lambda seconds: None)
    with Server(lambda handler, k: send(handler, 503)) as server:
        with pytest.raises(StorageError, match=r"could not answer \(in 8 attempts\)"):
            sync.load(one_file(server.url, patience=0))
        assert len(server.requests) == 8


def test_c342_patience_in_seconds_bounds_the_wait(clock: Clock) -> None:
    with Server(lambda handler, k: send(handler, 503)) as server:
        with pytest.raises(StorageError, match="could not answer"):
            sync.load(one_file(server.url, patience=3.0))
        assert 1 < clock.seconds < 4


@pytest.mark.parametrize(("value", "kind"), [(-1, ValueError), (float("inf"), ValueError), ("5", TypeError)])
def test_c342_a_wrong_patience_is_refused(value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="patience= takes"):
        RemoteRoot("http://host", patience=value)


def test_c342_a_cancel_ends_the_pause(clock: Clock) -> None:
    paused = threading.Event()

    def during_pause() -> None:
        if len(server.times) == 2:
            paused.set()
            assert eventually(is_interrupted)

    clock.during_pause = during_pause
    with Server(lambda handler, k: send(handler, 503)) as server:
        assert asyncio.run(_cancelled_load(f"{server.url}/m.safetensors", paused)) < 2
        assert clock.seconds < 2


# Fault 343: errors of S3, and credentials of pods.


@pytest.mark.matrix
@pytest.mark.parametrize("status", [301, 307])
@pytest.mark.parametrize("call", ["file", "directory", "save"])
def test_c343_a_redirect_advises_to_set_the_region(call: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    body = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message><Region>eu-west-3</Region></Error>"
    with Server(lambda handler, k: send(handler, status, body)) as server:
        set_s3(monkeypatch, server.url)
        with pytest.raises(StorageError, match="set AWS_REGION if the bucket is in another region"):
            if call == "save":
                sync.save(TENSORS, "s3://bucket/x")
            else:
                sync.load("s3://bucket/m.safetensors" if call == "file" else "s3://bucket/m")
        assert len(server.requests) == 1


@pytest.mark.parametrize("url", ["s3://bucket/x", "https://127.0.0.1:9/x", "gs://bucket/x"])
@pytest.mark.parametrize("content", [None, b"junk"])
def test_c343_a_missing_authority_is_an_error(
    url: str, content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    names = ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", *(["AWS_CA_BUNDLE"] if url[0] == "s" else [])]
    for name in names:
        with monkeypatch.context() as context:
            set_s3(context, "https://127.0.0.1:9")
            context.setenv("GOOGLE_SKIP_SIGNATURE", "true")
            context.setenv(name, str(path))
            with pytest.raises(StorageError, match=name if content is None else "certificate"):
                sync.load(url)


def test_c343_the_log_says_what_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    with Server(lambda handler, k: send(handler, 500, b"oh") if k < 2 else send_object(handler)) as server:
        caplog.set_level("INFO", logger="stio")
        loads(one_file(server.url))
        assert f"{server.url}/model.safetensors: attempt 1 of 8 failed (busy" in caplog.text


TOKEN_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>podkey</AccessKeyId><SecretAccessKey>s</SecretAccessKey>
<SessionToken>podtoken</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
CONTAINER_ANSWER = (
    '{"AccessKeyId": "podkey", "SecretAccessKey": "s", "Token": "podtoken", "Expiration": "2999-01-01T00:00:00Z"}'
)


def pods(by: str, service: str, tmp_path: Path) -> dict[str, str]:
    """Return the variables of a pod."""
    file = tmp_path / "token"
    file.write_text("the-token")
    if by == "sts":
        return {
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(file),
            "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
            "AWS_ENDPOINT_URL_STS": service,
        }
    return {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{service}/creds",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(file),
    }


@pytest.mark.parametrize("by", ["sts", "file"])
def test_c343_credentials_of_pods(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """obstore gets them, from a service of a private authority too; it speaks to STS by TLS only."""
    authority, certificate = new_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", authority)

    def answer(handler: Any, k: int) -> None:
        send(handler, 200, (TOKEN_ANSWER if by == "sts" else CONTAINER_ANSWER).encode())

    with Server(answer, certificate) as service, Server(lambda handler, k: send_object(handler), certificate) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url)
        for name, value in pods(by, service.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        loads("s3://bucket/m.safetensors")
        headers = store.requests[0][2]
        assert "Credential=podkey/" in headers["authorization"]
        assert headers["x-amz-security-token"] == "podtoken"
        sent = service.requests[0][2].get("authorization", "")
        assert sent == ("" if by == "sts" else "the-token")


@pytest.mark.matrix
@pytest.mark.parametrize("by", ["sts", "file"])
@pytest.mark.parametrize("how", ["denied", "junk", "no server", "file is gone"])
def test_c343_credentials_of_pods_that_fail(by: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, certificate = new_certificate(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", authority)

    def answer(handler: Any, k: int) -> None:
        body = b"<ErrorResponse><Error><Code>InvalidIdentityToken</Code></Error></ErrorResponse>"
        send(handler, 403, body) if how == "denied" else send(handler, 200, b"junk")

    with Server(answer, certificate) as service, Server(lambda handler, k: send_object(handler), certificate) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.url)
        for name, value in pods(by, service.url, tmp_path).items():
            monkeypatch.setenv(name, value)
        if how == "no server":
            service.running.stop()
        if how == "file is gone":
            (tmp_path / "token").unlink()
        with pytest.raises(StorageError) as caught:
            RemoteRoot("s3://bucket", patience=QUICK).open("m.safetensors")
        words = {"denied": "InvalidIdentityToken", "no server": "refused", "file is gone": "token file"}.get(how, "")
        assert words in str(caught.value)
        assert "the-token" not in f"{caught.value} {caught.value!r}"
        assert store.requests == []


# Fault 345: web pages in place of data.


PAGE = b"<!DOCTYPE html>\n<html><head><title>Log in &amp; go</title></head><body>" + b"x" * 300 + b"</body></html>"


@pytest.mark.matrix
@pytest.mark.parametrize("scheme", ["http", "https", "s3", "gs", "az"])
@pytest.mark.parametrize("call", ["file", "index", "directory", "save", "pull"])
@pytest.mark.parametrize("how", ["page", "redirect", "range"])
def test_c345_a_login_page_is_named(
    scheme: str, call: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scheme.startswith("http") and call == "save":
        return

    def answer(handler: Any, k: int) -> None:
        if how == "redirect" and handler.path != "/login":
            send(handler, 302, Location="/login")
        elif how == "range" and handler.headers.get("Range"):
            send(
                handler,
                206,
                PAGE,
                Content_Type="text/html",
                ETag='"1"',
                Content_Range=f"bytes 0-{len(PAGE) - 1}/{len(PAGE)}",
            )
        else:
            send(
                handler, 200, PAGE, Content_Type="text/html; charset=utf-8", Last_Modified=formatdate(1e9, usegmt=True)
            )

    certificate = None
    if scheme == "https":
        authority, certificate = new_certificate(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", authority)
    with Server(answer, certificate) as server:
        for name, value in {**BASES["az"](server.url), **BASES["gs"](server.url)}.items():
            monkeypatch.setenv(name, value)
        set_s3(monkeypatch, server.url)
        base = server.url if scheme.startswith("http") else f"{scheme}://bucket"
        place = {"file": "/m.safetensors", "index": "/m.safetensors.index.json"}.get(call, "/m")
        # A save reads one byte of the index: a page of another length is no answer to that.
        words = (
            "did not send what was requested"
            if (scheme, call, how) == ("s3", "save", "range")
            else "login page|web page"
        )
        with pytest.raises(StorageError, match=words):
            if call == "save":
                sync.save(TENSORS, base + place)
            elif call == "pull":
                pull(base + place, str(tmp_path / "here"))
            else:
                sync.load(base + place)


def test_c345_a_listing_that_is_empty_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>0</KeyCount></ListBucketResult>'
    )

    def answer(handler: Any, k: int) -> None:
        send(handler, 200, body) if "list-type" in handler.path else send(handler, 404)

    with Server(answer) as server:
        set_s3(monkeypatch, server.url)
        with pytest.raises(CheckpointNotFoundError):
            sync.load("s3://bucket/m")


@pytest.mark.slow
def test_c345_the_hub_too(zygote: Zygote, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    with Server(lambda handler, k: send(handler, 200, PAGE, Content_Type="text/html")) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        code = "import stio\ntry: stio.sync.load('hf://a/b')\nexcept stio.StorageError as error: print(error)"
        found = run_python(code, python=zygote.python)
        assert "HF_ENDPOINT" in found.stdout, found
