"""The command line with URLs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from servers import HttpServer

import stio
from stio.cli.main import main

URL_PARTS = ("//", "//me:PASSWORD@")


@pytest.fixture
def url(server: HttpServer, tmp_path: Path) -> str:
    """Put a checkpoint into a store; return its URL, with a password and a signature."""
    stio.sync.save({"w": torch.arange(5000.0), "b": torch.zeros(3)}, tmp_path / "m.safetensors", hash="sha256")
    for path in tmp_path.iterdir():
        server.put(f"/{path.name}", path.read_bytes())
    return f"{server.url.replace(*URL_PARTS)}/m.safetensors?signature=SECRET"


def run(*words: str, status: int = 0) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == status, result.output
    shown = f"{result.output}{result.stderr}"
    assert "SECRET" not in shown
    assert "PASSWORD" not in shown
    return shown


def test_commands(url: str, server: HttpServer, tmp_path: Path) -> None:
    shown = f"{server.url}/m.safetensors"
    assert run("inspect", url).startswith(f"{shown}: 2 tensors")
    assert "ok" in run("verify", "--hash-required", "--no-progress", url)
    assert json.loads(run("load", url, "--device", "cpu", "--json", "--no-progress"))["path"] == shown
    assert "equal" in run("diff", url, str(tmp_path / "m.safetensors"), "--no-progress")
    run("convert", url, str(tmp_path / "again.safetensors"), "--no-progress")
    assert "equal" in run("diff", url, str(tmp_path / "again.safetensors"), "--no-progress")


def test_damage_is_found(url: str, server: HttpServer) -> None:
    data = server.objects["/m.safetensors"]
    server.put("/m.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{server.url}/m.safetensors" in run("verify", "--no-progress", url, status=1)


def test_errors(url: str, server: HttpServer) -> None:
    for command in (("inspect",), ("verify", "--no-progress"), ("load", "--no-progress", "--device", "cpu")):
        shown = run(*command, url.replace("m.safe", "none.safe"), status=2)
        assert f"{server.url}/none.safetensors: the store has no such object: 404 Not Found; check the path" in shown
    assert "names no bucket" in run("inspect", "s3:///x", status=2)
    for nowhere in (url, "hf://owner/name"):
        assert "URLs of s3, gs, az" in run("gc", nowhere, status=2)
