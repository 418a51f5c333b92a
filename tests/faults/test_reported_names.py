"""Fault 312: destinations that look like a file of another name are refused, and `.sft` files load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run
from faults.save_helpers import generation, require_generation
from support import require_equal

import stio
from stio import sync
from stio.cli.verify import examine
from stio.compat.safetensors import safe_open
from stio.compat.safetensors.torch import save_file
from stio.distributed import StioStorageWriter
from stio.format.files.names import FileName
from stio.remote.hub import locate

FILES = {
    "flux.sft": "flux", "x.st": "x", "FLUX.SFT": "FLUX", "model.safetensors.tmp": "model", "w.safetensors.part": "w",
    "w.safetensors.bak": "w", "w.safetensors~": "w", "w.safetensors.1": "w", "w.safetensors.index": "w",
    "w.safetensors.new.tmp": "w", "w.safetensors.index.json": "w", "w.gguf": "w", "w.pt.tmp": "w",
    "w.bin.index.json": "w", "w.ggml": "w", "w.yaml": "w", "w.txt": "w", "w.llamafile": "w", "w.nemo": "w",
    "llama-3.1.sft": "llama-3.1", "w.SafeTensors.tmp": "w", "w.ckpt.incomplete": "w", "w.tar.gz": "w.tar",
    "w.safetensors.lock": "w", "w.dduf": "w",
}  # fmt: skip
DIRECTORIES = [
    "v1.5", "llama-3.1-8b", "checkpoint-1.2", "out.d", "step-100.tmp", "out.tmp", "model.safetensors-shards", "sft",
    ".sft", "model.sft.d", "run.2026-01-01", "epoch=3-step=4.5", "qwen2.5-coder", "out.new", "a.b.c", "stable.diffusion",
    "model.fp16", "checkpoint.1", "best", "w.ptx", "w.stx", "v0.1.2-rc.1",
]  # fmt: skip


def by_saver(where: Path) -> None:
    with sync.Saver() as saver:
        saver.save(generation(1), where)


def by_convert(where: Path) -> None:
    source = where.parent / "source.safetensors"
    sync.save(generation(1), source)
    try:
        sync.convert(source, where)
    finally:
        source.unlink()


SAVES: list[Callable[[Path], Any]] = [
    lambda where: sync.save(generation(1), where),
    lambda where: sync.save(generation(1), str(where), max_shard_size=100),
    lambda where: sync.save_state({"a": generation(1)}, where),
    by_saver,
    by_convert,
]


@pytest.mark.matrix
@pytest.mark.parametrize("name", FILES)
def test_c312_a_name_of_a_file_is_refused_and_the_advice_works(tmp_path: Path, name: str) -> None:
    for save in SAVES:
        with pytest.raises(
            ValueError, match=rf"{re.escape(name)}' looks like a file of another kind or name"
        ) as caught:
            save(tmp_path / name)
        assert os.listdir(tmp_path) == []
    stem = FILES[name]
    assert f"'{stem}.safetensors' means one file, '{stem}' a directory" in str(caught.value)
    assert re.match(r".*add a slash\Z", str(caught.value), re.DOTALL)
    sync.save(generation(1), tmp_path / f"{stem}.safetensors")
    require_generation(tmp_path / f"{stem}.safetensors", 1)
    if not FileName(stem).advice_for_destination:
        sync.save(generation(2), tmp_path / stem)
        require_generation(tmp_path / stem, 2)
    sync.save(generation(3), f"{tmp_path / name}/")
    require_generation(tmp_path / name, 3)
    sync.save(generation(4), tmp_path / name)  # a directory now
    require_generation(tmp_path / name, 4)


@pytest.mark.matrix
@pytest.mark.parametrize("name", DIRECTORIES)
def test_c312_other_names_with_dots_are_directories(tmp_path: Path, name: str) -> None:
    for number, save in enumerate(SAVES[:2]):
        save(tmp_path / str(number) / name)
        require_generation(tmp_path / str(number) / name, 1)


def test_c312_a_file_of_such_a_name_stays(tmp_path: Path) -> None:
    save_file(generation(1), tmp_path / "w.sft")
    for save in SAVES:
        with pytest.raises(ValueError, match=r"'w\.safetensors' means one file"):
            save(tmp_path / "w.sft")
    require_generation(tmp_path / "w.sft", 1)


@pytest.mark.parametrize("name", ["flux.sft", "model.safetensors.tmp"])
def test_c312_stores_ranks_and_commands(tmp_path: Path, name: str) -> None:
    pytest.importorskip("obstore")
    with pytest.raises(ValueError, match="looks like a file of another kind or name"):
        sync.save(generation(1), f"s3://bucket/models/{name}")
    with pytest.raises(ValueError, match="looks like a file of another kind or name"):
        StioStorageWriter(tmp_path / name).validate_checkpoint_id(tmp_path / name)
    sync.save(generation(1), tmp_path / "m.safetensors")
    line = refused("convert", tmp_path / "m.safetensors", tmp_path / name)
    assert "looks like a file of another kind or name" in line
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors"]


# `.sft` files are read.


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    sync.save({**generation(1), "tied": generation(1)["a"]}, tmp_path / "ae.safetensors", hash="sha256")
    (tmp_path / "ae.safetensors.manifest.json").unlink()
    return (tmp_path / "ae.safetensors").rename(tmp_path / "ae.sft")


@pytest.mark.matrix
@pytest.mark.anyio
async def test_c312_sft_files_load(tmp_path: Path, sft: Path) -> None:
    expected = {**generation(1), "tied": generation(1)["a"]}
    (tmp_path / "folder").mkdir()
    os.link(sft, tmp_path / "folder" / "ae.sft")
    module = torch.nn.ParameterDict(dict(generation(0)))
    for source in (sft, str(sft), tmp_path / "folder"):
        require_equal(await stio.load(source), expected)
        async with stio.open(source) as checkpoint:
            assert checkpoint.keys() == ["a", "b", "tied"]
            assert (await checkpoint.read("b")).equal(expected["b"])
        assert (await stio.load_into(module, source, strict=False)).unexpected == ("tied",)
        require_equal(dict(module.state_dict()), generation(1))
        for number, destination in enumerate(("x", "y.safetensors")):
            await stio.convert(source, tmp_path / f"{number}-{destination}")
            require_equal(await stio.load(tmp_path / f"{number}-{destination}"), expected)
    with safe_open(str(sft), "pt") as file:
        assert file.get_tensor("a").equal(expected["a"])


@pytest.mark.parametrize("command", ["inspect", "verify", "load", "diff", "convert"])
def test_c312_commands_read_sft_files(tmp_path: Path, sft: Path, command: str) -> None:
    sync.save(sync.load(sft), tmp_path / "again.safetensors")
    more = {"diff": [tmp_path / "again.safetensors"], "convert": [tmp_path / "new.safetensors"]}.get(command, [])
    run(command, sft, *more)
    if command == "convert":
        require_equal(sync.load(more[0]), sync.load(sft))


def test_c312_a_directory_prefers_safetensors_and_two_sft_files_are_ambiguous(tmp_path: Path, sft: Path) -> None:
    os.link(sft, tmp_path / "second.sft")
    with pytest.raises(stio.AmbiguousCheckpointError, match=r"ae\.sft, second\.sft"):
        sync.load(tmp_path)
    sync.save(generation(2), tmp_path / "model.safetensors")
    require_generation(tmp_path, 2)
    (warning,) = examine(str(tmp_path)).warnings
    assert warning.startswith(f"{tmp_path}: model.safetensors is loaded, and ") and ".sft" in warning


def test_c312_urls_of_sft_files_name_a_file() -> None:
    source = pytest.importorskip("stio.remote.source")
    root, name = source.open_url("s3://bucket/models/ae.sft")
    assert (root.location.key, name) == ("models", "ae.sft")
    assert locate("hf://org/flux/vae/ae.sft")[1] == "ae.sft"
