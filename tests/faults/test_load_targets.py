"""Faults of loads into modules that were found by use: 201, 208, 213 and 216.

Torch's own answer is right, and so is a refusal that names what it is about and leaves the module as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import MemoryRoot, checkpoint_files
from faults.load_helpers import in_a_child
from support import bits_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import stio
from stio import sync

Tensors = dict[str, torch.Tensor]
State = dict[str, tuple[int, bytes]]

BOTH_WAYS = pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])


def _load_into(module: nn.Module, tensors: Tensors, **keywords: Any) -> stio.LoadReport:
    return sync.load_into(module, MemoryRoot(checkpoint_files(tensors)), **keywords)


def _tensors_of(module: nn.Module) -> Tensors:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _state_of(module: nn.Module) -> State:
    """Return each tensor of a module by its real name: the object, and its bytes."""
    return {name: (id(tensor), bits_of(tensor)) for name, tensor in _tensors_of(module).items()}


def _require_filled_or_refused(module: nn.Module, tensors: Tensors, expected: Tensors, **keywords: Any) -> None:
    """Load, and compare a module's tensors by their real names; a refusal must leave it as it was."""
    before = _state_of(module)
    try:
        _load_into(module, tensors, **keywords)
    except stio.StioError:
        assert _state_of(module) == before
        return
    found = _tensors_of(module)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# 201. Names of a state_dict that are not the names of its tensors.


class Renaming(nn.Module):
    """Its state_dict has the names of an inner module, without a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("steps", torch.zeros(2))

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **options)
        return {name.replace("inner.", ""): value for name, value in state.items()}


class RenamingByHook(nn.Module):
    """The same, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("steps", torch.zeros(2))
        self.register_state_dict_post_hook(_drop_prefix)


def _drop_prefix(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name in list(state):
        state[name.replace("inner.", "")] = state.pop(name)


class Deeper(nn.Module):
    """A module that renames stands inside another one, beside parameters of the names that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Module()
        self.outer.inner = nn.Linear(2, 2)
        self.outer.register_parameter("bias", nn.Parameter(torch.zeros(2)))
        self.outer.register_state_dict_post_hook(_exchange)


def _exchange(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Give two parameters each other's name."""
    first, second = f"{prefix}bias", f"{prefix}inner.bias"
    state[first], state[second] = state[second], state[first]


@BOTH_WAYS
@pytest.mark.parametrize("make", [Renaming, RenamingByHook])
def test_c201_a_state_dict_that_drops_a_prefix(make: Callable[[], nn.Module], assign: bool) -> None:
    tensors = {"weight": torch.full((2, 2), 7.0), "bias": torch.full((2,), 8.0), "steps": torch.full((2,), 9.0)}
    expected = {f"inner.{name}": tensor for name, tensor in tensors.items()}
    _require_filled_or_refused(make(), tensors, expected, assign=assign)


@BOTH_WAYS
def test_c201_a_state_dict_that_exchanges_names(assign: bool) -> None:
    tensors = {"outer.bias": torch.full((2,), 1.0), "outer.inner.bias": torch.full((2,), 2.0)}
    weight = {"outer.inner.weight": torch.full((2, 2), 3.0)}
    # What a name of the checkpoint means is what the module calls so.
    expected = {"outer.bias": tensors["outer.inner.bias"], "outer.inner.bias": tensors["outer.bias"]}
    _require_filled_or_refused(Deeper(), tensors | weight, expected | weight, assign=assign)


@BOTH_WAYS
def test_c201_a_checkpoint_wrapper(assign: bool) -> None:
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    tensors = {"0.weight": torch.full((2, 2), 7.0), "0.bias": torch.full((2,), 8.0)}
    assert set(module.state_dict()) == set(tensors)
    expected = {name.replace("0.", "0._checkpoint_wrapped_module."): tensor for name, tensor in tensors.items()}
    before = _state_of(module)
    try:
        _load_into(module, tensors, assign=assign)
    except stio.StioError:
        assert _state_of(module) == before
        return
    wrapped = module[0]._checkpoint_wrapped_module
    assert torch.equal(wrapped.weight, expected["0._checkpoint_wrapped_module.weight"])
    assert torch.equal(wrapped.bias, expected["0._checkpoint_wrapped_module.bias"])
    assert len(list(module.parameters())) == 2


class Copying(nn.Module):
    """Its state_dict holds copies, as that of a module that gathers or casts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(2))
        self.register_state_dict_post_hook(_copy)


def _copy(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, value in state.items():
        state[name] = value.detach().clone()


@BOTH_WAYS
def test_c201_a_state_dict_of_copies(assign: bool) -> None:
    tensors = {"a": torch.full((2,), 5.0)}
    _require_filled_or_refused(Copying(), tensors, tensors, assign=assign)


@pytest.mark.parametrize("make", [Renaming, RenamingByHook])
def test_c201_a_warm_start_of_a_renaming_module(make: Callable[[], nn.Module]) -> None:
    tensors = {"weight": torch.full((2, 2), 7.0), "bias": torch.full((2,), 8.0), "steps": torch.full((2,), 9.0)}
    with torch.device("meta"):
        module = make()
    try:
        with sync.warm_start(module, MemoryRoot(checkpoint_files(tensors))) as warm:
            warm.done()
    except stio.StioError:
        assert all(tensor.is_meta for tensor in _tensors_of(module).values())
        return
    found = _tensors_of(module)
    assert set(found) == {f"inner.{name}" for name in tensors}
    for name, tensor in tensors.items():
        assert torch.equal(found[f"inner.{name}"], tensor), name


# 208. Hooks of modules that take part in a load.


class Hooked:
    """A module with one load hook, and what the hook did."""

    def __init__(self, kind: str, device: str = "cpu") -> None:
        self.calls: list[str] = []
        layer = nn.Linear(2, 2, device=device) if kind != "overridden" else _Overriding(self.calls, device)
        self.module = nn.Sequential(layer)
        if kind == "pre":
            layer.register_load_state_dict_pre_hook(self._double)
        elif kind == "old pre":
            layer._register_load_state_dict_pre_hook(lambda *rest: self._double(layer, *rest))
        elif kind == "renaming pre":
            layer.register_load_state_dict_pre_hook(self._rename)
        elif kind == "post":
            layer.register_load_state_dict_post_hook(lambda *_: self.calls.append("post"))

    def _double(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        self.calls.append("pre")
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    def _rename(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Take the name of an older version of the module."""
        self.calls.append("renaming")
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    def seen(self) -> tuple[list[str], Tensors]:
        """Return what the hook did, and what the module holds."""
        return self.calls, {name: tensor.detach() for name, tensor in self.module.state_dict().items()}


class _Overriding(nn.Linear):
    def __init__(self, calls: list[str], device: str) -> None:
        super().__init__(2, 2, device=device)
        self._calls = calls

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._calls.append("overridden")
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, *rest)


def _checkpoint_for(kind: str) -> Tensors:
    weight = "0.kernel" if kind == "renaming pre" else "0.weight"
    return {weight: torch.full((2, 2), 3.0), "0.bias": torch.ones(2)}


def _require_as_torch(found: tuple[list[str], Tensors], kind: str) -> None:
    expected = Hooked(kind)
    expected.module.load_state_dict(_checkpoint_for(kind))
    calls, tensors = expected.seen()
    assert found[0] == calls
    for name, tensor in tensors.items():
        assert torch.equal(found[1][name], tensor), name


HOOKS = ["pre", "old pre", "post", "overridden", "renaming pre"]


@BOTH_WAYS
@pytest.mark.parametrize("kind", HOOKS)
def test_c208_load_hooks_run_or_are_refused(kind: str, assign: bool) -> None:
    hooked = Hooked(kind, "meta" if assign else "cpu")
    try:
        _load_into(hooked.module, _checkpoint_for(kind), assign=assign)
    except stio.StioError:
        assert all(tensor.is_meta is assign for tensor in _tensors_of(hooked.module).values())
        return
    _require_as_torch(hooked.seen(), kind)


@pytest.mark.parametrize("kind", HOOKS)
def test_c208_load_hooks_of_a_warm_start_run_or_are_refused(kind: str) -> None:
    hooked = Hooked(kind, "meta")
    try:
        with sync.warm_start(hooked.module, MemoryRoot(checkpoint_files(_checkpoint_for(kind)))) as warm:
            warm.done()
    except stio.StioError:
        return
    _require_as_torch(hooked.seen(), kind)


@BOTH_WAYS
def test_c208_modules_of_torch_with_load_hooks_load(assign: bool) -> None:
    """Some override `_load_from_state_dict` for checkpoints of older versions only."""

    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(3), nn.MultiheadAttention(4, 2), nn.InstanceNorm1d(3, affine=True))

    source, module = make(), make()
    tensors = {name: torch.rand(tensor.shape).to(tensor.dtype) for name, tensor in source.state_dict().items()}
    report = _load_into(module, tensors, assign=assign)
    assert report == stio.LoadReport((), ())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name


class WithExtraState(nn.Linear):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.extra = torch.zeros(3)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


@BOTH_WAYS
def test_c208_extra_state_is_set_or_refused(assign: bool) -> None:
    module = WithExtraState()
    tensors = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "_extra_state": torch.arange(3.0)}
    try:
        _load_into(module, tensors, assign=assign)
    except stio.StioError as error:
        assert "_extra_state" in str(error)
    else:
        assert torch.equal(module.extra, tensors["_extra_state"])


# 213. Tensors that cannot be filled as they are.


def _lazy() -> nn.Module:
    return nn.LazyLinear(3)


def _expanded() -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", torch.zeros(1).expand(3))
    return module


def _of_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(3, 3)


def _sparse() -> nn.Module:
    module = nn.Module()
    module.register_buffer("x", torch.zeros(3).to_sparse())
    return module


@BOTH_WAYS
@pytest.mark.parametrize("make", [_lazy, _expanded, _of_inference, _sparse])
def test_c213_a_tensor_that_cannot_be_filled(make: Callable[[], nn.Module], assign: bool) -> None:
    module = make()
    linear = {"weight": torch.full((3, 3), 2.0), "bias": torch.ones(3)}
    tensors = {"x": torch.arange(3.0)} if "x" in dict(module.named_buffers()) else linear
    try:
        _load_into(module, tensors, assign=assign)
    except stio.StioError as error:
        assert any(name in str(error) for name in tensors), error
        return
    found = _tensors_of(module)
    for name, tensor in tensors.items():
        assert torch.equal(found[name].detach().to_dense(), tensor), name


# 216. Parameters that are distributed.

PLACEMENTS = ["Shard(0)", "Shard(1)", "Replicate()"]

_DISTRIBUTED = """
import warnings
import torch.distributed
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from fakes import MemoryRoot, checkpoint_files

# `distribute_tensor` of older versions of torch says so on a CPU.
warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(32.0).reshape(8, 4)
source = MemoryRoot(checkpoint_files({"w": full, "plain": torch.ones(2)}))

def make(placement, device="cpu"):
    module = nn.Module()
    module.w = nn.Parameter(distribute_tensor(torch.zeros(8, 4, device=device), mesh, [placement]))
    module.plain = nn.Parameter(torch.zeros(2, device=device))
    return module

def into(placement, assign):
    module = make(placement, "meta" if assign else "cpu")
    sync.load_into(module, source, assign=assign)
    require(module, placement)

def warm(placement):
    module = make(placement, "meta")
    with sync.warm_start(module, source) as warm:
        warm.done()
    require(module, placement)

def require(module, placement):
    assert isinstance(module.w, DTensor), "it is a plain tensor now"
    assert module.w.placements == (placement,)
    expected = full if placement == Replicate() else full.chunk(2, placement.dim)[1]
    assert torch.equal(module.w.to_local(), expected)
    assert torch.equal(module.plain, torch.ones(2))

"""

_WRAPPED = """
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

def into_wrapped(wrap, prefix, assign):
    module = wrap(nn.Sequential(nn.Linear(4, 4)))
    values = {prefix + "0.weight": torch.ones(4, 4), prefix + "0.bias": torch.ones(4)}
    sync.load_into(module, MemoryRoot(checkpoint_files(values)), assign=assign)
    assert all(bool((parameter == 1).all()) for parameter in module.parameters())

"""
WRAPPED_USES = {
    "DDP": ("DistributedDataParallel, 'module.'", "done"),
    "DDP without its prefix": ("DistributedDataParallel, ''", "refused MismatchError .* module[.] in the module's"),
    "FSDP": ("lambda m: FullyShardedDataParallel(m, device_id=torch.device('cpu')), ''", "refused .* shards"),
    "fully_shard": ("lambda m: fully_shard(m, mesh=mesh), ''", "refused .* 0.weight cannot be filled: .* DTensor"),
}

DISTRIBUTED_USES = {
    "copied": "into({}, False)",
    "assigned": "into({}, True)",
    "warm_start": "warm({})",
}


@pytest.fixture(scope="module")
def distributed(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Return by use and placement what came of it on the second of two ranks."""
    calls = {(use, where): code.format(where) for use, code in DISTRIBUTED_USES.items() for where in PLACEMENTS}
    for use, (wrapped, _) in WRAPPED_USES.items():
        calls |= {(use, assign): f"into_wrapped({wrapped}, {assign})" for assign in ("False", "True")}
    code = _DISTRIBUTED + _WRAPPED + "".join(f"attempt(lambda: {call})\n" for call in calls.values())
    code += "torch.distributed.destroy_process_group()\n"
    lines = in_a_child(zygote, code, tmp_path_factory.mktemp("distributed"))
    return dict(zip(calls, lines, strict=True))


@pytest.mark.matrix
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("use", list(DISTRIBUTED_USES))
def test_c216_distributed_parameters(use: str, placement: str, distributed: dict[tuple[str, str], str]) -> None:
    """Each rank gets its own shard, or the load is refused and says of which parameter."""
    found = distributed[use, placement]
    assert found == "done" or (found.startswith("refused ") and re.search(r"\bw\b", found))


@pytest.mark.parametrize("assign", ["False", "True"])
@pytest.mark.parametrize("use", list(WRAPPED_USES))
def test_c216_wrappers_of_distributed_modules(use: str, assign: str, distributed: dict[tuple[str, str], str]) -> None:
    """As `load_state_dict`: prefixes are not guessed. What shards parameters is refused."""
    assert re.match(WRAPPED_USES[use][1], distributed[use, assign])
