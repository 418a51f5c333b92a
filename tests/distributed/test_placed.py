"""Loads of random parts, `placements=`, and nested states: what a rank gets is its part of the whole tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pages
import pytest
import torch
import torch.distributed as dist
from cases import Case, meshes, random_cases, same_bytes, tensors_of
from distributed.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import stio
from stio import sync
from stio.distributed import Placements
from stio.distributed.parts import local_index
from stio.errors import MismatchError


def random_loads(path: str, seed: int, num: int) -> dict[str, Any]:
    """Load random parts in two ways; count them, and those that are empty."""
    cases, every = random_cases(seed, num), meshes()
    start = time.perf_counter()
    counts = dict.fromkeys(("placed", "filled", "empty", "outside"), 0)
    for number, mesh in enumerate(every):
        mine = [case for case in cases if case.mesh == number]
        if mesh.get_coordinate() is None:
            counts["outside"] += outside(path, mesh, mine)
            continue
        for tensor in (*placed(path, mesh, mine), *filled(path, mesh, mine)):
            counts["empty"] += not tensor.to_local().numel()
        counts["placed"] += len(mine)
        counts["filled"] += len(mine)
    return counts | {"seconds": time.perf_counter() - start}


def placed(path: str, mesh: DeviceMesh, cases: Sequence[Case]) -> list[DTensor]:
    """Load by placements; compare each tensor with what torch puts on this rank."""
    by_name = {case.name: case.placements(mesh) for case in cases}

    def rules(name: str, shape: tuple[int, ...]) -> list[Placement]:
        return by_name[name]

    found = sync.load(path, names=list(by_name), placements=Placements(mesh, rules))
    assert found.keys() == by_name.keys()
    for case in cases:
        tensor = found[case.name]
        assert isinstance(tensor, DTensor)
        assert (tuple(tensor.shape), tensor.stride()) == (case.shape, case.whole().stride()), case
        assert list(tensor.placements) == by_name[case.name]
        local, expected = tensor.to_local(), case.expected(mesh)
        assert same_bytes(local, expected), case
        assert local.is_contiguous(), case
        assert local.untyped_storage().nbytes() == local.nbytes, case
        assert same_bytes(case.whole()[local_index(case.shape, mesh, tensor.placements)], expected), case
    return list(found.values())  # type: ignore[arg-type]


def filled(path: str, mesh: DeviceMesh, cases: Sequence[Case]) -> list[DTensor]:
    """Fill a mapping of tensors in place."""
    state = {case.name: zeros(case, mesh) for case in cases}
    before = dict(state)
    sync.distributed.load_into(state, path, strict=False)
    for case in cases:
        assert state[case.name] is before[case.name]
        assert same_bytes(state[case.name].to_local(), case.expected(mesh)), case
    return list(state.values())


def zeros(case: Case, mesh: DeviceMesh) -> DTensor:
    local = torch.zeros_like(case.expected(mesh)) if mesh.get_coordinate() is not None else torch.empty(0)
    whole = torch.empty(case.shape, device="meta")
    return DTensor.from_local(
        local, mesh, case.placements(mesh), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def outside(path: str, mesh: DeviceMesh, cases: Sequence[Case]) -> int:
    """Load on a rank that is not in the mesh: it holds nothing, and has no placements."""
    with pytest.raises(MismatchError, match="the mesh does not have this rank"):
        sync.load(path, names=[case.name for case in cases], placements=Placements(mesh, {}))
    sync.distributed.load_into({case.name: zeros(case, mesh) for case in cases if case.shape}, path, strict=False)
    return len(cases)


# By rules.


ROWS = 13
"""Rows of the embedding: uneven parts on two and on four ranks."""


def whole_model() -> dict[str, torch.Tensor]:
    """Return tensors as of a small language model; the head is tied to the embedding."""
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(ROWS, 8, generator=generator)
    tensors = {"embed.weight": embedding, "head.weight": embedding, "scale": torch.tensor(2.0)}
    for k in range(2):
        tensors[f"layers.{k}.q_proj.weight"] = torch.randn(2048, 64, generator=generator)
        tensors[f"layers.{k}.o_proj.weight"] = torch.randn(64, 512, generator=generator)
        tensors[f"layers.{k}.norm.weight"] = torch.ones(64)
    return tensors


RULES: dict[str, list[Placement]] = {
    "*.q_proj.weight": [Shard(0)],
    "*.o_proj.weight": [Shard(-1)],
    "layers.1.o_proj.weight": [Replicate()],
    "layers.?.*": [Replicate()],
    "embed.weight": [Shard(0)],
    "head.weight": [Shard(0)],
}


def by_rules(path: str) -> dict[str, Any]:
    """Load by rules, in every way to load; return what was read."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3])
    placements, whole = Placements(mesh, RULES), whole_model()
    trace = stio.Trace()
    loaded = sync.load(path, placements=placements, memory="copy", trace=trace)
    with sync.open(path) as checkpoint:
        with checkpoint.stream(placements=placements) as stream:
            streamed = dict(stream)
        also = checkpoint.load(placements=placements)
        (one,) = checkpoint.load(iter(["head.weight"]), placements=placements).items()
    assert loaded.keys() == also.keys() == streamed.keys() == whole.keys()
    for name, expected in whole.items():
        for tensor in (loaded[name], also[name], streamed[name]):
            assert isinstance(tensor, DTensor)
            assert torch.equal(tensor.full_tensor(), expected), name
    assert loaded["embed.weight"] is loaded["head.weight"]
    assert one[0] == "head.weight"
    assert loaded["layers.0.o_proj.weight"].placements == (Shard(1),)
    assert loaded["layers.1.o_proj.weight"].placements == (Replicate(),)  # an exact name before patterns
    assert loaded["layers.1.q_proj.weight"].placements == (Shard(0),)  # the first pattern
    refusals(path, mesh)
    with_other_keywords(path, mesh)
    rows = {name: tensor for name, tensor in loaded.items() if "o_proj" not in name and name != "head.weight"}
    trace = stio.Trace()
    sync.load(path, names=list(rows), placements=placements, memory="copy", trace=trace)
    read = sum(span.num_bytes for span in trace.spans if span.name == "read")
    return {"read": read, "held": sum(tensor.to_local().nbytes for tensor in rows.values())}


def refusals(path: str, mesh: DeviceMesh) -> None:
    with pytest.raises(stio.TensorNotFoundError, match=r"strict=False.*\*\.k_proj\.weight, up\.weight"):
        sync.load(path, placements=Placements(mesh, {**RULES, "*.k_proj.weight": [Shard(0)], "up.weight": [Shard(0)]}))
    loose = Placements(mesh, {"nothing": [Shard(0)]})
    assert "scale" in sync.load(path, placements=loose, strict=False)
    assert list(sync.load(path, names="scale", placements=loose)) == ["scale"]
    with pytest.raises(stio.TensorNotFoundError, match="no such tensor"):
        sync.load(path, names="other", placements=loose)
    with pytest.raises(MismatchError, match=r"embed\.weight and head\.weight"):
        sync.load(path, placements=Placements(mesh, {"embed.weight": [Shard(0)]}))
    with pytest.raises(MismatchError, match=r"scale cannot be loaded .* 0 dimensions"):
        sync.load(path, names="scale", placements=Placements(mesh, {"*": [Shard(0)]}))
    with pytest.raises(MismatchError, match=r"o_proj.*has 2 dimensions.*cuts dimension 2"):
        sync.load(path, placements=Placements(mesh, {"*.o_proj.weight": [Shard(2)]}))
    with pytest.raises(ValueError, match=r"embed\.weight has an index in slices=, and placements= cut it"):
        sync.load(path, slices={"embed.weight": slice(2)}, placements=Placements(mesh, RULES))
    other = Placements(DeviceMesh("meta", mesh.mesh, _init_backend=False), {})
    with pytest.raises(stio.DeviceError, match="pass device='meta'"):
        sync.load(path, names="scale", placements=other)
    with pytest.raises(ValueError, match="Partial"):
        Placements(mesh, {"w": [Partial()]})
    with pytest.raises(ValueError, match="Partial"):
        sync.load(path, placements=Placements(mesh, lambda name, shape: [Partial()]))
    with pytest.raises(ValueError, match="the mesh has 1 dimensions, and w has 2 placements"):
        Placements(mesh, {"w": [Shard(0), Shard(0)]})
    wrong: Any
    for wrong in (Shard(0), [0], "rows"):
        with pytest.raises(TypeError, match="the placements of w"):
            Placements(mesh, {"w": wrong})
    for wrong in ({1: [Shard(0)]}, [Shard(0)]):
        with pytest.raises(TypeError, match="rule"):
            Placements(mesh, wrong)
    wrong = {"w": [Shard(0)]}
    with pytest.raises(TypeError, match=r"stio\.distributed\.Placements\(mesh, rules\), not dict"):
        sync.load(path, placements=wrong)
    with pytest.raises(TypeError, match="DeviceMesh"):
        Placements(wrong, wrong)


def with_other_keywords(path: str, mesh: DeviceMesh) -> None:
    whole = whole_model()
    two = DeviceMesh("cpu", [[0, 1], [2, 3]])
    placements = Placements(two, lambda name, shape: [Shard(0), Shard(1)] if len(shape) == 2 else None)
    found = sync.load(path, placements=placements, dtype=torch.bfloat16, cache=stio.HostCache(1 << 24))
    for name, expected in whole.items():
        assert torch.equal(found[name].full_tensor(), expected.bfloat16()), name
    rows = sync.load(path, names="embed.weight", slices={"embed.weight": slice(2, 5)}, placements=Placements(mesh, {}))
    assert torch.equal(rows["embed.weight"].full_tensor(), whole["embed.weight"][2:5])
    assert rows["embed.weight"].shape == (3, 8)


# What the tests look at.


def everything(folder: str, seed: int, num: int) -> dict[str, Any]:
    return {
        "random": random_loads(f"{folder}/cases.safetensors", seed, num),
        "rules": by_rules(f"{folder}/model"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks has found."""
    folder = tmp_path_factory.mktemp("placed")
    sync.save(tensors_of(random_cases(1, NUM_CASES)), folder / "cases.safetensors")
    sync.save(whole_model(), folder / "model", max_shard_size="100KB")
    return run_ranks(everything, 4, folder, str(folder), 1, NUM_CASES)


NUM_CASES = 200


def test_random_parts(found: list[dict[str, Any]]) -> None:
    """What ranks hold equals the slice of the whole tensor."""
    check_random_parts([one["random"] for one in found], NUM_CASES)


def check_random_parts(found: Sequence[dict[str, Any]], num: int) -> None:
    assert all(one["placed"] + one["outside"] == num for one in found)
    assert sum(one["outside"] for one in found) > num / 4
    assert sum(one["empty"] for one in found) > num / 4


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
def test_many_random_parts(seed: int, tmp_path: Path) -> None:
    sync.save(tensors_of(random_cases(seed, 3000)), tmp_path / "cases.safetensors")
    check_random_parts(run_ranks(random_loads, 4, tmp_path, str(tmp_path / "cases.safetensors"), seed, 3000), 3000)


def test_rules(found: list[dict[str, Any]]) -> None:
    """Patterns and names; a rank reads at most 2 % more than it holds."""
    for one in (rank["rules"] for rank in found):
        assert one["held"] <= one["read"] <= 1.02 * one["held"]


# The plans of transformers.


def by_plan(folder: str) -> int:
    """Load by the plan of a model of transformers; compare with how transformers shards it."""
    transformers = import_module("transformers")
    page = next(block for block in pages.blocks_of(pages.DOCS / "howto/distributed.md") if "def rules_of" in block.text)
    names: dict[str, Any] = {}
    exec(compile(page.text, page.page, "exec"), names)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    rules = names["rules_of"](model.tp_plan)
    found = sync.load(folder, placements=Placements(mesh, rules))
    sharded = import_module("transformers.distributed.tensor_parallel").apply_tensor_parallelism
    plan = model._expand_parallel_plan(dict(model.tp_plan))
    parameters = dict(sharded(model, mesh, plan).named_parameters())
    assert found.keys() == parameters.keys()
    num = 0
    for name, expected in parameters.items():
        local = expected.to_local() if isinstance(expected, DTensor) else expected
        assert same_bytes(found[name].to_local(), local.detach()), name
        if isinstance(expected, DTensor):
            assert found[name].placements == expected.placements, name
            num += 1
    return num


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_the_plan_of_a_model_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=60,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert set(run_ranks(by_plan, 2, tmp_path, str(tmp_path / "llama"))) == {2 * 7 + 2}
