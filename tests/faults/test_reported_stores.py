"""Faults 331, 337, 341, 342, 343 and 345: environments, servers and stores as users have them."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from remote.servers import HttpServer, http_server
from safetensors.torch import save as as_bytes

import stio
from stio import sync
from stio.errors import CheckpointNotFoundError, StioError, StorageError
from stio.runtime.calls import Call
from stio.runtime.operation import Operation
from stio.runtime.workers import WorkerPool
from stio.storage.remote.requests import Patience
from stio.storage.remote.source import RemoteRoot
from stio.storage.remote.stores import new_store

TENSORS = {"w": torch.arange(1000.0), "v": torch.ones(3, 5)}
DATA = as_bytes(TENSORS)
QUICK = Patience(num_attempts=2, first_pause_seconds=0.01, stall_seconds=5)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def loads(url: str | RemoteRoot) -> None:
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


@pytest.mark.parametrize("save", [False, True], ids=["load", "save"])
@pytest.mark.parametrize(
    ("scheme", "name"),
    [(scheme, name) for scheme in BASES for name in (*BASES[scheme]("http://x"), *OTHERS[scheme])],
)
def test_c337_any_environment_is_an_answer_or_a_storage_error(
    scheme: str, name: str, save: bool, server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each variable of each store: missing, empty, with spaces, newlines, quotes, other schemes."""
    base = BASES[scheme](server.url)
    for path in ("/bucket/m.safetensors", "/account/bucket/m.safetensors"):
        server.put(path, DATA)
    for value in [None, *variants(base.get(name, ""))][:: 3 if save else 1]:
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


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\n\n"])
@pytest.mark.parametrize("name", sorted(BASES["s3"]("")))
def test_c337_values_are_stripped(name: str, end: str, server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file of a secret ends in is no part of the secret, and the request is signed without it."""
    server.put("/bucket/m.safetensors", DATA)
    for key, value in BASES["s3"](server.url).items():
        monkeypatch.setenv(key, value + end if key == name else value)
    loads("s3://bucket/m.safetensors")
    first = server.requests[0].headers
    assert "Credential=key/" in first["authorization"]
    assert "/eu-west-1/" in first["authorization"]
    assert first["x-amz-security-token"] == SECRET


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("AWS_ENDPOINT_URL_S3", "minio:9000", "without http://"),
        ("AWS_ENDPOINT_URL_S3", f"http://{SECRET}\n:9000", "line break"),
        ("AWS_ENDPOINT_URL_S3", "ftp://host", "another value"),
        ("AWS_ACCESS_KEY_ID", f"{SECRET}\nx", "line break"),
        ("AWS_SESSION_TOKEN", f"{SECRET} x", "a space"),
        ("AWS_REGION", "eu west", "a space"),
        ("AWS_SKIP_SIGNATURE", "maybe", "another value"),
        ("AZURE_STORAGE_ACCOUNT_NAME", "a\nb", "line break"),
        ("AZURE_STORAGE_ACCOUNT", "a b", "a space"),
        ("AZURE_STORAGE_KEY", f"{SECRET}!", "another value"),
        ("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=a;AccountKey={SECRET}!", "another value"),
        ("AZURE_STORAGE_TOKEN", f"{SECRET}\nx", "line break"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", f'"{SECRET}"', "another value"),
        ("GOOGLE_APPLICATION_CREDENTIALS", f'{{"private_key": "{SECRET}"}}', "the content"),
    ],
)
def test_c337_the_variable_is_named_and_its_value_is_not_shown(
    name: str, value: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = {"AW": "s3", "AZ": "az", "GO": "gs"}[name[:2]]
    base = BASES[scheme]("http://127.0.0.1:9")
    if name.startswith("AZURE_STORAGE_ACCOUNT"):
        base.pop("AZURE_STORAGE_ACCOUNT_NAME")
    for key, one in {**base, name: value}.items():
        monkeypatch.setenv(key, one)
    with pytest.raises(StorageError, match=f"{name} cannot be used; correct it, or unset it") as caught:
        sync.load(f"{scheme}://bucket/m.safetensors")
    assert found in str(caught.value.found)
    assert SECRET not in f"{caught.value} {caught.value!r}"


def test_c337_an_empty_variable_is_as_one_that_is_not_set(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("/bucket/m.safetensors", DATA)
    names = ("AWS_SESSION_TOKEN", "AWS_SKIP_SIGNATURE", "AWS_REGION", "AWS_ENDPOINT_URL_S3")
    for name, value in {**BASES["s3"](server.url), **dict.fromkeys(names, ""), "AWS_ENDPOINT_URL": server.url}.items():
        monkeypatch.setenv(name, value)
    loads("s3://bucket/m.safetensors")
    first = server.requests[0].headers
    assert "x-amz-security-token" not in first
    assert "/us-east-1/" in first["authorization"]


@pytest.mark.parametrize(("virtual", "host"), [("", "s3.eu-west-1."), ("true", "bucket.s3.eu-west-1.")])
def test_c337_an_empty_endpoint_is_that_of_amazon(virtual: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    settings = {**BASES["s3"](""), "AWS_ENDPOINT_URL": " ", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": virtual}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    store = new_store(RemoteRoot("s3://bucket").location)
    signed = obstore.sign(store, "GET", "x", timedelta(seconds=9))
    assert signed.startswith(f"https://{host}amazonaws.com/")


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
                lambda: sync.save(TENSORS, "s3://bucket/y.safetensors"),
            ):
                with pytest.raises(StioError):
                    call()
    with monkeypatch.context() as context:
        context.setattr(importlib_store(), "S3Store", panic)
        with pytest.raises(StorageError, match="panic"):
            sync.load("s3://bucket/x/")


def importlib_store() -> Any:
    return __import__("obstore.store").store


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


@pytest.mark.parametrize("name", ["HF_ENDPOINT", "HF_TOKEN"])
@pytest.mark.parametrize("value", ["http://127.0.0.1:9\n", "http://127.0.0.1:9 x", "ключ"])
def test_c337_the_hub_too(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    from support import run_python

    code = "import stio\ntry: stio.sync.load('hf://a/b')\nexcept stio.StorageError: print('typed')"
    values = {"HF_ENDPOINT": "http://127.0.0.1:9", name: value}
    for key, one in values.items():
        monkeypatch.setenv(key, one)
    assert "typed" in run_python(code).stdout
