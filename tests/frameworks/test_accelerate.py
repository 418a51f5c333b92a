"""accelerate over stio: dispatch, offload, checkpoints of models and of training give what they give over safetensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling")

Compare = Callable[..., Any]
INPUT = torch.linspace(-1, 1, 24).reshape(2, 12)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.norm = nn.BatchNorm1d(2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.norm(self.first(x)).relu())


class Network(nn.Module):
    """Layers with buffers, of which one is of whole numbers, and two tied weights."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.head = nn.Linear(12, 12, bias=False)
        self.last = nn.Linear(12, 12, bias=False)
        if is_tied:
            self.last.weight = self.head.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.head(x))


PLACES = {"blocks.0": "cpu", "blocks.1": "disk", "blocks.2": "disk", "head": "cpu", "last": "disk"}


def network(seed: int = 1, **options: Any) -> Network:
    torch.manual_seed(seed)
    return Network(**options).eval()


def empty(**options: Any) -> Network:
    with accelerate.init_empty_weights():
        return Network(**options).eval()


def output(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return module(INPUT)


@pytest.fixture(params=["10GB", "5KB"], ids=["one file", "shards"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint that was written by safetensors."""
    accelerate.Accelerator(cpu=True).save_model(network(), tmp_path / "checkpoint", max_shard_size=request.param)
    files = len(list((tmp_path / "checkpoint").glob("*.safetensors")))
    assert (files == 1) == (request.param == "10GB")
    return tmp_path / "checkpoint"


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"max_shard_size": "5KB"}], ids=str)
@pytest.mark.parametrize("is_tied", [False, True])
def test_save_model(compare: Compare, options: dict[str, Any], is_tied: bool) -> None:
    def action(folder: Path) -> None:
        accelerate.Accelerator(cpu=True).save_model(network(is_tied=is_tied), folder, **options)

    compare(action, loads=False, saves=True)


@pytest.mark.matrix
def test_save_model_that_is_offloaded(compare: Compare, checkpoint: Path, tmp_path: Path) -> None:
    def action(folder: Path) -> None:
        module = accelerate.load_checkpoint_and_dispatch(empty(), checkpoint, PLACES, offload_folder=tmp_path / "disk")
        accelerate.Accelerator(cpu=True).save_model(module, folder, max_shard_size="5KB")

    compare(action, saves=True)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [{}, {"device_map": {"": "cpu"}}, {"dtype": torch.bfloat16}, {"device_map": {"": "cpu"}, "dtype": torch.float16}],
    ids=str,
)
def test_load_checkpoint_in_model(compare: Compare, checkpoint: Path, options: dict[str, Any]) -> None:
    def action(folder: Path) -> Any:
        module = network(seed=2)
        accelerate.load_checkpoint_in_model(module, checkpoint, **options)
        return module

    compare(action)


@pytest.mark.matrix
def test_load_checkpoint_in_model_strictly(compare: Compare, checkpoint: Path) -> None:
    def action(folder: Path) -> Any:
        module = nn.ModuleDict({"blocks": network(seed=2).blocks})
        with pytest.raises(RuntimeError, match=r"head\.weight") as error:
            accelerate.load_checkpoint_in_model(module, checkpoint, strict=True)
        return str(error.value)

    compare(action)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "places", [{"": "cpu"}, "auto", "sequential", PLACES], ids=["cpu", "auto", "sequential", "disk"]
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_load_checkpoint_and_dispatch(
    compare: Compare, checkpoint: Path, places: Any, dtype: torch.dtype | None
) -> None:
    def action(folder: Path) -> Any:
        module = accelerate.load_checkpoint_and_dispatch(
            empty(), checkpoint, places, offload_folder=folder, dtype=dtype, offload_buffers=places is PLACES
        )
        return module, output(module) if dtype is None else None

    compare(action)


@pytest.mark.matrix
def test_offload_reads_the_checkpoint_itself(compare: Compare, checkpoint: Path) -> None:
    """With an index that names safetensors' files, weights are read when a layer runs."""

    def action(folder: Path) -> Any:
        index = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            for name in modeling.load_state_dict(str(path)):
                index[name] = {"safetensors_file": str(path), "weight_name": name, "dtype": "float32"}
        module = accelerate.dispatch_model(
            network(), {"blocks": "disk", "head": "cpu", "last": "cpu"}, "cpu", offload_index=index
        )
        assert module.blocks[0].first.weight.is_meta
        return module, output(module)

    compare(action)


@pytest.mark.matrix
def test_cpu_and_disk_offload(compare: Compare, checkpoint: Path) -> None:
    def action(folder: Path) -> Any:
        weights = {}
        for path in sorted(checkpoint.glob("*.safetensors")):
            weights |= modeling.load_state_dict(str(path))
        first = accelerate.cpu_offload(network(seed=2), "cpu", state_dict=weights)
        second = network(seed=3)
        second.load_state_dict(weights)
        second = accelerate.disk_offload(second, folder, "cpu")
        assert second.head.weight.is_meta
        return first, output(first), second, output(second)

    compare(action)


@pytest.mark.matrix
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, PLACES], ids=["none", "cpu", "places"])
def test_load_state_dict(compare: Compare, checkpoint: Path, device_map: dict[str, str] | None) -> None:
    def action(folder: Path) -> Any:
        return [
            modeling.load_state_dict(str(path), device_map=device_map)
            for path in sorted(checkpoint.glob("*.safetensors"))
        ]

    compare(action)


@pytest.mark.matrix
@pytest.mark.parametrize("is_tied", [False, True])
def test_state_of_training(compare: Compare, is_tied: bool) -> None:
    """`save_state` and `load_state`: weights by safetensors, with what torch saves beside them."""

    def action(folder: Path) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        module = network(is_tied=is_tied).train()
        optimizer = torch.optim.Adam(module.parameters())
        module, optimizer = accelerator.prepare(module, optimizer)
        for _ in range(2):
            accelerator.backward(module(INPUT).square().mean())
            optimizer.step()
        accelerator.save_state(folder / "state", safe_serialization=True)
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        accelerator.load_state(folder / "state")
        assert_restored = {name: torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items()}
        assert all(assert_restored.values())
        return module, optimizer.state_dict()

    compare(action, saves=True)


def test_a_state_dict_is_saved(compare: Compare) -> None:
    def action(folder: Path) -> Any:
        accelerate.Accelerator(cpu=True).save(
            network().state_dict(), folder / "weights.safetensors", safe_serialization=True
        )
        return modeling.load_state_dict(str(folder / "weights.safetensors"))

    compare(action, saves=True)
