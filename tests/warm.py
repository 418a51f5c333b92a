"""What tests of warm starts share: a model, its checkpoint, and a load that is held until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from support import PATIENCE_SECONDS, Gate, HookedRoot, eventually, save_file
from torch import nn

from stio import sync


class Net(nn.Module):
    """Ties, buffers of both kinds, and parameters that are used without their module."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.first = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.rand(width))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.arange(1.0, 4.0))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = nn.functional.linear(x, self.first.weight, bias=self.first.bias)
        return self.head(self.norm(x) * self.scale) * self.steps.sum() * self.hidden


TOKENS = torch.tensor([[1, 2, 3, 10], [4, 0, 4, 9]])


def made(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Return a module with numbers in it, the same each time."""
    torch.manual_seed(seed)
    module = make().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-1, 1)
    return module


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a module on meta, but for the buffers that no checkpoint holds."""
    with torch.device("meta"):
        module = make().eval()
    for part, donor in zip(module.modules(), make().modules(), strict=True):
        for name in part._non_persistent_buffers_set:
            part._buffers[name] = donor._buffers[name]
    return module


def saved(module: nn.Module, path: Path) -> Path:
    """Write a module's state as a checkpoint, ties once; return the directory."""
    seen: dict[int, str] = {}
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen[id(value)] = name
            state[name] = value.detach()
    save_file(state, path / "model.safetensors")
    return path


def alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare results: torch's fast paths round otherwise, and parameters that wait take the plain ones."""
    return torch.allclose(found, expected, atol=1e-5)


def load_of(warm: Any) -> Any:
    """Return the load of a warm start of either face; None before it is entered."""
    return getattr(warm, "_twin", warm)._load


class Held:
    """A warm start whose load waits at a gate."""

    def __init__(self, make: Callable[[], nn.Module], path: Path, **keywords: Any) -> None:
        self.real = made(make)
        self.module = on_meta(make)
        self.root = HookedRoot(saved(self.real, path))
        # Buffers are read before the block begins, small ones in one read.
        parameters = {name for name, _ in self.real.named_parameters(remove_duplicate=False)}
        num_buffers = len({*self.real.state_dict()} - parameters)
        self.root.hook = self.gate = Gate(after=min(num_buffers, 1))
        self.warm = sync.warm_start(self.module, self.root, **keywords)

    def waiters(self) -> int:
        """Return how many uses wait."""
        return len(load_of(self.warm).notifier._wakers)

    def after_waiting(self, use: Callable[[nn.Module], Any]) -> Any:
        """Begin a use in a thread, require that it waits, let the load go on, and return what came of it."""
        with in_thread(use, self.module) as running:
            assert eventually(lambda: self.waiters() or running.over.is_set())
            assert not running.over.is_set(), f"it did not wait: {running.result}, {running.error}"
            self.gate.opened.set()
        return running.outcome()


@contextmanager
def held(make: Callable[[], nn.Module], path: Path, **keywords: Any) -> Iterator[Held]:
    """Enter a warm start that has its buffers, and no parameter until the gate is opened; it is opened at the end."""
    load = Held(make, path, **keywords)
    try:
        with load.warm:
            try:
                yield load
            finally:
                load.gate.opened.set()  # before the block's end, which waits for reads under way
    finally:
        load.root.close()


class Running:
    """A call in a thread, and what came of it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        """Return or raise what the call did."""
        if self.error is not None:
            raise self.error
        return self.result


@contextmanager
def in_thread(use: Callable[..., Any], *arguments: Any) -> Iterator[Running]:
    """Run a call beside the block; the block's end waits for it."""
    running = Running()

    def run() -> None:
        try:
            running.result = use(*arguments)
        except BaseException as error:
            running.error = error
        finally:
            running.over.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield running
    thread.join(PATIENCE_SECONDS)
    assert running.over.is_set(), "the call never ended"
