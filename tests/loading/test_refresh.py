"""New weights for a module that has data: its tensors keep their addresses, and change whole or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from support import Gate, HookedRoot, eventually, eventually_async, nothing_left, require_equal, save_file
from torch import nn

import stio
from stio import sync
from stio.loading.options import Memory
from stio.loading.scheduler import LoadScheduler

NUM_LAYERS = 16
WIDTH = 128
LAYER_BYTES = WIDTH * WIDTH * 4
BUDGET_BYTES = 4 * LAYER_BYTES


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {f"{k}.weight": torch.rand(WIDTH, WIDTH, generator=chance) + 1 for k in range(NUM_LAYERS)}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    return save_file(weights, tmp_path_factory.mktemp("refresh") / "model.safetensors")


@pytest.fixture
def root(path: Path) -> Iterator[HookedRoot]:
    root = HookedRoot(path.parent)
    yield root
    root.close()


class Refreshed:
    """Layers whose weights are zero, and what must be true of their tensors after a load."""

    def __init__(self) -> None:
        self.module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
        for layer in self.module:
            nn.init.zeros_(layer.weight)
        self.parameters = dict(self.module.named_parameters())
        self.addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self.versions = {name: parameter._version for name, parameter in self.parameters.items()}

    def changes(self) -> dict[str, int]:
        """Return by how much each version counter rose."""
        return {name: parameter._version - self.versions[name] for name, parameter in self.parameters.items()}

    def num_changed(self) -> int:
        return sum(map(bool, self.changes().values()))

    def require_same_places(self) -> None:
        now = dict(self.module.named_parameters())
        assert all(now[name] is parameter for name, parameter in self.parameters.items())
        assert {name: parameter.data_ptr() for name, parameter in now.items()} == self.addresses

    def require_old_or_new(self, weights: dict[str, torch.Tensor]) -> None:
        """Require that some tensors are new and some old, none is a mixture, and version counters tell which."""
        zero = torch.zeros(WIDTH, WIDTH)
        changes = self.changes()
        assert 0 < self.num_changed() < NUM_LAYERS
        assert set(changes.values()) == {0, 1}
        require_equal(
            {name: parameter.detach() for name, parameter in self.parameters.items()},
            {name: weights[name] if changes[name] else zero for name in weights},
        )
        self.require_same_places()


@pytest.fixture
def refreshed() -> Refreshed:
    return Refreshed()


@pytest.mark.parametrize("memory", ["copy", "map", "lazy"])
def test_addresses_stay_and_each_version_rises_by_one(
    path: Path, weights: dict[str, torch.Tensor], refreshed: Refreshed, memory: Memory
) -> None:
    for round_ in range(1, 3):
        report = sync.load_into(refreshed.module, path, memory=memory, budget_bytes=BUDGET_BYTES)
        assert (report.missing, report.unexpected) == ((), ())
        require_equal(dict(refreshed.module.state_dict()), weights)
        refreshed.require_same_places()
        assert set(refreshed.changes().values()) == {round_}


def test_a_backward_of_the_old_weights_raises(path: Path, refreshed: Refreshed) -> None:
    """The version counters are those that autograd checks."""
    out = refreshed.module(torch.ones(1, WIDTH, requires_grad=True))
    sync.load_into(refreshed.module, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_optimizer_updates_the_new_weights(
    path: Path, weights: dict[str, torch.Tensor], refreshed: Refreshed
) -> None:
    optimizer = torch.optim.SGD(refreshed.module.parameters(), lr=0.5)
    sync.load_into(refreshed.module, path)
    for parameter in refreshed.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    require_equal(dict(refreshed.module.state_dict()), {name: tensor - 0.5 for name, tensor in weights.items()})


class Tied(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("names", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_a_tied_parameter_is_written_once(tmp_path: Path, names: tuple[str, ...]) -> None:
    new = torch.arange(24.0).reshape(6, 4)
    save_file({name: new.clone() for name in names}, tmp_path / "model.safetensors")
    module = Tied()
    weight, version, address = module.embed.weight, module.embed.weight._version, module.embed.weight.data_ptr()
    sync.load_into(module, tmp_path)
    assert module.embed.weight is weight is module.head.weight
    assert (weight._version, weight.data_ptr()) == (version + 1, address)
    require_equal({"": weight.detach()}, {"": new})


@pytest.mark.anyio
async def test_a_cancel_in_the_middle(
    root: HookedRoot, weights: dict[str, torch.Tensor], refreshed: Refreshed, monkeypatch: pytest.MonkeyPatch
) -> None:
    root.hook = gate = Gate(after=NUM_LAYERS // 2)  # a read brings at most one layer
    stop = LoadScheduler.stop

    def stop_then_open(scheduler: LoadScheduler) -> None:
        stop(scheduler)
        gate.opened.set()  # only now: a load that is not stopped yet would complete

    monkeypatch.setattr(LoadScheduler, "stop", stop_then_open)
    with nothing_left():
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: stio.load_into(refreshed.module, root, memory="copy", budget_bytes=BUDGET_BYTES))
            assert await eventually_async(lambda: gate.reached.is_set() and refreshed.num_changed() > 0)
            group.cancel_scope.cancel()
    refreshed.require_old_or_new(weights)
    root.hook = lambda *_: None
    await stio.load_into(refreshed.module, root)
    require_equal(dict(refreshed.module.state_dict()), weights)
    refreshed.require_same_places()


def test_an_error_in_the_middle(root: HookedRoot, weights: dict[str, torch.Tensor], refreshed: Refreshed) -> None:
    numbers = itertools.count()

    def fail_in_the_middle(name: str, offset: int, nbytes: int) -> None:
        if next(numbers) >= NUM_LAYERS // 2:
            assert eventually(lambda: refreshed.num_changed() > 0)
            raise stio.StorageError("this read fails", path=name, offset=offset)

    root.hook = fail_in_the_middle
    with pytest.raises(stio.StorageError, match="this read fails"):
        sync.load_into(refreshed.module, root, memory="copy", budget_bytes=BUDGET_BYTES)
    refreshed.require_old_or_new(weights)
    root.hook = lambda *_: None
    sync.load_into(refreshed.module, root)
    require_equal(dict(refreshed.module.state_dict()), weights)
    refreshed.require_same_places()


@pytest.mark.parametrize("made_inside", [False, True])
def test_in_inference_mode(path: Path, weights: dict[str, torch.Tensor], made_inside: bool) -> None:
    """The mode of the caller's thread holds for the threads that copy."""
    with torch.inference_mode(made_inside):
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    with torch.inference_mode():
        sync.load_into(module, path, budget_bytes=BUDGET_BYTES)
    require_equal({name: parameter.detach() for name, parameter in module.named_parameters()}, weights)
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses
    assert all(parameter.is_inference() is made_inside for parameter in module.parameters())


class Recording(torch.Tensor):
    """A tensor that has a copy of its own: it records the call, and stores twice the value."""

    copies: list[int]

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and isinstance(args[0], Recording):
            cls.copies.append(id(args[0]))
            args = (args[0], args[1] * 2, *args[2:])
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("num_recording", [1, NUM_LAYERS], ids=["one of them", "all"])
def test_a_subclass_gets_its_own_call_of_copy(
    path: Path, weights: dict[str, torch.Tensor], refreshed: Refreshed, num_recording: int, monkeypatch: Any
) -> None:
    """Plain tensors of a group are copied in one call, which does not reach an overridden `copy_`."""
    monkeypatch.setattr(Recording, "copies", [], raising=False)
    for layer in list(refreshed.module)[:num_recording]:
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH).as_subclass(Recording))
    sync.load_into(refreshed.module, path)
    own = [layer.weight for layer in refreshed.module if type(layer.weight) is Recording]
    assert sorted(Recording.copies) == sorted(map(id, own))
    assert len(own) == num_recording
    for name, parameter in refreshed.module.named_parameters():
        factor = 2 if type(parameter) is Recording else 1
        require_equal({name: parameter.detach().as_subclass(torch.Tensor)}, {name: weights[name] * factor})
