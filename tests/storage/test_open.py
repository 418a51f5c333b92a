"""Local files are read by `preadv` where the system has it, and through aiofiles elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fakes import write_checkpoint

import stio.sync
from stio.errors import CheckpointNotFoundError, UnsafePathError
from stio.storage import local
from stio.storage.async_files import AsyncFile
from stio.storage.checkpoint.open import open_checkpoint

TENSORS = {f"t{k}": torch.arange(1000) + k for k in range(5)}


@pytest.fixture(params=[1, 2])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", TENSORS, request.param)


def test_local_files_where_there_are_positional_reads(checkpoint: Path) -> None:
    assert local.HAVE_PREADV
    opened = open_checkpoint(checkpoint)
    assert all(isinstance(file, local.LocalFile) for file in opened.files)
    opened.close()


def test_async_files_elsewhere(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "HAVE_PREADV", False)
    index = list(checkpoint.glob("*.index.json"))
    for source in (checkpoint, *index, *([] if index else checkpoint.glob("*.safetensors"))):
        opened = open_checkpoint(source)
        assert all(isinstance(file, AsyncFile) for file in opened.files)
        opened.close()
        loaded = stio.sync.load(source)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    for missing in ("nowhere", "nowhere.safetensors"):
        with pytest.raises(CheckpointNotFoundError):
            stio.sync.load(checkpoint / missing)


def test_links_are_checked_in_both_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = write_checkpoint(tmp_path / "real", TENSORS)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to(real / "model.safetensors")
    for have_preadv in (True, False):
        monkeypatch.setattr(local, "HAVE_PREADV", have_preadv)
        with pytest.raises(UnsafePathError):
            stio.sync.load(tmp_path / "model")
        assert set(stio.sync.load(tmp_path / "model", follow_symlinks=True)) == set(TENSORS)
        assert set(stio.sync.load(tmp_path / "model" / "model.safetensors")) == set(TENSORS)


def test_b77_index_that_leads_out(tmp_path: Path) -> None:
    """Found in the directory it is as untrusted as a shard; named by the caller it may be a link."""
    real = write_checkpoint(tmp_path / "real", TENSORS, 2)
    (tmp_path / "model").mkdir()
    for file in real.iterdir():
        target = tmp_path / "model" / file.name
        target.symlink_to(file) if file.suffix == ".json" else target.write_bytes(file.read_bytes())
    with pytest.raises(UnsafePathError):
        stio.sync.load(tmp_path / "model")
    assert set(stio.sync.load(tmp_path / "model" / "model.safetensors.index.json")) == set(TENSORS)
