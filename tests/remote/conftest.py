"""Fixtures of the tests of remote stores."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock

sys.path.insert(0, str(Path(__file__).parent))

from proxy import Proxy, proxy_to
from servers import HttpServer, http_server, s3_server

from stio.remote import folder as remote_folder


@pytest.fixture(scope="session", autouse=True)
def _obstore() -> None:
    pytest.importorskip("obstore")


@pytest.fixture(autouse=True)
def _no_pauses(clock: Clock) -> None:
    """Pause for no time before a request is repeated."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reach the servers of the tests where the environment names a proxy."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[HttpServer]:
    with http_server() as running:
        yield running


@pytest.fixture(scope="session")
def _s3() -> Iterator[tuple[Any, str]]:
    pytest.importorskip("moto")
    pytest.importorskip("boto3")
    with s3_server() as running:
        yield running


@pytest.fixture
def s3(_s3: tuple[Any, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give a client of boto3, for a bucket named "bucket"; stio finds the server by the environment."""
    client, endpoint = _s3
    for name in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = client.list_objects_v2(Bucket="bucket").get("Contents", ())
    for one in found:
        client.delete_object(Bucket="bucket", Key=one["Key"])
    return client


@pytest.fixture
def _no_uploads(s3: Any) -> Iterator[None]:
    for one in s3.list_multipart_uploads(Bucket="bucket").get("Uploads", ()):
        s3.abort_multipart_upload(Bucket="bucket", Key=one["Key"], UploadId=one["UploadId"])
    yield


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make parts as small as a store allows."""
    monkeypatch.setattr(remote_folder, "PART_BYTES", 5 << 20)
    return 5 << 20


@pytest.fixture
def proxy(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Put a proxy before the store."""
    with proxy_to(int(os.environ["AWS_ENDPOINT_URL_S3"].rpartition(":")[2])) as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", running.url)
        yield running
