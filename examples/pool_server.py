"""A server of more models than fit on its device: `python examples/pool_server.py MODELS --device-bytes 10GB`.

Each file and directory below MODELS is a model; its name is that of the file without the suffix. They are networks as
in `server.py`, of any size. `GET /v1/models` returns where each one is: on the device, loading, in host memory, or in
its files. `POST /v1/models/NAME/predict {"tokens": [3, 1, 4]}` answers by a model, which is loaded for it if that is
necessary. If that takes longer than `--patience` seconds, the answer is 503 with the progress and `Retry-After`, and
the load goes on. `POST /v1/models/NAME/prefetch` reads its files into host memory. `GET /stats` returns the pool in
numbers. Needs fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from server import Network, Question, fits

import stio

logger = logging.getLogger("uvicorn.error")


def make(path: Path) -> Network:
    """Return the network of a checkpoint, on `meta`. The pool calls it on a thread of its own."""
    with stio.sync.open(path) as checkpoint:
        shapes = {name: checkpoint.info(name).shape for name in checkpoint}
    if not fits(shapes):
        raise ValueError(f"{path}: these are other tensors than this server's models have")
    vocabulary, hidden = shapes["embed.weight"]
    return Network(vocabulary, hidden, shapes["blocks.0.0.weight"][0], (len(shapes) - 2) // 2).eval()


@torch.inference_mode()
def answer(network: Network, tokens: list[int]) -> int:
    """Return the token that follows. Its work on the device has ended when it returns."""
    weight = network.embed.weight
    if max(tokens) >= len(weight):
        raise ValueError(f"tokens must be below {len(weight)}")
    return int(network(torch.tensor(tokens, device=weight.device)).argmax())


class Models:
    """A pool, and loads that go on when those who asked for them have left. Its methods run on the event loop."""

    def __init__(self, pool: stio.ModelPool, patience: float) -> None:
        self.pool = pool
        self._patience = patience
        self._loads: dict[str, asyncio.Task[None]] = {}

    def state(self, name: str) -> dict[str, Any]:
        """Return where a model is."""
        return asdict(self.pool.status(name))

    async def predict(self, name: str, tokens: list[int]) -> int:
        """Return the answer of a model. Raise TimeoutError if it is not on the device in time."""
        if self.pool.status(name).tier != "device":
            self._load(name)
        async with AsyncExitStack() as used:
            async with asyncio.timeout(self._patience):
                network = await used.enter_async_context(self.pool.use(name))
            return await asyncio.to_thread(answer, network, tokens)

    def _load(self, name: str) -> None:
        """Start a task that waits for a model, so that its load goes on."""
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._wait(name))

    async def _wait(self, name: str) -> None:
        try:
            async with self.pool.use(name):
                pass
        except Exception as error:  # each caller gets it too
            logger.error("loading %r failed: %s", name, error)
        finally:
            del self._loads[name]

    async def aclose(self) -> None:
        """Cancel all loads, and wait until the pool has released everything."""
        for task in self._loads.values():
            task.cancel()
        await asyncio.gather(*self._loads.values(), return_exceptions=True)
        await self.pool.aclose()


def create_app(root: Path, pool: stio.ModelPool, patience: float) -> FastAPI:
    """Return the application. The pool gets all models below `root`."""
    models = Models(pool, patience)
    for path in sorted(root.iterdir()):
        if path.is_dir() or path.suffix == ".safetensors":
            pool.add(path.stem, path, make=partial(make, path))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await stio.preload()  # see `server.py`
        gc.collect()
        gc.freeze()
        async with pool:
            yield
            await models.aclose()

    app = FastAPI(lifespan=lifespan)

    def known(name: str) -> str:
        if name not in pool.names():
            raise HTTPException(404, f"there is no model {name!r}")
        return name

    @app.get("/v1/models")
    async def states() -> dict[str, Any]:
        return {name: models.state(name) for name in pool.names()}

    @app.post("/v1/models/{name}/predict")
    async def predict(name: str, question: Question) -> dict[str, Any]:
        try:
            return {"model": known(name), "next": await models.predict(name, question.tokens)}
        except TimeoutError as error:
            raise HTTPException(503, {"loading": models.state(name)}, headers={"Retry-After": "1"}) from error
        except stio.DeviceMemoryError as error:  # what others hold may be free later
            raise HTTPException(503, str(error), headers={"Retry-After": "10"}) from error
        except stio.StioError as error:
            raise HTTPException(500, str(error)) from error
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    @app.post("/v1/models/{name}/prefetch")
    async def prefetch(name: str) -> dict[str, Any]:
        try:
            await pool.prefetch(known(name))
        except stio.StioError as error:
            raise HTTPException(500, str(error)) from error
        except ValueError as error:  # the pool has no host memory
            raise HTTPException(422, str(error)) from error
        return models.state(name)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return asdict(pool.stats())

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, metavar="MODELS", help="a directory of models")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-bytes", required=True, metavar="SIZE", help="of the device, for models: 10GB")
    parser.add_argument("--host-bytes", default=0, metavar="SIZE", help="of host memory, for files of models")
    parser.add_argument("--patience", type=float, default=2.0, metavar="SECONDS", help="longest wait for a model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    models_of = stio.ModelPool(device=options.device, device_bytes=options.device_bytes, host_bytes=options.host_bytes)
    uvicorn.run(create_app(options.models, models_of, options.patience), host=options.host, port=options.port)
