"""Nested state as its users keep it: optimizers, schedulers, random generators; ties, shards, a saver's snapshots."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import struct
from collections import Counter, OrderedDict

import anyio
import pytest
import safetensors.torch
import torch
from fakes import FakeDevice, MemoryDestination, MemoryRoot
from loops import others_are_slow
from support import INDEX, bits_of, oracle, ramp
from torch import nn
from torch.optim import lr_scheduler

import stio
import stio.sync
from stio.format.state.tree import POINTER, STATE_KEY, TREE_TENSOR

pytestmark = pytest.mark.anyio


def require_same(found, expected, path="state"):
    """Compare types, order and bits, all the way down."""
    assert type(found) is type(expected), path
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], path
        for key in expected:
            require_same(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), path
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            require_same(one, other, f"{path}[{k}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        assert bits_of(found) == bits_of(expected.resolve_conj()), path
    elif isinstance(expected, float):
        assert struct.pack("d", found) == struct.pack("d", expected), path
    else:
        assert found == expected, path


def everything():
    tied = torch.arange(4.0)
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    return {
        "nested": [{"a": (1, [tied, (tied,)]), 0: tied[1:], "0": tied[:2]}, [], (), {}, OrderedDict()],
        1: True, 2.5: None, None: "text", False: "é\0\ud800", (1, ("k", None)): Counter("abca"), 0.5: -0.0,
        "floats": [math.nan, math.inf, -math.inf, 5e-324, 0.1], "ints": [2**64, -(2**200), 3], "bytes": [b"", b"\xff" * 70_000],
        "types": [torch.Size([2, 0]), torch.Size([]), torch.float8_e4m3fn, torch.device("cuda", 1), torch.device("cpu")],
        "a/b": torch.zeros(3, 0), "": torch.tensor(7), "%": ramp(3, 3, dtype=torch.bool),
        "parameters": OrderedDict(p=parameter, frozen=nn.Parameter(torch.ones(1), requires_grad=False), again=parameter),
        "conj": torch.ones(2, dtype=torch.complex64).mul_(1j).conj(), "t": ramp(3, 5).t(),
    }  # fmt: skip


# There and back.


@pytest.mark.parametrize("name", ["s.safetensors", "s"])
async def test_everything_comes_back(tmp_path, name):
    state = everything()
    result = await stio.save_state(state, tmp_path / name)
    found = await stio.load_state(tmp_path / name)
    require_same(found, state)
    assert result.files == ("s.safetensors" if "." in name else "model.safetensors",)
    tied = found["nested"][0]["a"][1][0]
    assert tied is found["nested"][0]["a"][1][1][0]
    assert found["parameters"]["p"] is found["parameters"]["again"]
    assert found["parameters"]["p"].requires_grad
    assert not found["parameters"]["frozen"].requires_grad
    tied.zero_()
    require_same(found["nested"][0][0], state["nested"][0][0])  # a view that only overlaps has bytes of its own


@pytest.mark.matrix
@pytest.mark.parametrize("root", [3, None, "x", [], (), {}, torch.ones(2), (torch.ones(2), {"a": (torch.ones(1),)})])
async def test_any_root(tmp_path, root):
    await stio.save_state(root, tmp_path / "s.safetensors")
    require_same(await stio.load_state(tmp_path / "s.safetensors"), root)


async def test_names_are_readable_and_any_reader_opens_the_file(tmp_path):
    state = {"state": {0: {"exp_avg": ramp(3)}, "0": {"a/b": ramp(2)}}, "lr": 0.1}
    await stio.save_state(state, tmp_path / "s.safetensors", metadata={"step": "7"})
    assert set(oracle(tmp_path / "s.safetensors")) == {"state/0/exp_avg", "state/%30/a%2Fb"}
    assert set(await stio.load(tmp_path / "s.safetensors")) == {"state/0/exp_avg", "state/%30/a%2Fb"}
    with safetensors.safe_open(tmp_path / "s.safetensors", "pt") as opened:
        assert opened.metadata()["step"] == "7"
        assert json.loads(opened.metadata()[STATE_KEY])["nodes"][0] == ["dict", 2]


async def test_bytes_are_the_same_each_time(tmp_path):
    for name in ("a", "b"):
        await stio.save_state(everything(), tmp_path / name, max_shard_size="100KB")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b")]
    assert files[0] == files[1]


@pytest.mark.matrix
@pytest.mark.parametrize("length", [10, 30_000])
async def test_shards(tmp_path, length):
    state = {"layers": [{"w": ramp(50, 50, start=k)} for k in range(8)], "log": list(range(length)), "t": (ramp(3),)}
    state["tied"] = state["layers"][0]["w"]
    result = await stio.save_state(state, tmp_path / "s", max_shard_size="25KB", metadata={"step": "7"})
    assert len(result.files) >= 4
    index = json.loads((tmp_path / "s" / INDEX).read_text())
    assert (TREE_TENSOR in index["weight_map"]) == (length > 10_000)
    assert (index["metadata"][STATE_KEY] == POINTER) == (length > 10_000)
    found = await stio.load_state(tmp_path / "s")
    require_same(found, state)
    assert found["tied"] is found["layers"][0]["w"]
    assert (TREE_TENSOR in await stio.load(tmp_path / "s")) == (length > 10_000)


@pytest.mark.slow
@others_are_slow
async def test_a_hundred_thousand_leaves(tmp_path):
    state = {"state": {k: {"step": float(k), "m": torch.tensor(float(k))} for k in range(50_000)}}
    await stio.save_state(state, tmp_path / "s.safetensors")
    found = await stio.load_state(tmp_path / "s.safetensors")
    assert list(found["state"]) == list(range(50_000))
    assert all(one["step"] == one["m"].item() == k for k, one in found["state"].items())


async def test_lazy_tensors(tmp_path):
    calls = []

    def produce():
        calls.append(1)
        return ramp(4, 4)

    lazy = stio.LazyTensor(torch.float32, (4, 4), produce)
    await stio.save_state({"a": lazy, "b": [lazy]}, tmp_path / "s.safetensors")
    found = await stio.load_state(tmp_path / "s.safetensors")
    require_same(found, {"a": ramp(4, 4), "b": [ramp(4, 4)]})
    assert found["a"] is found["b"][0]
    assert calls == [1]


async def test_shared_decides_about_ties(tmp_path):
    tied = ramp(3)
    state = {"a": tied, "b": [tied]}
    await stio.save_state(state, tmp_path / "s.safetensors", shared="clone")
    found = await stio.load_state(tmp_path / "s.safetensors")
    require_same(found, state)
    assert found["a"] is not found["b"][0]
    with pytest.raises(stio.SharedTensorsError):
        await stio.save_state(state, tmp_path / "t.safetensors", shared="error")
    assert not (tmp_path / "t.safetensors").exists()


# What training keeps.

OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": functools.partial(torch.optim.Adam, lr=0.1),
    "adam amsgrad": functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True, foreach=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.2, foreach=False, maximize=True),
    "adamw tensor lr": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1), foreach=False),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "adafactor": functools.partial(torch.optim.Adafactor, lr=0.1),
    "lbfgs": functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2),
}

SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [1, 2, 2, 5]),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


def training(make_optimizer, make_scheduler):
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.05}]
    if make_optimizer.func is torch.optim.LBFGS:
        groups = [*model.parameters()]
    elif isinstance(make_optimizer.keywords["lr"], torch.Tensor):
        groups[1].pop("lr")
    optimizer = make_optimizer(groups)
    return model, optimizer, make_scheduler(optimizer) if make_scheduler else None


def steps(model, optimizer, scheduler, count):
    for _ in range(count):

        def closure():
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(closure).item()
        if scheduler is not None:
            scheduler.step(*[loss] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # of SequentialLR itself, in torch 2.6
@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [*[(name, None) for name in OPTIMIZERS], *[("adamw", name) for name in SCHEDULERS]]
)
async def test_training_goes_on_to_the_bit(tmp_path, optimizer, scheduler):
    kind, plan = OPTIMIZERS[optimizer], SCHEDULERS.get(scheduler)
    model, opt, sched = training(kind, plan)
    steps(model, opt, sched, 4)
    state = {
        "model": model.state_dict(),
        "optimizer": opt.state_dict(),
        "scheduler": sched and sched.state_dict(),
        "rng": torch.get_rng_state(),
        "python": random.getstate(),
    }
    await stio.save_state(state, tmp_path / "s.safetensors")
    saved = copy.deepcopy(state["optimizer"])
    drawn = random.random()
    steps(model, opt, sched, 4)

    found = await stio.load_state(tmp_path / "s.safetensors")
    require_same(found["optimizer"], saved)
    if optimizer == "lbfgs":
        # Its sums of products are BLAS's, whose last bit depends on where a tensor begins: torch's tensors begin at a multiple of
        # 64 bytes, loaded ones where the file has them. Seen with AVX-512.
        found["optimizer"] = copy.deepcopy(found["optimizer"])
    other, opt_2, sched_2 = training(kind, plan)
    other.load_state_dict(found["model"])
    opt_2.load_state_dict(found["optimizer"])
    if sched_2:
        sched_2.load_state_dict(found["scheduler"])
    torch.set_rng_state(found["rng"])
    random.setstate(found["python"])
    assert random.random() == drawn
    steps(other, opt_2, sched_2, 4)
    require_same(other.state_dict(), model.state_dict())
    require_same(opt_2.state_dict(), opt.state_dict())
    if sched_2:
        require_same(sched_2.state_dict(), sched.state_dict())


async def test_capturable_keeps_its_step_tensors(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], capturable=True)
    optimizer.state[weight] = {"step": torch.tensor(3.0), "exp_avg": ramp(3), "exp_avg_sq": ramp(3, start=4)}
    await stio.save_state(optimizer.state_dict(), tmp_path / "s.safetensors")
    found = await stio.load_state(tmp_path / "s.safetensors")
    require_same(found, optimizer.state_dict())
    assert found["param_groups"][0]["capturable"] is True


# The keywords of loading.


async def test_memory_is_ones_own_and_device_and_dtype_hold(tmp_path):
    state = {"w": ramp(8, 8), "n": torch.arange(3), "p": nn.Parameter(torch.ones(3)), "big": b"x" * 70_000}
    await stio.save_state(state, tmp_path / "s.safetensors")
    before = (tmp_path / "s.safetensors").read_bytes()
    found = await stio.load_state(tmp_path / "s.safetensors")
    found["w"].add_(1)
    assert (tmp_path / "s.safetensors").read_bytes() == before
    for keywords in ({"memory": "map"}, {"memory": "lazy"}, {"budget_bytes": 4096}, {"device": FakeDevice()}):
        require_same(await stio.load_state(tmp_path / "s.safetensors", **keywords), state)
    halves = await stio.load_state(tmp_path / "s.safetensors", dtype=torch.float16)
    assert (halves["w"].dtype, halves["n"].dtype, halves["p"].dtype) == (torch.float16, torch.int64, torch.float16)
    assert halves["big"] == state["big"]


async def test_progress_verify_and_places_of_ones_own(tmp_path):
    state = {"a": ramp(100), "log": ["x" * 100] * 1000}
    seen = []
    await stio.save_state(state, tmp_path / "s.safetensors", hash="sha256", progress=seen.append)
    assert seen[-1].done_tensors == 2
    seen.clear()
    require_same(await stio.load_state(tmp_path / "s.safetensors", verify=True, progress=seen.append), state)
    assert (seen[-1].done_tensors, seen[-1].done_bytes) == (1, 400)
    raw = bytearray((tmp_path / "s.safetensors").read_bytes())
    raw[raw.index(b"xxxx")] = ord("y")
    (tmp_path / "s.safetensors").write_bytes(raw)
    with pytest.raises(stio.IntegrityError):
        await stio.load_state(tmp_path / "s.safetensors", verify=True)
    destination = MemoryDestination()
    await stio.save_state(state, destination)
    require_same(await stio.load_state(MemoryRoot(dict(destination.files))), state)


@pytest.mark.parametrize("keywords", [{"names": "a"}, {"slices": {}}, {"memry": "copy"}])
async def test_unknown_keywords(tmp_path, keywords):
    with pytest.raises(TypeError, match="unexpected keyword"):
        await stio.load_state(tmp_path, **keywords)


# A training loop.


async def test_a_saver_takes_a_snapshot(tmp_path):
    weight = nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    async with stio.Saver(keep_last=2, metadata={"run": "a"}) as saver:
        for step in range(4):
            weight.grad = torch.full_like(weight, step + 1.0)
            optimizer.step()
            state = {"step": step, "optimizer": optimizer.state_dict(), "log": [step] * 3}
            expected = copy.deepcopy(state)
            pending = await saver.save_state(state, tmp_path / f"step-{step}", metadata={"step": str(step)})
            state["log"].clear()  # all of it may change
            state["step"] = -1
            for value in optimizer.state[weight].values():
                value.zero_()
            result = await pending
            require_same(await stio.load_state(result.path), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


async def test_a_savers_metadata_stay(tmp_path):
    async with stio.Saver(metadata={"run": "a"}) as saver:
        await (await saver.save_state([1], tmp_path / "s"))
    async with stio.open(tmp_path / "s") as checkpoint:
        assert checkpoint.metadata["run"] == "a"


@pytest.mark.matrix
async def test_states_at_once(tmp_path):
    async def one(k):
        state = {"k": k, "t": torch.full((100,), float(k)), "log": list(range(5000 + k))}
        await stio.save_state(state, tmp_path / f"{k}.safetensors")
        require_same(await stio.load_state(tmp_path / f"{k}.safetensors"), state)

    async with anyio.create_task_group() as group:
        for k in range(12):
            group.start_soon(one, k)


def test_sync_twins(tmp_path):
    state = everything()
    assert stio.sync.save_state(state, tmp_path / "s.safetensors").total_bytes
    require_same(stio.sync.load_state(tmp_path / "s.safetensors"), state)
    with stio.sync.Saver(metadata={"run": "a"}) as saver:
        pending = saver.save_state({"a": state["t"]}, tmp_path / "t")
        assert pending.staged
    require_same(stio.sync.load_state(tmp_path / "t"), {"a": state["t"]})
    with pytest.raises(stio.ClosedError):
        saver.save_state([1], tmp_path / "t")
    with pytest.raises(TypeError, match=r"^state\['a'\]"):
        stio.sync.save_state({"a": 1j}, tmp_path / "t")
