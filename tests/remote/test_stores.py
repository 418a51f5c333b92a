"""URLs, and stores made by the conventions of their providers."""

from __future__ import annotations

import base64
import errno
import hmac
import random
import shutil
import sys
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import torch
from proxy import Proxy
from servers import Fault, HttpServer, azure_server, http_server, new_certificate

import stio
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, ConcurrentSaveError, StorageError
from stio.remote.requests import Patience
from stio.remote.save import RemoteDestination
from stio.remote.source import RemoteRoot, open_url
from stio.remote.stores import locate, new_store
from stio.storage.base import Source
from stio.testing import SourceContract, read_guarded
from stio.text import is_url, without_secrets

DATA = random.Random(5).randbytes(300_000)
PATIENT = Patience(num_attempts=2, first_pause_seconds=0.01, stall_seconds=5)


@pytest.mark.parametrize(
    ("url", "store", "key"),
    [
        ("s3://bucket/a/b", "bucket", "a/b"),
        ("S3://bucket", "bucket", ""),
        ("s3://bucket/a%20b/", "bucket", "a%20b"),
        ("gs://bucket/x", "bucket", "x"),
        ("az://container/x", "container", "x"),
        ("http://host:80/a%20b/c", "http://host:80/", "a b/c"),
        ("https://u:p@host/a?sig=1&x=2#f", "https://u:p@host/?sig=1&x=2", "a"),
        ("https://host", "https://host/", ""),
    ],
)
def test_locate(url: str, store: str, key: str) -> None:
    found = locate(url)
    assert (found.store, found.key) == (store, key)
    assert "sig" not in f"{found} {found.shown}"


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///key", "az://", "https://", "http:///x", "http://host:port/x", "http://[::1/x"]
)
def test_urls_that_name_nothing(url: str) -> None:
    with pytest.raises(stio.StioError, match=r"names no (bucket|container|host)|is no URL"):
        locate(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://me:SECR/ET@host/x", "percent-encoded"),
        ("s3://AKIA:SECR/ET@bucket/x", "from the environment"),
        ("s3://AKIA:SECRET@bucket/x", "from the environment"),
        ("s3://bucket/x.safetensors?X-Amz-Date=1&X-Amz-Signature=SECRET", "https://"),
        ("gs://bucket/x?X-Goog-Signature=SECRET", "https://"),
        ("az://container/x?sv=1&sig=SECRET", "https://"),
    ],
)
def test_urls_with_secrets_in_a_wrong_place(url: str, words: str) -> None:
    with pytest.raises(stio.StioError, match=words) as caught:
        locate(url)
    shown = f"{caught.value} {caught.value!r} {caught.value.__cause__} {vars(caught.value)}"
    for secret in ("SECR", "ET@", "AKIA"):
        assert secret not in shown
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_names_that_are_no_secrets() -> None:
    for url, key in (("s3://b/v@1?x/y", "v@1?x/y"), ("s3://b/design=1/x", "design=1/x")):
        assert locate(url).key == key
    assert locate("s3://arn:aws:s3:eu:1:accesspoint/p/x").store.startswith("arn:")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:p@host/a?sig=1#f", "https://host/a"),
        ("s3://bucket/key?x", "s3://bucket/key"),
        ("az://a@b/c", "az://b/c"),
        ("model/a?b", "model/a?b"),
        ("https://host?sig=1", "https://host"),
        ("s3:/b/x?sig=abc", "s3:/b/x"),
        ("gs:/k:secret@b/x", "gs:/b/x"),
        ("of:/a?b", "of:/a?b"),
        ("http:/user:secret@host/m", "http:/host/m"),
        ("https://user:a#secret@host/m", "https://host/m"),
        ("https://user:a/secret@host/m", "https://host/m"),
        ("https://user:a#b@secret@host?sig=1", "https://host"),
        ("https://host:8080/model@v1/x", "https://host:8080/model@v1/x"),
        ("https://[::1]:80/model@v1", "https://[::1]:80/model@v1"),
        ("hf://owner/name@main", "hf://owner/name@main"),
    ],
)
def test_without_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://b", "HTTPS://h", "az://c/x", "hf://a/b")))
    assert not any(map(is_url, ("hdfs://a/b", "s3:/b", "model", "file:///x", Path("s3://b"), b"s3://b", None)))


@pytest.mark.parametrize(
    ("url", "root", "name"),
    [
        ("s3://bucket/a/m.safetensors", "s3://bucket/a", "m.safetensors"),
        ("s3://bucket/m.safetensors", "s3://bucket", "m.safetensors"),
        ("s3://bucket/a/m.safetensors.index.json", "s3://bucket/a", "m.safetensors.index.json"),
        ("s3://bucket/a/", "s3://bucket/a", ""),
        ("s3://bucket", "s3://bucket", ""),
    ],
)
def test_files_and_directories(url: str, root: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    found, found_name = open_url(url)
    assert (found.path, found_name) == (root, name)


@pytest.mark.costly("a server that stands for a store, in the same process")
class TestS3Source(SourceContract):
    """The tests of all storages, over S3."""

    DATA = random.Random(9).randbytes((128 << 10) + 3 * 4096 + 577)

    @pytest.fixture(autouse=True)
    def _s3(self, s3: Any) -> None:
        self.s3 = s3

    def create(self, directory: Path, data: bytes) -> Source:
        self.overwrite(data)
        return RemoteRoot("s3://bucket/dir", patience=PATIENT).open("a.bin")

    def overwrite(self, data: bytes) -> None:
        self.s3.put_object(Bucket="bucket", Key="dir/a.bin", Body=data)

    def test_c90_shrunk_file(self, source: Source) -> None:
        """Unlike a file, a replaced object has none of the old bytes."""
        self.overwrite(self.DATA[:140_000])
        with pytest.raises(ChangedDuringReadError):
            read_guarded(source, 132_000, 100)


def test_s3_lists_what_is_in_a_directory(s3: Any) -> None:
    for key in ("dir/b", "dir/a", "dir/below/c", "directory/d", "top"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"x")
    assert RemoteRoot("s3://bucket/dir").listdir() == ["a", "b"]
    assert RemoteRoot("s3://bucket/dir/below/").listdir() == ["c"]
    assert RemoteRoot("s3://bucket").listdir() == ["top"]
    assert RemoteRoot("s3://bucket/none").listdir() == []


def test_s3_an_object_that_stands_for_a_directory(s3: Any) -> None:
    for key in ("dir/", "dir/a"):
        s3.put_object(Bucket="bucket", Key=key, Body=b"")
    assert RemoteRoot("s3://bucket/dir").listdir() == ["a"]


def test_s3_odd_names(s3: Any, proxy: Proxy) -> None:
    s3.put_object(Bucket="bucket", Key="a b/ü+%.bin", Body=DATA)
    source = RemoteRoot("s3://bucket/a b", patience=PATIENT).open("ü+%.bin")
    proxy.fault = lambda k, method, path: "refused" if k == 1 else None
    assert read_guarded(source, 200_000, 1000) == DATA[200_000:201_000]
    _, first, second = proxy.requests
    assert first == second
    assert "Signature" not in f"{source!r} {source.path}"


def test_s3_missing_bucket_and_key(s3: Any) -> None:
    with pytest.raises(CheckpointNotFoundError, match="NoSuchBucket"):
        RemoteRoot("s3://nosuchbucket/x", patience=PATIENT).open("a")
    with pytest.raises(CheckpointNotFoundError, match="NoSuchKey"):
        RemoteRoot("s3://bucket/x", patience=PATIENT).open("a")
    with pytest.raises(CheckpointNotFoundError, match="NoSuchBucket"):
        RemoteRoot("s3://nosuchbucket/x", patience=PATIENT).listdir()


PROFILES = """
[default]
aws_access_key_id = default-key
aws_secret_access_key = secret
[other]
aws_access_key_id = other-key
aws_secret_access_key = secret
aws_session_token = token
"""


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"AWS_PROFILE": "default"}, "default-key"),
        ({"AWS_PROFILE": "other"}, "other-key"),
        ({"AWS_DEFAULT_PROFILE": "other"}, "other-key"),
        ({"AWS_PROFILE": "other", "AWS_ACCESS_KEY_ID": "from-env", "AWS_SECRET_ACCESS_KEY": "secret"}, "from-env"),
    ],
)
def test_s3_profiles(
    s3: Any, server: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    """Keys come from the environment, else from the profile that it names."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(PROFILES)
    (tmp_path / ".aws/config").write_text(
        f"[default]\nendpoint_url={server.url}\n[profile other]\nendpoint_url={server.url}\nregion=eu-west-9\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name)
    if "AWS_ACCESS_KEY_ID" in environment:  # then no profile is read, and no endpoint of one
        environment = {**environment, "AWS_ENDPOINT_URL": server.url}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    server.put("/bucket/a", b"x")
    RemoteRoot("s3://bucket").open("a")
    headers = server.requests[-1].headers
    assert f"Credential={expected}/" in headers["authorization"]
    assert ("/eu-west-9/" in headers["authorization"]) == (expected == "other-key")
    assert headers.get("x-amz-security-token") == ("token" if expected == "other-key" else None)


def test_s3_a_profile_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(StorageError, match="AWS profile 'none' gives no credentials"):
        RemoteRoot("s3://bucket")
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(ImportError, match="pip install boto3"):
        RemoteRoot("s3://bucket")
    RemoteRoot("s3://bucket", credential_provider=dict)  # needs no profile


def test_s3_settings_are_passed_through(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server.put("/bucket/a", b"x")
    config = {"endpoint": server.url, "access_key_id": "given", "secret_access_key": "s", "region": "eu-1"}
    RemoteRoot("s3://bucket", config=config, client_options={"user_agent": "me"}).open("a")
    assert "Credential=given/" in server.requests[-1].headers["authorization"]
    assert server.requests[-1].headers["user-agent"] == "me"
    with pytest.raises(StorageError, match="settings"):
        RemoteRoot("s3://bucket", config={"no_such_setting": "x"})


@pytest.mark.parametrize("name", ["azure_endpoint", "azure_storage_endpoint", "endpoint"])
def test_azure_by_http(server: HttpServer, name: str) -> None:
    """An endpoint without TLS is one under each of its names."""
    config = {name: f"{server.url}/account", "account_name": "account", "skip_signature": "true"}
    with pytest.raises(CheckpointNotFoundError):
        RemoteRoot("az://box", config=config, patience=PATIENT).open("a")
    assert [request.path for request in server.requests] == ["/account/box/a"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A certificate of an unknown authority is an error in words; the environment can name the authority."""
    authority, certificate = new_certificate(tmp_path)
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with http_server(certificate=certificate) as server:
        server.put("/a", b"x")
        with pytest.raises(StorageError, match="certificate is not accepted; SSL_CERT_FILE") as caught:
            RemoteRoot(server.url, patience=PATIENT).open("a")
        assert "UnknownIssuer" in str(caught.value)
        with pytest.raises(StorageError, match="broke|answer|certificate"):  # no TLS to a server of TLS
            RemoteRoot(server.url.replace("https", "http"), patience=PATIENT).open("a")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", authority)
        assert RemoteRoot(server.url, patience=PATIENT).open("a").identity.nbytes == 1


def test_a_redirect_gets_no_password(server: HttpServer) -> None:
    with http_server() as other:
        other.put("/a.bin", DATA)
        server.fault = lambda number, request: Fault(status=307, location=f"{other.url}/a.bin")
        source = RemoteRoot(server.url.replace("//", "//me:pw@"), patience=PATIENT).open("a.bin")
        assert read_guarded(source, 200_000, 10) == DATA[200_000:200_010]
        assert all("authorization" in request.headers for request in server.requests)
        assert len(other.requests) == 2
        assert not any("authorization" in request.headers for request in other.requests)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["without TLS", "round and round", "to a file"])
def test_a_redirect_that_is_not_followed(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority, certificate = new_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", authority)
    with http_server(certificate=certificate) as server, http_server() as other:
        other.put("/a.bin", DATA)
        to = {"without TLS": f"{other.url}/a.bin", "round and round": "/a.bin", "to a file": "file:///etc/passwd"}[kind]
        server.fault = lambda number, request: Fault(status=302, location=to)
        with pytest.raises(StorageError, match="not followed; .* give the URL of that place") as caught:
            RemoteRoot(server.url, patience=PATIENT).open("a.bin")
        assert "attempts" not in str(caught.value)
        assert other.requests == []


def test_tls_to_a_server_without(server: HttpServer) -> None:
    with pytest.raises(StorageError) as caught:
        RemoteRoot(server.url.replace("http", "https"), patience=PATIENT).open("a")
    assert "a server without TLS has http://" in str(caught.value)


AZURITE = shutil.which("azurite-blob")
AZURITE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # in its manual
)


@pytest.mark.skipif(AZURITE is None, reason="no azurite here (npm install azurite)")
def test_azure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A store is found by obstore's variables; its answers have ETags."""
    obstore, stores = pytest.importorskip("obstore"), pytest.importorskip("obstore.store")
    with azure_server(str(AZURITE), tmp_path) as endpoint:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
        settings = {"account_name": "devstoreaccount1", "account_key": AZURITE_KEY, "endpoint": endpoint}
        store = stores.AzureStore("box", config=settings, client_options={"allow_http": True})
        make_container(endpoint)
        obstore.put(store, "dir/a.bin", DATA)
        root = RemoteRoot("az://box/dir", patience=PATIENT)
        assert root.listdir() == ["a.bin"]
        source = root.open("a.bin")
        assert read_guarded(source, 200_000, 1000) == DATA[200_000:201_000]
        source.check_unchanged()
        obstore.put(store, "dir/a.bin", DATA[::-1])
        with pytest.raises(ChangedDuringReadError):
            read_guarded(source, 200_000, 1000)
        with pytest.raises(ChangedDuringReadError):
            source.check_unchanged()
        with pytest.raises(CheckpointNotFoundError):
            root.open("b.bin")
        save_and_load(obstore, store)


def save_and_load(obstore: Any, store: Any) -> None:
    """Save to Azure: a directory twice, a file in parts, and a commit that comes too late."""
    for number in (1, 2):
        tensors = {"w": torch.full((3 << 20,), float(number)), "v": torch.ones(3)}
        for url in ("az://box/m", "az://box/x.safetensors"):
            stio.sync.save(tensors, url, max_shard_size=None if "." in url else 9 << 20)
            found = stio.sync.load(url)
            assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert len(obstore.list(store, "m").collect()) == 3
    transaction = RemoteDestination(RemoteRoot("az://box/m")).begin(num_shards=1)
    stio.sync.save(tensors, "az://box/m")
    with pytest.raises(ConcurrentSaveError):
        transaction.commit(index=b"{}")


def make_container(endpoint: str) -> None:
    """Make a container named "box", which obstore does not."""
    date = formatdate(usegmt=True)
    lines = [
        "PUT",
        *[""] * 11,
        f"x-ms-date:{date}",
        "x-ms-version:2021-08-06",
        "/devstoreaccount1/devstoreaccount1/box",
    ]
    text = "\n".join([*lines, "restype:container"])
    signature = base64.b64encode(hmac.digest(base64.b64decode(AZURITE_KEY), text.encode(), "sha256")).decode()
    headers = {
        "x-ms-date": date,
        "x-ms-version": "2021-08-06",
        "Content-Length": "0",
        "Authorization": f"SharedKey devstoreaccount1:{signature}",
    }
    request = urllib.request.Request(f"{endpoint}/box?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request).close()


@pytest.mark.parametrize(
    ("url", "settings", "words"),
    [
        ("s3://b", {"config": {"regoin": "x"}}, "'regoin' is not valid for store 'S3'"),
        ("s3://b", {"client_options": {"timeot": "5s"}}, "key: timeot"),
        ("https://host", {"client_options": {"region": "x"}}, "region"),
    ],
)
def test_unknown_settings_are_named(url: str, settings: Any, words: str) -> None:
    with pytest.raises(StorageError, match="the settings for this store are wrong") as caught:
        RemoteRoot(url, **settings).open("a")
    assert words in str(caught.value)


def test_certificates_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "authority.pem"
    path.touch()
    monkeypatch.setenv("SSL_CERT_FILE", str(path))

    def read_bytes(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, "")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(StorageError, match="reading the certificates of SSL_CERT_FILE failed") as caught:
        new_store(locate("https://host/x"))
    assert (caught.value.path, caught.value.errno) == (str(path), errno.EACCES)
