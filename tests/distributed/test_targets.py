"""What `load_into` fills: modules in unusual states, and nested states of optimizers, on other ranks than at the save."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from test_load import Model, by_fsdp, by_hsdp, local_of, new_model, raises_on_all_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from stio import sync

pytestmark = pytest.mark.slow  # its ranks do all that it looks at for any of its tests


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Modules.


def modules(folder: str) -> dict[str, Any]:
    unfilled = sync.distributed.load_into(sharded(by_fsdp), f"{folder}/model").unfilled
    assert unfilled == ("blocks.0.angles", "blocks.1.angles")
    after_a_forward(f"{folder}/model")
    tied_with_empty_parts(f"{folder}/tied")
    on_two_meshes(f"{folder}/two")
    hooked(f"{folder}/two")
    buffers(f"{folder}/buffers")
    return {"unfilled": unfilled}


def sharded(shard: Callable[[Model], None]) -> Model:
    model = new_model()
    shard(model)
    return model


def by_both_gathered(model: Model) -> None:
    """Shard by FSDP over tensor parallelism, with layers whose inputs and outputs are whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def after_a_forward(path: str) -> None:
    """Fill modules whose parameters are gathered; the next forward uses the new ones."""
    x = torch.arange(26.0).reshape(2, 13) / 10
    expected = new_model()
    for shard in (by_fsdp, by_hsdp, by_both_gathered):
        model = sharded(shard)
        model(x)
        model.unshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        sync.distributed.load_into(model, path)
        assert torch.allclose(model(x), expected(x), rtol=1e-5), shard.__name__


class Tied(nn.Module):
    """An embedding of two rows that is the head too: two of four ranks have nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 5)
        self.head = nn.Linear(5, 2, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def tied_with_empty_parts(path: str) -> None:
    """Fill a tied parameter from a checkpoint that has one of its names, on each rank."""
    model = Tied()
    fully_shard(model)
    with torch.no_grad():
        model.head.weight.zero_()
    report = sync.distributed.load_into(model, path)
    assert (report.missing, report.unexpected) == ((), ())
    assert model.head.weight is model.embed.weight
    assert torch.equal(full(model.head.weight), torch.arange(10.0).reshape(2, 5))


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 3, bias=False))


def on_two_meshes(path: str) -> None:
    """Fill submodules on different meshes; a rank that is not in a mesh holds nothing."""
    model = two_layers()
    for layer, ranks in zip(model, ([0, 1, 2], [2, 3]), strict=True):
        mesh = DeviceMesh("cpu", ranks)
        layer.weight = nn.Parameter(
            DTensor.from_local(
                torch.zeros(local_shape(layer.weight, ranks)),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=layer.weight.shape,
                stride=layer.weight.stride(),
            )
        )
    sync.distributed.load_into(model, path)
    whole = sync.load(path)
    rank = dist.get_rank()
    for name, ranks in (("0.weight", [0, 1, 2]), ("1.weight", [2, 3])):
        parts = whole[name].chunk(len(ranks))
        local = local_of(model.get_parameter(name))
        assert torch.equal(local, parts[ranks.index(rank)]) if rank in ranks else not local.numel()


def local_shape(weight: torch.Tensor, ranks: list[int]) -> tuple[int, ...]:
    rank = dist.get_rank()
    return tuple(weight.chunk(len(ranks))[ranks.index(rank)].shape) if rank in ranks else (0,)


def hooked(path: str) -> None:
    """Refuse code that would need whole tensors, in any submodule, before anything is read; the state dict can be filled."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    model = two_layers()
    parallelize_module(model[0], mesh, ColwiseParallel())
    calls = []
    model[1].register_load_state_dict_pre_hook(lambda *rest: calls.append(1))
    before = local_of(model[0].weight).clone()
    with raises_on_all_ranks("tensors are parts, and code of 1 that takes part in loads"):
        sync.distributed.load_into(model, path)
    assert torch.equal(local_of(model[0].weight), before)
    sync.distributed.load_into(model.state_dict(), path)
    assert calls == []
    assert torch.equal(full(model[0].weight), sync.load(path)["0.weight"])


def buffers(path: str) -> None:
    """Fill buffers that are DTensors; one that no checkpoint holds may have any placement."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    module = nn.Module()
    module.register_buffer("sharded", DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))
    module.register_buffer("whole", DTensor.from_local(torch.zeros(8), mesh, [Replicate()]))
    module.register_buffer("sums", DTensor.from_local(torch.zeros(8), mesh, [Partial()]), persistent=False)
    report = sync.distributed.load_into(module, path)
    assert report.unfilled == ("sums",)
    for name in ("sharded", "whole"):
        assert torch.equal(full(module.get_buffer(name)), torch.arange(8.0)), name


# Nested states.


def trained(shard: Callable[[Model], None], *, num_steps: int) -> tuple[Model, torch.optim.Optimizer]:
    model = sharded(shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    steps(model, optimizer, num_steps)
    return model, optimizer


def steps(model: Model, optimizer: torch.optim.Optimizer, num: int) -> None:
    for _ in range(num):
        loss = model(torch.arange(26.0).reshape(2, 13) / 26).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gathered(state: Any) -> Any:
    """Return a state with whole tensors, which `save_state` takes."""
    if isinstance(state, dict):
        return {key: gathered(value) for key, value in state.items()}
    if isinstance(state, list):
        return [gathered(value) for value in state]
    return full(state).clone() if isinstance(state, torch.Tensor) else state


def by_two(model: Model) -> None:
    """Shard over the two ranks of each half; the halves know nothing of each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def optimizers(folder: str) -> int:
    """Resume an optimizer on four and on two ranks, with other placements, from what four ranks have saved."""
    num = 0
    for flat in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        path = f"{folder}/optimizer-{flat}.safetensors"
        model, optimizer = trained(by_fsdp, num_steps=2)
        saved = gathered(get_optimizer_state_dict(model, optimizer, options=options))
        weights = gathered(model.state_dict())
        if not dist.get_rank():
            sync.save_state(saved, path)
            sync.save(weights, f"{folder}/weights.safetensors")
        dist.barrier()
        steps(model, optimizer, 1)
        for shard in (by_fsdp, by_both_gathered, by_two):
            again, resumed = trained(shard, num_steps=0)
            resumed.param_groups[0]["lr"], resumed.param_groups[0]["betas"] = 0.5, (0.1, 0.2)
            state = get_optimizer_state_dict(again, resumed, options=options)
            report = sync.distributed.load_into(state, path)
            assert (report.missing, report.unexpected) == ((), ())
            require_equal(gathered(state), saved)
            set_optimizer_state_dict(again, resumed, state, options=options)
            assert resumed.param_groups[0]["lr"] == 0.01
            assert resumed.param_groups[0]["betas"] == (0.8, 0.9)
            sync.distributed.load_into(dict(again.state_dict()), f"{folder}/weights.safetensors")  # a flat mapping
            steps(again, resumed, 1)
            for (name, one), other in zip(again.named_parameters(), model.parameters(), strict=True):
                assert torch.allclose(full(one), full(other), rtol=1e-5), (shard.__name__, name)
            num += 1
    return num


def require_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            require_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            require_equal(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


LONG = bytes(range(256)) * 1024


def stored_state() -> dict[str, Any]:
    """Return a state with each kind of value."""
    tied = torch.arange(4.0)
    return {
        "step": 7,
        "name": "cosine",
        "none": None,
        "long": LONG,
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "betas": (0.8, (0.9, None)),
        "list": [1, {"w": tied, 3: 2.5}, torch.ones(2, 3)],
        "tied": tied,
        "pair": (torch.tensor(5), 9),
    }


def other_values(state: Any) -> Any:
    """Return a state of the same structure with other values."""
    if isinstance(state, dict):
        return {key: other_values(value) for key, value in state.items()}
    if isinstance(state, list | tuple) and not isinstance(state, torch.Size):
        return type(state)(other_values(value) for value in state)
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else "other"


def plain_states(folder: str) -> int:
    """Fill states without DTensors; each difference names its path, and changes no value."""
    path, stored = f"{folder}/plain.safetensors", stored_state()
    state = other_values(stored)
    tensors = [state["tied"], state["list"][1]["w"], state["list"][2], state["pair"][0]]
    inner = state["list"]
    sync.distributed.load_into(state, path)
    require_equal(state, stored)
    assert state["list"] is inner
    found = [state["tied"], state["list"][1]["w"], state["list"][2], state["pair"][0]]
    assert all(one is other for one, other in zip(tensors, found, strict=True))
    refused = wrong_states(stored)
    for change, text in refused:
        state = other_values(stored)
        change(state)
        before = copy.deepcopy(state)
        with raises_on_all_ranks(text):
            sync.distributed.load_into(state, path)
        require_equal(plain_values(state), plain_values(before))
    state = {"step": 1, "new": 2, "tied": torch.zeros(4)}
    report = sync.distributed.load_into(state, path, strict=False)
    assert report.missing == ("state['new']",)
    assert len(report.unexpected) == len(stored) - 2
    require_equal(state, {"step": 7, "new": 2, "tied": torch.arange(4.0)})
    part = DTensor.from_local(torch.zeros(1), DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
    state = other_values(stored) | {"tied": part}  # its other name gets the whole tensor
    sync.distributed.load_into(state, path)
    assert part.to_local().item() == dist.get_rank()
    require_equal({**state, "tied": None}, {**stored, "tied": None})
    with raises_on_all_ranks("missing a; unexpected .*; the checkpoint has tensors by name, and no nested state"):
        sync.distributed.load_into({"a": 1}, f"{folder}/two")
    with raises_on_all_ranks("0.weight is of another kind in the checkpoint"):
        sync.distributed.load_into({"0.weight": 1.5}, f"{folder}/two", strict=False)
    fixed = other_values(stored) | {"betas": stored["betas"], "pair": stored["pair"]}
    fixed["list"][1] = MappingProxyType({"w": torch.zeros(4), 3: 0.0})
    with raises_on_all_ranks(r"state\['list'\]\[1\]\[3\] has another value .* a mappingproxy cannot be changed"):
        sync.distributed.load_into(fixed, path)
    assert fixed["step"] == "other"
    sync.distributed.load_into(pair := (torch.tensor(0), 9), f"{folder}/pair.safetensors")  # the same plain value
    assert pair == (torch.tensor(5), 9)
    with raises_on_all_ranks("the checkpoint has other values, and this state cannot be changed"):
        sync.distributed.load_into((torch.tensor(0), 8), f"{folder}/pair.safetensors")
    return len(refused)


def plain_values(state: Any) -> Any:
    return {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}


def wrong_states(stored: dict[str, Any]) -> list[tuple[Callable[[Any], Any], str]]:
    def put(value: Any, *keys: Any) -> Callable[[Any], Any]:
        def change(state: Any) -> None:
            for key in keys[:-1]:
                state = state[key]
            state[keys[-1]] = value

        return change

    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    return [
        (lambda state: state.pop("step"), r"unexpected state\['step'\]"),
        (put(1, "list", 1, "more"), r"missing state\['list'\]\[1\]\['more'\]"),
        (
            lambda state: state["list"].pop(),
            r"state\['list'\] is of another kind .*sequence of 2, found a sequence of 3",
        ),
        (put(torch.zeros(3), "step"), r"state\['step'\] is of another kind .*a tensor, found a value of the type int"),
        (put(1.5, "tied"), r"state\['tied'\] is of another kind"),
        (put({}, "step"), r"state\['step'\] is of another kind .*a mapping"),
        (put(None, "list"), r"state\['list'\] is of another kind .*NoneType, found a sequence of 3"),
        (put({1}, "step"), r"state\['step'\] is of another kind"),
        (put(torch.zeros(5), "tied"), r"state\['tied'\] has another shape .*\[5\], found \[4\]"),
        (put(torch.zeros(4, device="meta"), "tied"), r"state\['tied'\] cannot be filled: it is on 'meta'"),
        (put(torch.zeros(1).expand(4), "tied"), r"state\['tied'\] cannot be filled"),
        (
            put(DTensor.from_local(torch.zeros(4), mesh, [Partial()]), "tied"),
            r"state\['tied'\]: its part on this rank is not known",
        ),
    ]


def everything(folder: str) -> dict[str, Any]:
    return {"modules": modules(folder), "optimizers": optimizers(folder), "plain": plain_states(folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks has found."""
    folder = tmp_path_factory.mktemp("targets")
    sync.save(new_model(), folder / "model")
    sync.save({"embed.weight": torch.arange(10.0).reshape(2, 5)}, folder / "tied")
    sync.save(two_layers(), folder / "two")
    sync.save({"sharded": torch.arange(8.0), "whole": torch.arange(8.0)}, folder / "buffers")
    sync.save_state(stored_state(), folder / "plain.safetensors")
    sync.save_state(stored_state()["pair"], folder / "pair.safetensors")
    return run_ranks(everything, 4, folder, str(folder))


def test_modules(found: list[dict[str, Any]]) -> None:
    """After a forward, tied, on several meshes, with hooks, with buffers that are DTensors."""
    assert all(one["modules"]["unfilled"] for one in found)


def test_optimizers(found: list[dict[str, Any]]) -> None:
    """An optimizer's state on another number of ranks; training goes on as it did."""
    assert {one["optimizers"] for one in found} == {6}


def test_nested_states(found: list[dict[str, Any]]) -> None:
    """Each kind of value, and each difference."""
    assert {one["plain"] for one in found} == {12}
