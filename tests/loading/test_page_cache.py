"""Ranks that share a host read through the page cache, so that a file is read once; one rank alone reads past it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeDevice
from support import ramp, require_equal, save_file

import stio.sync
from stio.loading.planned import host_is_shared
from stio.storage.local import LocalFile


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make files cold; return those that are read past the page cache."""
    found: list[str] = []

    def use_direct(file: LocalFile) -> bool:
        found.append(file.path)
        return True

    monkeypatch.setattr(LocalFile, "resident_fraction", lambda file: 0.0)
    monkeypatch.setattr(LocalFile, "use_direct", use_direct)
    return found


TENSORS = {"w": ramp(5_000_000)}
"""Too large to be read without asking."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_file(TENSORS, tmp_path_factory.mktemp("model") / "m.safetensors")


def load(file: Path, way: str) -> None:
    if way == "prefetch":
        with stio.sync.HostCache(64 << 20, device="cpu") as cache:
            cache.prefetch(file)
        return
    keywords: dict[str, Any] = {"device": FakeDevice()} if way == "device" else {"memory": "copy"}
    require_equal(stio.sync.load(file, **keywords), TENSORS)


ways = pytest.mark.parametrize("way", ["device", "copy", "prefetch"])


@pytest.mark.matrix
@ways
@pytest.mark.parametrize("told", [None, "1", "", "many"])
def test_one_rank_alone(
    monkeypatch: pytest.MonkeyPatch, direct: list[str], file: Path, way: str, told: str | None
) -> None:
    if told is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    load(file, way)
    assert direct == [str(file)]


@ways
def test_ranks_of_torchrun(monkeypatch: pytest.MonkeyPatch, direct: list[str], file: Path, way: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    load(file, way)
    assert direct == []


def test_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not host_is_shared()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for size, shared in ((1, False), (2, True), (8, True)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        assert host_is_shared() == shared
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # eight hosts, one rank each
    assert not host_is_shared()
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert not host_is_shared()


def test_a_real_process_group() -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        assert not host_is_shared()
    finally:
        torch.distributed.destroy_process_group()
