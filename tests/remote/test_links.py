"""Faults 436 and 438: what a URL names is judged by the answer, and not by its last characters."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import safetensors.torch
import torch
from remote.servers import Fault, HttpServer, Request

import stio
from stio import sync
from stio.remote.pulls import pull

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3)}
PATHS = ["/download?id=3", "/api/models/12345?token=SECRET&type=Model", "/f/5e884898da28047151d0e56f8dc62927", "/w.gz"]


@pytest.mark.parametrize("path", [*PATHS, "/w.bin", "/dir/model.ckpt?download=true", "/w.gguf"])
def test_c438_the_content_decides(server: HttpServer, path: str) -> None:
    server.put(path.partition("?")[0], safetensors.torch.save(WEIGHTS))
    url = server.url + path
    assert torch.equal(sync.load(url)["w"], WEIGHTS["w"])
    with sync.open(url) as checkpoint:
        assert list(checkpoint.keys()) == ["w"]


def test_c438_a_server_that_ignores_the_path(server: HttpServer) -> None:
    """One script answers all that begins with its name, and judges by the query."""

    class Same(dict[str, bytes]):
        def get(self, key: str, default: Any = None) -> Any:
            return safetensors.torch.save(WEIGHTS)

        __getitem__ = get

        def __contains__(self, key: object) -> bool:
            return True

    server.objects = Same()
    assert torch.equal(sync.load(f"{server.url}/download.php?file=7")["w"], WEIGHTS["w"])


@pytest.mark.parametrize("path", [*PATHS, "/w.pt", "/w.bin?raw=1", "/x.safetensors"])
def test_c438_a_file_of_another_kind_is_named(server: HttpServer, path: str, tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "w.pt")
    for content, said in (
        ((tmp_path / "w.pt").read_bytes(), "this is a file of torch.save, and .*; download it, then `stio convert"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2, 3) + bytes(64), "this is a GGUF file"),
        (json.dumps({"error": "no such model"}).encode(), "this is JSON text"),
    ):
        server.put(path.partition("?")[0], content)
        with pytest.raises(stio.FormatError, match=said) as caught:
            sync.load(server.url + path)
        assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("call", [sync.load, lambda url: sync.convert(url, "out.safetensors")])
@pytest.mark.parametrize("path", ["/w.bin", "/m/pytorch_model.bin.index.json", "/w.pt?X-Signature=SECRET"])
def test_c217_a_file_of_torch_save_at_a_url(
    server: HttpServer, path: str, call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(WEIGHTS, "w.pt")
    index = {"metadata": {}, "weight_map": {"w": "pytorch_model-00001-of-00001.bin"}}
    content = json.dumps(index).encode() if path.endswith(".json") else Path("w.pt").read_bytes()
    server.put(path.partition("?")[0], content)
    with pytest.raises(stio.StioError, match="stio convert") as caught:
        call(server.url + path)
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("path", ["/models/llama", "/models/llama/", "/models/llama?token=SECRET"])
@pytest.mark.parametrize("page", [b"", b"<!DOCTYPE html><html><title>Index of /models</title></html>"])
def test_c438_a_page_or_nothing_is_no_file(server: HttpServer, path: str, page: bytes) -> None:
    def fault(number: int, request: Request) -> Fault | None:
        return Fault(status=404) if "model.safetensors" in request.path or not page else None

    server.fault = fault
    server.put("/models/llama", page)
    server.put("/models/llama/", page)
    with pytest.raises(
        stio.CheckpointNotFoundError, match="the server has no model.*; give the URL of an index or of a"
    ):
        sync.load(server.url + path)


def test_c438_a_directory_is_still_one(server: HttpServer, tmp_path: Path) -> None:
    server.put("/m/model.safetensors", safetensors.torch.save(WEIGHTS))
    for url in (f"{server.url}/m", f"{server.url}/m/", f"{server.url}/m?token=SECRET"):
        assert torch.equal(sync.load(url)["w"], WEIGHTS["w"])


@pytest.mark.parametrize("key", ["models/weights", "w.bin", "w.dat"])
def test_c438_an_object_of_s3_without_the_suffix(s3: Any, key: str) -> None:
    s3.put_object(Bucket="bucket", Key=key, Body=safetensors.torch.save(WEIGHTS))
    assert torch.equal(sync.load(f"s3://bucket/{key}")["w"], WEIGHTS["w"])
    s3.put_object(Bucket="bucket", Key=key, Body=b"|TZR|" + bytes(64))
    with pytest.raises(stio.FormatError, match="this is a file of tensorizer"):
        sync.load(f"s3://bucket/{key}")


def test_c436_a_version_of_an_object_is_named(s3: Any, tmp_path: Path) -> None:
    import boto3

    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    content = safetensors.torch.save(WEIGHTS)
    version = s3.put_object(Bucket="versions", Key="w.safetensors", Body=content)["VersionId"]
    s3.put_object(Bucket="versions", Key="w.safetensors", Body=safetensors.torch.save({"newer": torch.ones(1)}))
    for call in (sync.load, lambda url: sync.save(WEIGHTS, url)):
        with pytest.raises(stio.StorageError, match="reads the newest version of an object only") as caught:
            call(f"s3://versions/w.safetensors?versionId={version}")
    code = str(caught.value).split("`")[1]
    file = tmp_path / "w.safetensors"
    eval(code, {"boto3": boto3, "BUCKET": "versions", "KEY": "w.safetensors", "FILE": str(file), "ID": version})
    assert torch.equal(sync.load(file)["w"], WEIGHTS["w"])


@pytest.mark.parametrize("name", ["last.ckpt", "w.bin", "w.safetensors"])
def test_c438_a_directory_that_is_named_like_a_file(s3: Any, name: str, tmp_path: Path) -> None:
    url = f"s3://bucket/run/{name}/"
    sync.save(WEIGHTS, url)
    without = [url.rstrip("/")] if name != "w.safetensors" else []
    for k, one in enumerate([url, *without]):
        assert torch.equal(sync.load(one)["w"], WEIGHTS["w"])
        pull(one, tmp_path / str(k))
        assert torch.equal(sync.load(tmp_path / str(k))["w"], WEIGHTS["w"])


def test_c438_a_directory_of_http_that_is_named_like_a_file(server: HttpServer, tmp_path: Path) -> None:
    server.put("/run/last.ckpt/model.safetensors", safetensors.torch.save(WEIGHTS))
    for k, end in enumerate(("/", "", "/?token=SECRET", "?token=SECRET")):
        assert torch.equal(sync.load(f"{server.url}/run/last.ckpt{end}")["w"], WEIGHTS["w"])
        pull(f"{server.url}/run/last.ckpt{end}", tmp_path / str(k))
    server.put("/run/last.ckpt", b"<!DOCTYPE html><html><title>Index of /run</title></html>")
    assert torch.equal(sync.load(f"{server.url}/run/last.ckpt")["w"], WEIGHTS["w"])


@pytest.mark.parametrize("suffix", [".bin", ".pt?raw=1"])
def test_c438_a_missing_file_is_named_itself(server: HttpServer, s3: Any, suffix: str) -> None:
    for url in [server.url, "s3://bucket"][: 1 if "?" in suffix else 2]:
        with pytest.raises(stio.CheckpointNotFoundError) as caught:
            sync.load(f"{url}/none{suffix}")
        assert "model.safetensors" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("/dl?id=3", "dl"),
        ("/real.bin", "real"),
        ("/w.gz", "w.gz"),
        ("/f/5e884898da28047151d0e56f8dc62927", "5e884898da28047151d0e56f8dc62927"),
        ("/a%20b?id=1", "model"),
        ("/.hidden?id=1", "model"),
        ("/w-00001-of-00002.bin", "model"),
    ],
)
def test_c438_pull_of_a_link(server: HttpServer, path: str, stored: str, tmp_path: Path) -> None:
    server.put(unquote(path.partition("?")[0]), safetensors.torch.save(WEIGHTS))
    result = pull(server.url + path, tmp_path / "m")
    assert list(result.files) == [f"{stored}.safetensors"]
    assert torch.equal(sync.load(tmp_path / "m")["w"], WEIGHTS["w"])
    assert pull(server.url + path, tmp_path / "m").fetched_bytes == 0


def test_c438_pull_of_an_object_without_the_suffix(s3: Any, tmp_path: Path) -> None:
    for key in ("links/weights", "links/real.bin"):
        s3.put_object(Bucket="bucket", Key=key, Body=safetensors.torch.save(WEIGHTS))
        target = tmp_path / key.replace(".", "-")
        pull(f"s3://bucket/{key}", target)
        assert torch.equal(sync.load(target)["w"], WEIGHTS["w"])


def test_c438_a_refused_link_is_named_itself(server: HttpServer, tmp_path: Path) -> None:
    server.fault = lambda number, request: Fault(status=403)
    for call in (sync.load, lambda url: pull(url, tmp_path / "m")):
        with pytest.raises(stio.StorageError, match="403") as caught:
            call(f"{server.url}/dl?id=3")
        assert "model.safetensors" not in str(caught.value)
    server.put("/m/model.safetensors", safetensors.torch.save(WEIGHTS))
    server.fault = lambda number, request: Fault(status=403) if request.path.startswith("/m?") else None
    assert torch.equal(sync.load(f"{server.url}/m?token=SECRET")["w"], WEIGHTS["w"])
