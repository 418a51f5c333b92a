"""New weights for a module on a device: its tensors keep their addresses and change in the order of the stream."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from accelerators import gpu, keep_busy, module_of
from support import HookedRoot, eventually, require_equal
from torch import nn

import stio
from stio.device.base import resolve_device
from stio.testing import write_checkpoint

MIB = 1 << 20
NUM_LAYERS = 24
WIDTH = 512  # 1 MiB of float32 a layer

LEAST_BYTES = 512
"""What the allocator takes for the smallest tensor: torch makes one, for a moment, when it puts a tensor over a storage."""

own_streams = pytest.mark.parametrize("own_stream", [False, True])


def new_module(device: torch.device) -> nn.Module:
    """Return layers whose weights are zero."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(NUM_LAYERS)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    torch.accelerator.synchronize(device)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {f"{k}.weight": torch.rand(WIDTH, WIDTH, generator=chance) + 1 for k in range(NUM_LAYERS)}


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("refresh"), weights, 2)


@gpu
@own_streams
def test_addresses_stay_and_values_change_in_the_order_of_the_stream(
    weights_path: Path, weights: dict[str, torch.Tensor], own_stream: bool
) -> None:
    """What was queued before the call reads the old weights, and what is queued behind it the new ones."""
    device = resolve_device("auto")
    module = new_module(device)
    state = module.state_dict()
    addresses = {name: tensor.data_ptr() for name, tensor in state.items()}
    versions = {name: parameter._version for name, parameter in module.named_parameters()}
    streams = module_of(device)
    stream = streams.Stream(device) if own_stream else streams.current_stream(device)
    with streams.stream(stream):
        keep_busy()
        old = {name: tensor.clone() for name, tensor in state.items()}
        stio.sync.load_into(module, weights_path, budget_bytes=4 * MIB)
        new = {name: tensor.clone() for name, tensor in state.items()}
        stream.synchronize()
    require_equal(new, weights)
    require_equal(old, {name: torch.zeros(WIDTH, WIDTH) for name in weights})
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == addresses
    assert all(parameter._version > versions[name] for name, parameter in module.named_parameters())


@gpu
def test_the_device_needs_no_more_memory_than_the_budget(weights_path: Path) -> None:
    device = resolve_device("auto")
    module, budget_bytes = new_module(device), 4 * MIB
    torch.accelerator.synchronize(device)
    module_of(device).empty_cache()  # a block that another test left may be larger than what is asked for
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    stio.sync.load_into(module, weights_path, budget_bytes=budget_bytes)
    torch.accelerator.synchronize(device)
    extra = torch.accelerator.max_memory_allocated(device) - before
    assert 0 < extra <= budget_bytes + LEAST_BYTES < NUM_LAYERS * MIB


@gpu
def test_after_an_error_each_tensor_is_old_or_new(weights_path: Path, weights: dict[str, torch.Tensor]) -> None:
    """The version counter tells which; addresses stay; the next load repairs it."""
    device = resolve_device("auto")
    module = new_module(device)
    parameters = dict(module.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    versions = {name: parameter._version for name, parameter in parameters.items()}

    def num_changed() -> int:
        return sum(parameter._version > versions[name] for name, parameter in parameters.items())

    numbers = itertools.count()

    def fail_in_the_middle(name: str, offset: int, nbytes: int) -> None:
        if next(numbers) >= NUM_LAYERS // 2:  # a read brings at most one layer
            assert eventually(lambda: num_changed() > 0)
            raise stio.StorageError("this read fails", path=name, offset=offset)

    root = HookedRoot(weights_path, fail_in_the_middle)
    with pytest.raises(stio.StorageError, match="this read fails"):
        stio.sync.load_into(module, root, budget_bytes=4 * MIB)
    torch.accelerator.synchronize(device)
    zero = torch.zeros(WIDTH, WIDTH)
    for name, parameter in parameters.items():
        is_new = parameter._version > versions[name]
        require_equal({name: parameter.detach()}, {name: weights[name] if is_new else zero})
    assert 0 < num_changed() < NUM_LAYERS
    stio.sync.load_into(module, weights_path)
    require_equal(dict(module.state_dict()), weights)
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == addresses
