"""Loads into sharded modules: what each rank holds is its part of the checkpoint, and it reads no more than that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stio
from stio import sync
from stio.distributed.parts import part_of
from stio.errors import MismatchError, RankError


class Block(nn.Module):
    """Two layers of odd sizes, a norm, and a buffer that no checkpoint holds."""

    def __init__(self, wide: int = 27, narrow: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(narrow, wide)
        self.norm = nn.LayerNorm(wide)
        self.down = nn.Linear(wide, narrow, bias=False)
        self.register_buffer("step", torch.tensor([3.0]))
        self.register_buffer("angles", torch.ones(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(13, 1)  # one row: some ranks hold nothing of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def by_fsdp(model: Model) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def by_hsdp(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copy", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Model, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_tensor_parallelism(model: Model) -> None:
    tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)))


def by_both(model: Model) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


WAYS: list[Callable[[Model], None]] = [by_fsdp, by_hsdp, by_tensor_parallelism, by_both]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def every_way(path: str) -> int:
    """Shard a model in every way; what torch leaves on the rank is what a load must bring back."""
    num_sharded = 0
    for shard in WAYS:
        model = new_model()
        shard(model)
        expected = {name: local_of(tensor).detach().clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                local_of(tensor).fill_(-1)
        report = sync.distributed.load_into(model, path)
        assert (report.missing, report.unexpected) == ((), ())
        for name, tensor in model.state_dict().items():
            assert torch.equal(local_of(tensor), expected[name]), (shard.__name__, name)
            num_sharded += isinstance(tensor, DTensor)
        assert all((block.angles == -1).all() for block in model.blocks), "no checkpoint has it"
    model = on_meta(by_fsdp)
    model.to_empty(device="cpu")
    sync.distributed.load_into(model, path)
    expected_model = new_model()
    by_fsdp(expected_model)
    for name, tensor in model.named_parameters():
        assert torch.equal(local_of(tensor), local_of(dict(expected_model.named_parameters())[name]))
    refusals(path)
    return num_sharded


def on_meta(shard: Callable[[Model], None]) -> Model:
    with torch.device("meta"):
        model = Model()
    shard(model)
    return model


def raises_on_all_ranks(text: str) -> AbstractContextManager[object]:
    """Expect an error; a rank whose load ends because another one was faster raises that one's."""
    return pytest.raises((MismatchError, RankError), match=text)


def refusals(path: str) -> None:
    with raises_on_all_ranks("no memory to copy into"):
        sync.distributed.load_into(on_meta(by_fsdp), path)
    model = new_model()
    by_fsdp(model)
    for assign in (False, True):  # the usual function says no, and changes nothing
        with pytest.raises(MismatchError, match=r"stio\.distributed\.load_into"):
            sync.load_into(model, path, assign=assign)
        assert isinstance(model.head.weight, DTensor)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(MismatchError, match="Partial"):
        part_of("w", DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    model.head = nn.Linear(13, 2)
    with raises_on_all_ranks("shapes differ"):
        sync.distributed.load_into(model, path)


def all_placements(path: str) -> int:
    """Distribute tensors over meshes; compare with the parts, and read them."""
    tensors = sync.load(path)
    num = 0
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for mesh in meshes:
        placements = [[one] for one in choices] if mesh.ndim == 1 else [[a, b] for a in choices for b in choices]
        for chosen in placements:
            module = nn.Module()
            for name, tensor in tensors.items():
                spread = distribute_tensor(tensor.clone(), mesh, chosen)
                part = part_of(name, spread)
                assert part is not None
                assert torch.equal(tensor[part.index], spread.to_local())
                expected = spread.to_local().clone()
                spread.to_local().zero_()
                module.register_buffer(name, spread)
                num += 1
                setattr(module, f"_{name}", expected)
            del expected
            wanted = {name: getattr(module, f"_{name}") for name in tensors}
            sync.distributed.load_into(module, path)
            for name in tensors:
                assert torch.equal(getattr(module, name).to_local(), wanted[name]), (chosen, name)
    return num


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors that are cut unevenly, or into parts of which some are empty, of several dtypes."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"odd": (13, 7), "few": (3, 2), "one": (1, 5), "none": (0, 4), "deep": (5, 6, 3), "wide": (2, 1000)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {f"{name}_16": tensor.bfloat16() for name, tensor in tensors.items()}
    return tensors | {"bytes": torch.arange(65, dtype=torch.uint8).reshape(13, 5)}


def own_share(path: str) -> tuple[int, int]:
    """Return the bytes that this rank reads, and holds."""
    with torch.device("meta"):
        model = large_model()
    for layer in model:
        fully_shard(layer)
    model.to_empty(device="cpu")
    trace = stio.Trace()
    sync.distributed.load_into(model, path, memory="copy", trace=trace)
    read = sum(span.num_bytes for span in trace.spans if span.name == "read")
    return read, sum(local_of(one).nbytes for one in model.parameters())


def large_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))


def everything(folder: str) -> dict[str, Any]:
    """Do all that the tests look at: the start of a process costs more."""
    return {
        "ways": every_way(f"{folder}/model"),
        "placements": all_placements(f"{folder}/odd.safetensors"),
        "share": own_share(f"{folder}/large"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    sync.save(new_model(), folder / "model", max_shard_size=3000)
    sync.save(odd_tensors(), folder / "odd.safetensors")
    sync.save(large_model(), folder / "large")
    return run_ranks(everything, 4, folder, str(folder))


def test_every_way_to_shard(found: list[dict[str, Any]]) -> None:
    """What a load brings back is what torch has put on each rank."""
    assert min(one["ways"] for one in found) > 10


def test_every_placement(found: list[dict[str, Any]]) -> None:
    """Rows and inner dimensions, uneven and empty parts, on meshes of one and two dimensions."""
    assert {one["placements"] for one in found} == {12 * len(odd_tensors())}


def test_a_rank_reads_its_share(found: list[dict[str, Any]]) -> None:
    """At most 2 % more than it holds."""
    for read, held in (one["share"] for one in found):
        assert held == 8 * 512 * 512 * 4 // 4
        assert held <= read <= 1.02 * held
