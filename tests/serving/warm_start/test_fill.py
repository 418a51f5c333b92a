"""How a group fills its parameters: hooks of modules, copies for ties, and no code of a user under a lock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import eventually
from torch import nn
from warm import in_thread

from stio.device.base import LoadedGroup
from stio.loading.options import LoadOptions
from stio.loading.targets.base import LoadReport
from stio.serving.warm_start.api import Match, MatchedParameter, WarmStartLoad
from stio.serving.warm_start.parameter import Placeholder

CPU = torch.device("cpu")


def load_for(module: nn.Module, sources: dict[str, str] | None = None) -> WarmStartLoad:
    """Return a load that was not started; its placeholders are those of the module."""
    opened: Any = SimpleNamespace(path="model", discard=lambda: None)
    parameters = tuple(
        MatchedParameter(parameter, name, (sources or {}).get(name, name), parameter.dtype)
        for name, parameter in module.named_parameters()
    )
    load = WarmStartLoad(opened, LoadOptions(), Match(LoadReport((), ()), parameters, {}, {}), (), CPU)
    load.make_placeholders(module, parameters)
    return load


def deliver(load: WarmStartLoad, tensors: dict[str, torch.Tensor]) -> None:
    group: Any = SimpleNamespace(index=0)
    load._deliver(group, LoadedGroup(tensors))


def linear() -> nn.Linear:
    return nn.Linear(4, 4, device="meta")


def test_a_hook_stays_until_all_other_parameters_of_its_module_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups arrive together: the second one must not remove the hook while the first one is still filling."""
    module = linear()
    load = load_for(module)
    waits: list[object] = []  # fills that were begun
    lock = load._lock

    class Counted:
        def __enter__(self) -> None:
            waits.append(self)
            lock.__enter__()

        def __exit__(self, *_: object) -> None:
            lock.__exit__()

    fill = Placeholder.fill
    hooks_at_fill = {}

    def late(placeholder: Placeholder, tensor: torch.Tensor) -> None:
        if not hooks_at_fill:
            assert eventually(lambda: len(waits) == 2)
            assert lock._lock._is_owned()
        hooks_at_fill[placeholder.name] = len(module._forward_pre_hooks)
        fill(placeholder, tensor)

    monkeypatch.setattr(load, "_lock", Counted())
    monkeypatch.setattr(Placeholder, "fill", late)
    with in_thread(deliver, load, {"weight": torch.ones(4, 4)}) as first:
        assert eventually(lambda: len(waits) == 1)
        with in_thread(deliver, load, {"bias": torch.ones(4)}) as second:
            pass
    first.outcome(), second.outcome()
    assert list(hooks_at_fill.values()) == [1, 0]
    assert torch.equal(module(torch.ones(1, 4)), torch.full((1, 4), 5.0))


def test_one_lock_and_no_hook_for_a_group_of_many_parameters() -> None:
    module = nn.Sequential(*[linear() for _ in range(20)])
    load = load_for(module)
    lock, num_taken = load._lock, 0

    class Counted:
        def __enter__(self) -> None:
            nonlocal num_taken
            num_taken += 1
            lock.__enter__()

        def __exit__(self, *_: object) -> None:
            lock.__exit__()

    load._lock = Counted()  # type: ignore[assignment]
    deliver(load, {name: torch.full(tensor.shape, 2.0) for name, tensor in module.named_parameters()})
    assert num_taken == 1
    assert not any(layer._forward_pre_hooks for layer in module)
    assert all(torch.equal(tensor, torch.full(tensor.shape, 2.0)) for tensor in module.parameters())


def test_names_that_are_tied_in_the_checkpoint_only_get_copies() -> None:
    module = nn.Sequential(linear(), linear(), linear())
    names = [name for name, _ in module.named_parameters()]
    load = load_for(module, {name: name.split(".")[1] for name in names})
    deliver(load, {"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    for parameter in module.parameters():
        with torch.no_grad():
            parameter += 1
    assert all(torch.equal(tensor, torch.full(tensor.shape, 2.0)) for tensor in module.parameters())
    assert len({tensor.data_ptr() for tensor in module.parameters()}) == len(names)


class Noisy(nn.Parameter):
    """A parameter whose class would be asked for each change of an attribute."""

    calls: list[str]

    def __setattr__(self, name: str, value: object) -> None:
        self.calls.append(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self.calls.append(name)
        super().__delattr__(name)

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        self.calls.append("requires_grad_")
        return super().requires_grad_(requires_grad)


def test_a_fill_runs_no_code_of_a_subclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noisy, "calls", [], raising=False)
    module = nn.Module()
    module.weight = Noisy(torch.empty(4, device="meta"))
    seen: list[object] = []
    module.weight.register_hook(seen.append)
    load = load_for(module)
    Noisy.calls.clear()
    deliver(load, {"weight": torch.ones(4)})
    assert Noisy.calls == []
    assert type(module.weight) is Noisy
    module.weight.sum().backward()
    assert len(seen) == 1
