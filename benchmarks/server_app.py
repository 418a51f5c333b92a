"""The server of one run, in a process of its own: `python -m benchmarks.server_app SPEC`, SPEC as JSON.

It is examples/server.py; contestants differ in how it loads and in nothing else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from safetensors.torch import load_file

from benchmarks import meters

_EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "server.py"


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("example_server", _EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def _stio(example: Any) -> Callable[..., Any]:
    example.SWITCH_SECONDS = None
    load: Callable[..., Any] = example.load
    return load


def _in_a_thread(assemble: Callable[[Any, dict[str, torch.Tensor]], Any]) -> Callable[[Any], Callable[..., Any]]:
    def prepare(example: Any) -> Callable[..., Any]:
        async def unchecked(path: Path) -> None:
            """Let a swap begin at once: a look at the file is stio's."""

        def blocking(path: Path) -> Any:
            return example.Served(path.name, assemble(example, load_file(path)))

        async def load(path: Path, progress: object) -> Any:
            return await asyncio.to_thread(blocking, path)

        example.check = unchecked
        return load

    return prepare


def _copy(example: Any, tensors: dict[str, torch.Tensor]) -> Any:
    network = example.assemble(tensors).to_empty(device="cpu")
    network.load_state_dict(tensors)
    return network


def _map(example: Any, tensors: dict[str, torch.Tensor]) -> Any:
    meters.touch_all(meters.tensor_arrays(tensors), "page")
    return example.assemble(tensors)


_LOADS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "stio": _stio,
    "stio-switch": lambda example: example.load,
    "safetensors": _in_a_thread(_copy),
    "safetensors-map": _in_a_thread(_map),
}


def main() -> None:
    """Serve on the socket of the spec until a signal comes."""
    spec = json.loads(sys.argv[1])
    example = _example()
    app = example.create_app(Path(spec["directory"]), spec["first"], _LOADS[spec["contestant"]](example))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with meters.busy_thread(spec["busy"]):
        server.run(sockets=[socket.socket(fileno=spec["descriptor"])])


if __name__ == "__main__":
    main()
