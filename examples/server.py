"""An inference server that answers while its weights load: `python examples/server.py MODELS FIRST`.

`GET /health` answers from the start. `GET /ready` returns the progress of a load, in percent and bytes; its status is
503 until a model is loaded. `POST /models {"path": "v2"}` checks MODELS/v2, answers 202, loads it while the current
model answers, and switches when the load is complete. Each request is answered by one model. The old model is freed
after its last request, so there must be memory for two. During a load, a second one is refused with 409. If a load
fails, the old model stays, and `/ready` shows the error. A shutdown cancels a load. Needs fastapi and uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field
from torch import nn

import stio

SWITCH_SECONDS = 0.0005
"""The switch interval during a load. Beside a busy Python thread requests wait for the GIL, by default 5 ms a time."""

logger = logging.getLogger("uvicorn.error")

Progress = Callable[[stio.ProgressEvent], object]
Load = Callable[[Path, Progress], Awaitable["Served"]]


# The model: replace it by your own.


class Network(nn.Module):
    """Scores the next token: an embedding, residual blocks, and a head. It is made on `meta`, without memory."""

    def __init__(self, vocabulary: int, hidden: int, wide: int, num_blocks: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False, device="meta")
        self.embed = nn.Embedding(vocabulary, hidden, device="meta")
        self.blocks = nn.ModuleList(
            nn.Sequential(linear(hidden, wide), nn.GELU(), linear(wide, hidden)) for _ in range(num_blocks)
        )
        self.head = linear(hidden, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores [vocabulary] of the token that follows tokens [length]."""
        x = self.embed(tokens).mean(0)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


Network(1, 1, 1, 1)  # the first use of `meta` imports parts of torch for a second: do it before the first request


def fits(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether these are the names and shapes of the weights of a network, of any size."""
    try:
        (vocabulary, hidden), (wide, _) = shapes["embed.weight"], shapes["blocks.0.0.weight"]
    except (KeyError, ValueError):
        return False
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(["embed.weight", "head.weight"], (vocabulary, hidden))
    for number in range((len(shapes) - 2) // 2):
        expected |= {f"blocks.{number}.0.weight": (wide, hidden), f"blocks.{number}.2.weight": (hidden, wide)}
    return shapes == expected


def assemble(tensors: Mapping[str, torch.Tensor]) -> Network:
    """Make a network whose parameters are the loaded weights; nothing is copied."""
    vocabulary, hidden = tensors["embed.weight"].shape
    network = Network(vocabulary, hidden, len(tensors["blocks.0.0.weight"]), (len(tensors) - 2) // 2)
    network.load_state_dict(tensors, assign=True)
    return network.eval()


# Loading.


@dataclass(frozen=True)
class Served:
    """A model that can answer."""

    version: str
    network: Network

    @torch.inference_mode()
    def predict(self, tokens: list[int]) -> int:
        weight = self.network.embed.weight
        if max(tokens) >= len(weight):
            raise ValueError(f"tokens must be below {len(weight)}")
        return int(self.network(torch.tensor(tokens, device=weight.device)).argmax())


async def check(path: Path) -> None:
    """Check a checkpoint by its headers. Raise StioError if it is damaged, ValueError if it is of another model."""
    async with stio.open(path) as checkpoint:
        shapes = {name: checkpoint.info(name).shape for name in checkpoint}
    if not fits(shapes):
        raise ValueError(f"{path}: these are other tensors than this server's model has")


async def load(path: Path, progress: Progress, device: str = "cpu") -> Served:
    """Load a model while the event loop runs. A cancel ends the load."""
    async with stio.open(path, device=device, progress=progress, switch_interval=SWITCH_SECONDS) as checkpoint:
        tensors = await checkpoint.load()
        version = checkpoint.metadata.get("version", path.name)
    # Each call of torch may wait for the GIL, a few calls for each tensor: so not on the event loop.
    return Served(version, await asyncio.to_thread(assemble, tensors))


class Models:
    """The model that answers, and the one that is loading. All methods run on the event loop, so no lock is needed."""

    def __init__(self, root: Path, load: Load) -> None:
        self._root, self._load = root, load
        self._progress: stio.ProgressEvent | None = None
        self._task: asyncio.Task[None] | None = None
        self.current: Served | None = None
        self.loading: str | None = None
        self.error: str | None = None

    async def swap(self, path: str) -> None:
        """Check that another model exists, and start to load it."""
        if self.loading is not None:
            raise HTTPException(409, f"{self.loading} is being loaded")
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise HTTPException(400, "the path must lead to a place below the server's directory of models")
        self.loading, self._progress = path, None  # from now on a second load is refused
        try:
            await check(self._root / path)
        except (stio.StioError, ValueError) as error:
            raise HTTPException(404 if isinstance(error, stio.CheckpointNotFoundError) else 422, str(error)) from error
        finally:
            self.loading = None
        self.start(path)

    def start(self, path: str) -> None:
        """Start a task that loads a model and then switches to it."""
        self.loading, self._progress, self.error = path, None, None
        self._task = asyncio.create_task(self._load_and_switch(path))

    async def _load_and_switch(self, path: str) -> None:
        try:
            if self.current is None:
                await check(self._root / path)  # the first model; `swap` has checked any other
            loaded = await self._load(self._root / path, self._on_progress)
            old, self.current = [self.current], loaded
            await asyncio.to_thread(old.clear)  # freeing may wait for the GIL too, once for each tensor
        except Exception as error:
            logger.exception("loading %r failed", path)
            self.error = f"{path}: {error}"
        finally:
            self.loading = None

    def _on_progress(self, event: stio.ProgressEvent) -> None:
        self._progress = event  # called by stio's threads

    def state(self) -> dict[str, object]:
        """Return the version of the current model, the progress of a load, and the last error."""
        event = self._progress if self.loading is not None else None
        done, total = (event.done_bytes, event.total_bytes) if event else (0, 0)
        percent = round(100 * done / (total or 1), 1)
        loading = {"path": self.loading, "percent": percent, "bytes": done, "total_bytes": total}
        return {
            "ready": self.current is not None,
            "version": self.current.version if self.current else None,
            "loading": loading if self.loading is not None else None,
            "error": self.error,
        }

    async def aclose(self) -> None:
        """Cancel a load, and wait until its threads and memory are released."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])


# The server.


class Swap(BaseModel):
    path: str = Field(min_length=1)


class Question(BaseModel):
    tokens: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=4096)


def create_app(root: Path, first: str, load: Load = load) -> FastAPI:
    """Return the application. It starts to load `root / first` when it starts."""
    models = Models(root, load)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await stio.preload()  # imports all that a load needs on a thread, and not during a request
        gc.collect()
        gc.freeze()  # otherwise a full collection visits torch's objects: 50 to 200 ms without an answer
        models.start(first)
        yield
        await models.aclose()

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(response: Response) -> dict[str, object]:
        response.status_code = 200 if models.current is not None else 503
        return models.state()

    @app.post("/models", status_code=202)
    async def swap(request: Swap) -> dict[str, object]:
        await models.swap(request.path)
        return models.state()

    @app.post("/predict")
    def predict(question: Question) -> dict[str, object]:  # not a coroutine, so FastAPI runs it on a thread
        served = models.current  # this request keeps its model, even if the server switches to another one
        if served is None:
            raise HTTPException(503, "no model is loaded yet")
        try:
            return {"version": served.version, "next": served.predict(question.tokens)}
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, metavar="MODELS", help="a directory of models")
    parser.add_argument("first", metavar="FIRST", help="the first model: a file or a directory below MODELS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    application = create_app(options.models, options.first, partial(load, device=options.device))
    uvicorn.run(application, host=options.host, port=options.port)
