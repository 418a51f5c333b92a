"""403, 405, 406, 431, 432, 434. Files that other programs have written, or left beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from distributed.ranks import run_ranks
from safetensors.torch import load_file, save, save_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stio
from stio import sync
from stio.cli.main import main
from stio.cli.verify import examine

ONE = {"w": torch.ones(4)}
OTHER = {"w": torch.zeros(4)}


def write(path: Path, tensors: dict[str, torch.Tensor] = OTHER, metadata: dict[str, str] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata)


def write_index(directory: Path, shards: dict[str, str], name: str = "model", **metadata: Any) -> None:
    directory.mkdir(exist_ok=True)
    text = json.dumps({"metadata": metadata, "weight_map": shards})
    (directory / f"{name}.safetensors.index.json").write_text(text)


# 403: `total_parameters`, as transformers writes it.


def test_c403_convert_keeps_the_number_of_parameters(tmp_path: Path) -> None:
    write(tmp_path / "m/model-00001-of-00001.safetensors", {"a": torch.ones(4), "b": torch.ones(8)})
    shards = dict.fromkeys("ab", "model-00001-of-00001.safetensors")
    write_index(tmp_path / "m", shards, total_size=48, total_parameters=12)
    sync.convert(tmp_path / "m", tmp_path / "cut", max_shard_size=16, dtype="bfloat16")
    index = json.loads((tmp_path / "cut/model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 24, "total_parameters": 12}
    sync.convert(tmp_path / "cut", tmp_path / "one.safetensors")
    assert sync.load(tmp_path / "one.safetensors").keys() == {"a", "b"}
    with sync.open(tmp_path / "cut") as checkpoint:
        sync.save({"a": torch.ones(4)}, tmp_path / "part", max_shard_size=8, metadata=checkpoint.metadata)
    assert "total_parameters" not in (tmp_path / "part/model.safetensors").read_bytes().decode(errors="replace")


# 405: shards of fastsafetensors' ParallelSaver.


def marked(path: Path, tensors: dict[str, torch.Tensor], name: str | None, index: int, count: int) -> None:
    mark = {"fst.shard.index": str(index), "fst.shard.count": str(count)}
    write(path, tensors, mark | ({} if name is None else {"fst.shard.set": name}))


def fast_set(folder: Path, names: list[str | None], indices: list[int] | None = None, count: int = 2) -> Path:
    for k, name in enumerate(names):
        path = folder / f"model-{k + 1:05d}-of-{len(names):05d}.safetensors"
        marked(path, {f"w{k}": torch.full((2,), float(k))}, name, (indices or [0, 1])[k], count)
    return folder


def test_c405_a_complete_set_is_loaded(tmp_path: Path) -> None:
    assert sync.load(fast_set(tmp_path / "m", ["a" * 32, "a" * 32])).keys() == {"w0", "w1"}


@pytest.mark.parametrize(
    ("names", "indices", "count", "why"),
    [
        (["a", "b"], [0, 1], 2, "several saves.*found a and b"),
        (["a", None], [0, 1], 2, "several saves"),
        (["a", "a"], [0, 0], 2, "shards are missing"),
        (["a", "a"], [0, 1], 3, "shards are missing.*expected 3 shards, found 2"),
        (["a", "a"], [1, 2], 2, "shards are missing"),
    ],
)
def test_c405_other_sets_are_refused(tmp_path: Path, names: Any, indices: Any, count: int, why: str) -> None:
    folder = fast_set(tmp_path / "m", names, indices, count)
    for call in (sync.load, lambda path: sync.convert(path, tmp_path / "out")):
        with pytest.raises(stio.IndexFormatError, match=why):
            call(folder)
    assert sync.load(folder / "model-00001-of-00002.safetensors").keys() == {"w0"}


def test_c405_a_shard_without_marks_or_with_another_name(tmp_path: Path) -> None:
    folder = fast_set(tmp_path / "m", ["a", "a"])
    write(folder / "model-00002-of-00002.safetensors", {"w1": torch.ones(2)})
    with pytest.raises(stio.IndexFormatError, match="several saves"):
        sync.load(folder)
    marked(tmp_path / "n/model.safetensors", ONE, "a", 0, 2)
    with pytest.raises(stio.IndexFormatError, match="shards are missing"):
        sync.load(tmp_path / "n")


# 406: parts of ranks, by torch's HuggingFaceStorageWriter.


def part(path: Path, rows: tuple[int, int], **more: torch.Tensor) -> None:
    begins = {"w": {"saved_offsets": [rows[0], 0]}} | {name: {"saved_offsets": [0]} for name in more}
    metadata = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"}
    write(path, {"w": torch.arange(8.0).view(4, 2)[slice(*rows)].contiguous(), **more}, metadata)


def of_ranks(folder: Path) -> Path:
    part(folder / "shard-00001-model-00001-of-00001.safetensors", (0, 2), b=torch.ones(3))
    part(folder / "shard-00002-model-00001-of-00001.safetensors", (2, 4))
    return folder


def test_c406_a_directory_of_ranks_is_refused(tmp_path: Path) -> None:
    folder = of_ranks(tmp_path / "m")
    for call in (sync.load, sync.load_state, lambda path: sync.convert(path, tmp_path / "out")):
        for strict in ({}, {"strict": False}) if call is sync.load else ({},):
            with pytest.raises(stio.CheckpointNotFoundError, match="several ranks.*HuggingFaceStorageReader") as caught:
                call(folder, **strict)
            assert "consolidate_safetensors_files" in str(caught.value)
            assert "path of the one you mean" not in str(caught.value)
    for names in ([1, 1], [1, 2]):  # also if each rank has several files
        for rank in (1, 2):
            for k in names:
                part(tmp_path / f"n/shard-{rank:05d}-model-{k:05d}-of-00002.safetensors", (2 * rank - 2, 2 * rank))
    with pytest.raises(stio.CheckpointNotFoundError, match="several ranks"):
        sync.load(tmp_path / "n")
    of_ranks(tmp_path / "run/step-1")
    with pytest.raises(stio.CheckpointNotFoundError, match="several ranks"):
        stio.latest(tmp_path / "run")


def test_c406_one_file_of_a_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = sorted(of_ranks(tmp_path / "m").iterdir())
    with pytest.raises(stio.IndexFormatError, match="one rank's part of tensor 'w'.*HuggingFaceStorageReader"):
        sync.load(second)
    with pytest.raises(stio.IndexFormatError, match="one rank's part of tensor 'w'"):
        sync.load(second.rename(tmp_path / "renamed.safetensors"))
    assert not caplog.records
    assert sync.load(tmp_path / "renamed.safetensors", strict=False)["w"].shape == (2, 2)
    assert "renamed.safetensors holds one rank's part of its tensors" in caplog.text
    caplog.clear()
    assert sync.load(first)["w"].shape == (2, 2)  # torch stores no shape: it may be whole
    assert "shard-00001-model-00001-of-00001.safetensors may hold one rank's part" in caplog.text
    module = nn.Module()
    module.w = nn.Parameter(torch.zeros(4, 2))
    with pytest.raises(stio.MismatchError):
        sync.load_into(module, first, strict=False)


def test_c406_verify_finds_no_damage_in_a_part(tmp_path: Path) -> None:
    """A part is no checkpoint, and a load refuses it. Its bytes are those that the rank wrote."""
    _, second = sorted(of_ranks(tmp_path / "m").iterdir())
    done = CliRunner().invoke(main, ["verify", str(second)])
    assert done.exit_code == 0
    assert (
        done.stdout.startswith("warning: ") and f": {second.name} holds one rank's part of its tensors" in done.stdout
    )
    assert f"{second}: ok, header and sizes fit (1 tensor, 16 B)" in done.stdout
    with open(second, "r+b") as file:
        file.truncate(second.stat().st_size - 1)
    assert CliRunner().invoke(main, ["verify", str(second)]).exit_code == 1
    assert CliRunner().invoke(main, ["verify", str(second.parent)]).exit_code == 2


def test_c406_only_parts_that_were_not_joined(tmp_path: Path) -> None:
    of_ranks(tmp_path / "sharded")
    with pytest.raises(
        stio.CheckpointNotFoundError, match="sharded/ may hold parts of ranks.*HuggingFaceStorageReader"
    ):
        sync.load(tmp_path)
    sync.save(ONE, tmp_path / "model.safetensors")
    assert sync.load(tmp_path).keys() == {"w"}


def test_c406_other_metadata_is_no_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for k, text in enumerate(
        ["", "[]", "{", '{"w": 1}', '{"w": {"saved_offsets": 3}}', '{"x": {"saved_offsets": [1]}}']
    ):
        write(tmp_path / f"{k}.safetensors", metadata={"DCP_SHARDING_INFO": text})
        assert sync.load(tmp_path / f"{k}.safetensors").keys() == {"w"}
    part(tmp_path / "whole.safetensors", (0, 4))
    assert sync.load(tmp_path / "whole.safetensors")["w"].shape == (4, 2)
    assert not caplog.records


def by_torch(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]), "b": torch.ones(3)}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True))
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(stio.CheckpointNotFoundError, match="several ranks"):
            sync.load(f"{folder}/parts")
        with pytest.raises(stio.IndexFormatError, match="one rank's part"):
            sync.load(f"{folder}/parts/shard-00002-model-00001-of-00001.safetensors")


def test_c406_what_torch_writes(tmp_path: Path) -> None:
    run_ranks(by_torch, 2, tmp_path, str(tmp_path))


# 431: the plain name is the model.


@pytest.mark.parametrize(
    ("plain", "others"),
    [
        ("diffusion_pytorch_model", ["diffusion_pytorch_model.fp16", "diffusion_pytorch_model.non_ema"]),
        ("model", ["model.fp16"]),
        ("model", ["consolidated"]),
        ("model", ["model_1", "optimizer", "random"]),
        ("model", ["adapter_model"]),
        ("model", ["diffusion_pytorch_model", "model.fp16-00001-of-00002", "model.fp16-00002-of-00002"]),
        ("model", ["consolidated-00001-of-00002", "consolidated-00002-of-00002"]),
        ("unet", ["unet.ema"]),
    ],
)
def test_c431_the_plain_name_is_the_model(
    tmp_path: Path, plain: str, others: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / f"{plain}.safetensors", ONE)
    for name in others:
        write(tmp_path / f"{name}.safetensors", {"of_another": torch.zeros(2)})
    assert torch.equal(sync.load(tmp_path)["w"], ONE["w"])
    sync.convert(tmp_path, tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == {"w"}
    assert not caplog.records


def test_c431_shards_beside_a_variant(tmp_path: Path) -> None:
    write(tmp_path / "model.fp16.safetensors")
    for k in (1, 2):
        write(tmp_path / f"model-0000{k}-of-00002.safetensors", {f"w{k}": torch.ones(1)})
    assert sync.load(tmp_path).keys() == {"w1", "w2"}
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(stio.CheckpointNotFoundError, match="not all of the checkpoint"):
        sync.load(tmp_path)


def test_c431_a_variant_in_shards_beside_the_plain_file(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", ONE)
    write(tmp_path / "model.fp16-00001-of-00001.safetensors")
    (tmp_path / "model.safetensors.index.fp16.json").write_text(
        json.dumps({"weight_map": {"w": "model.fp16-00001-of-00001.safetensors"}})
    )
    assert torch.equal(sync.load(tmp_path)["w"], ONE["w"])


@pytest.mark.parametrize(
    "names",
    [
        ["a", "b"],
        ["model.fp16", "consolidated"],
        ["adapter_model", "optimizer"],
        ["model", "model-00001-of-00002", "model-00002-of-00002"],
    ],
)
def test_c431_what_is_not_certain_is_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        write(tmp_path / f"{name}.safetensors", {name: torch.ones(1)})
    with pytest.raises(stio.AmbiguousCheckpointError, match="path of the one you mean"):
        sync.load(tmp_path)


def test_c431_a_file_with_the_same_names_is_named_by_verify(tmp_path: Path) -> None:
    """A load opens no other file than those it reads."""
    write(tmp_path / "model.safetensors", ONE)
    write(tmp_path / "model_1.safetensors")
    assert torch.equal(sync.load(tmp_path)["w"], ONE["w"])
    (warning,) = examine(str(tmp_path)).warnings
    assert "model.safetensors is loaded, and model_1.safetensors in the same directory is not read" in warning
    assert "or delete model.safetensors" in warning


# 432: an index whose shards are gone.


@pytest.mark.parametrize(
    ("others", "how"),
    [
        (["model-00001-of-00003", "model-00002-of-00003", "model-00003-of-00003"], "delete the index"),
        (["consolidated"], "consolidated.safetensors beside it may be the checkpoint: give its path"),
        (["model-00001-of-00003", "other"], "other.safetensors beside it"),
        (["model-00001-of-00003"], "none of the index's shards exists$"),
    ],
)
def test_c432_the_message_names_what_is_there(tmp_path: Path, others: list[str], how: str) -> None:
    write_index(tmp_path, {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"})
    for k, name in enumerate(others):
        write(tmp_path / f"{name}.safetensors", {f"w{k}": torch.ones(1)})
    with pytest.raises(stio.CheckpointNotFoundError) as caught:
        sync.load(tmp_path)
    assert "names a shard that does not exist" in caught.value.message
    if how.endswith("$"):
        assert caught.value.message.endswith(how[:-1])
    else:
        assert how in caught.value.message
    if how == "delete the index":
        (tmp_path / "model.safetensors.index.json").unlink()
        assert len(sync.load(tmp_path)) == 3


def test_c432_another_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"w": "model-00001-of-00001.safetensors"})
    write_index(tmp_path, {"w": "step-7.safetensors"}, "ema")
    with pytest.raises(stio.CheckpointNotFoundError, match=r"ema.safetensors.index.json beside it .* give its path"):
        sync.load(tmp_path)


def test_c432_some_shards_exist(tmp_path: Path) -> None:
    write_index(tmp_path, {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"})
    write(tmp_path / "model-00001-of-00002.safetensors", ONE)
    write(tmp_path / "other.safetensors")
    with pytest.raises(stio.CheckpointNotFoundError) as caught:
        sync.load(tmp_path)
    assert "none of" not in str(caught.value)


# 434: bytes after the last tensor.


@pytest.mark.parametrize("tail", [b"\0", b"x" * 70_000])
def test_c434_convert_takes_the_tensors(tmp_path: Path, tail: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(save(ONE) + tail)
    with pytest.raises(stio.FormatError, match="bytes after the last tensor.*`stio convert`") as caught:
        sync.load(path)
    assert "fetch it again" not in str(caught.value)
    shown = CliRunner().invoke(main, ["load", str(path)])
    assert "stio convert" in shown.output
    assert "fetch it again" not in shown.output
    caplog.clear()
    sync.convert(path, tmp_path / "new.safetensors")
    assert f"{len(tail):,} bytes after the last tensor are left out" in caplog.text
    assert (tmp_path / "new.safetensors").read_bytes() == save(ONE, {"format": "pt"})
    write_index(tmp_path / "s", {"w": "a.safetensors"})
    (tmp_path / "s/a.safetensors").write_bytes(save(ONE) + tail)
    sync.convert(tmp_path / "s", tmp_path / "t")
    assert torch.equal(sync.load(tmp_path / "t")["w"], ONE["w"])


def test_c434_a_cut_file_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(save(ONE)[:-1])
    with pytest.raises(stio.TruncatedError, match="fetch it again"):
        sync.convert(tmp_path / "m.safetensors", tmp_path / "new.safetensors")


@pytest.mark.parametrize("names", [["layer", "layer.1", "layer.2"], ["x", "x.00"]])
def test_c431_a_number_is_no_variant(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(stio.AmbiguousCheckpointError):
        sync.load(tmp_path)


def test_c431_a_plain_file_beside_variants_in_shards(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    for variant in ("fp16", "bf16"):
        shard = f"model.{variant}-00001-of-00001.safetensors"
        save_file({"w": torch.zeros(1)}, tmp_path / shard)
        index = {"metadata": {"total_size": 4}, "weight_map": {"w": shard}}
        (tmp_path / f"model.safetensors.index.{variant}.json").write_text(json.dumps(index))
    assert sync.load(tmp_path)["w"].item() == 1


def test_c434_a_file_that_is_not_loaded_is_not_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(1)}, tmp_path / "model_1.safetensors")
    with (tmp_path / "model_1.safetensors").open("ab") as file:
        file.write(b"xx")
    sync.convert(tmp_path, tmp_path / "out.safetensors")
    assert "after the last tensor" not in caplog.text
