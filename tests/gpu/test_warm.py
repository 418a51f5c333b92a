"""Warm starts on a device: a forward at once is the forward after the load, on any stream, in any kind of module."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerators import PLACES, Place
from fakes import FaultyRoot
from support import require_equal
from torch import nn
from warm import TOKENS, Net, in_thread, made, on_meta, saved

import stio
from stio import sync
from stio.errors import ClosedError
from stio.storage.local import LocalRoot

on_places = pytest.mark.parametrize("place", PLACES, indirect=True)
own_streams = pytest.mark.parametrize("own_stream", [False, True])

WIDTH = 64


class Attention(nn.Module):
    """A module whose submodule's parameters C++ takes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Tied(nn.Module):
    """One weight, used as two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.head(x), self.embed.weight.t())


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(), 3)


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(12)])


MODULES = [Attention, Tied, layer, encoder, partial(nn.Conv1d, 5, 7, 3), stack]
NAMES = ["attention", "tied", "encoder layer", "encoder", "convolution", "stack"]


def ran(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(x)


def require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare results of different kernels: torch's fast paths round otherwise."""
    found, expected = found.cpu(), expected.cpu()
    assert (found - expected).abs().max() <= 1e-3 * max(1.0, float(expected.abs().max()))


@pytest.mark.matrix
@on_places
@own_streams
@pytest.mark.parametrize("make", MODULES, ids=NAMES)
def test_a_forward_at_once(place: Place, tmp_path: Path, make: Callable[[], nn.Module], own_stream: bool) -> None:
    real, module = made(make), on_meta(make)
    saved(real, tmp_path)
    x = torch.rand(2, 5, WIDTH).to(place.torch_device)
    with sync.warm_start(module, tmp_path, device=place.device) as warm:
        if own_stream:
            with place.own_stream():
                out = ran(module, x).cpu()
        else:
            out = ran(module, x).cpu()
        warm.done()
    require_close(out, ran(module, x))
    require_close(out, ran(real.to(place.torch_device), x))
    require_equal(dict(module.state_dict()), dict(real.state_dict()))
    assert all(parameter.device == place.torch_device for parameter in module.parameters())


@pytest.mark.matrix
@on_places
@own_streams
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_buffers_and_casts(place: Place, tmp_path: Path, own_stream: bool, dtype: torch.dtype | None) -> None:
    """Buffers are there when the block begins, for every stream; so are casts."""
    real, module = made(Net), on_meta(Net)
    saved(real, tmp_path)
    real = real.to(place.torch_device)
    if dtype is not None:
        real = real.to(dtype)
    tokens = TOKENS.to(place.torch_device)
    with place.own_stream():
        place.keep_busy(10_000_000)  # what the caller's own stream does holds nothing up
    with sync.warm_start(module, tmp_path, device=place.device, dtype=dtype):
        with place.own_stream() if own_stream else torch.no_grad():
            steps = module.steps.clone()
            scale = module.scale.detach().clone()
            out = ran(module, tokens).clone() if dtype is None else None
            if place.is_real:
                torch.accelerator.current_stream().synchronize()
    assert torch.equal(steps.cpu(), real.steps.cpu())
    assert torch.equal(scale.cpu(), real.scale.detach().cpu())
    if out is not None:
        require_close(out, ran(real, tokens))
    assert module.head.weight is module.embed.weight
    assert module.hidden.device == place.torch_device


@on_places
def test_several_threads_on_their_own_streams(place: Place, tmp_path: Path) -> None:
    real, module = made(stack), on_meta(stack)
    saved(real, tmp_path)
    x = torch.rand(3, WIDTH).to(place.torch_device)

    def use() -> torch.Tensor:
        with place.own_stream():
            return ran(module, x).cpu()

    with sync.warm_start(module, tmp_path, device=place.device):
        with in_thread(use) as first, in_thread(use) as second, in_thread(use) as third:
            pass
    for running in (first, second, third):
        require_close(running.outcome(), ran(real, x.cpu()))


@pytest.mark.matrix
@on_places
def test_a_load_that_fails(place: Place, tmp_path: Path) -> None:
    """The forward fails and says why; the device has its memory back."""
    real, module = made(stack), on_meta(stack)
    saved(real, tmp_path)
    root = FaultyRoot(LocalRoot(tmp_path), fail_at=4)
    x = torch.rand(3, WIDTH).to(place.torch_device)
    with pytest.raises(stio.StorageError):
        with sync.warm_start(module, root, device=place.device, budget_bytes=1 << 16) as warm:
            with pytest.raises(ClosedError, match="the warm start failed"):
                ran(module, x)
            warm.done()
    with sync.warm_start(module, tmp_path, device=place.device):
        out = ran(module, x)
    require_close(out, ran(real, x.cpu()))
    del module, out, warm, x
    place.require_freed()


@pytest.mark.anyio
@on_places
async def test_on_a_loop_that_the_forward_blocks(place: Place, tmp_path: Path) -> None:
    real, module = made(Net), on_meta(Net)
    saved(real, tmp_path)
    tokens = TOKENS.to(place.torch_device)
    async with stio.warm_start(module, tmp_path, device=place.device) as warm:
        out = ran(module, tokens)  # no await from here until it is there
        await warm.done()
    require_close(out, ran(real, TOKENS))
    require_equal(dict(module.state_dict()), dict(real.state_dict()))
