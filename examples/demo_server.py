"""Part one of the demo: a server that answers health checks while a model loads, and the client that measures it.

The client sends a request every few milliseconds, whether or not the previous one was answered. So each request that is
sent during a pause of the server shows the rest of this pause.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

import torch
from demo_machine import PATIENCE_SECONDS, child, receive
from safetensors.torch import load_file

import stio

PACE_SECONDS = 0.004
"""Time between two requests."""
MARGIN_SECONDS = 0.25
"""For this time the server is also measured before and after the load."""

_HEALTH = b"GET /health HTTP/1.1\r\nHost: demo\r\n\r\n"
_LOAD = b"POST /load HTTP/1.1\r\nHost: demo\r\n\r\n"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

Tensors = Mapping[str, torch.Tensor]


# The contestants: what a handler of a server may contain.


async def in_the_handler(path: Path) -> Tensors:
    return use(load_file(path))


async def in_a_thread(path: Path) -> Tensors:
    return await asyncio.to_thread(lambda: use(load_file(path)))


async def by_stio(path: Path) -> Tensors:
    return await asyncio.to_thread(use, await stio.load(path))


def use(tensors: Tensors) -> Tensors:
    """Read a byte of each page. `load_file` maps the file, and the first use of the weights reads it."""
    for tensor in tensors.values():
        tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    return tensors


LOADS: dict[str, Callable[[Path], Awaitable[Tensors]]] = {
    "safetensors: load_file in the handler": in_the_handler,
    "safetensors: load_file in a thread": in_a_thread,
    "stio: await stio.load": by_stio,
}


# The server.


def run_server(connection: Connection, contestant: str, path: Path, tiny: Path) -> None:
    asyncio.run(serve(connection, LOADS[contestant], path, tiny))


async def serve(connection: Connection, load: Callable[[Path], Awaitable[Tensors]], path: Path, tiny: Path) -> None:
    """Serve at a free port until the other end of the connection is closed."""
    await stio.preload()  # imports all that a load needs
    loaded = [await load(tiny)]  # a first load starts threads: it is not measured, for no contestant
    gc.collect()
    gc.freeze()  # or a collection visits all objects of torch, and answers wait for it
    touch_memory(path.stat().st_size)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while request := await reader.readline():
            while await reader.readline() != b"\r\n":
                pass  # headers
            if request.startswith(b"POST /load "):
                loaded.append(await load(path))
            writer.write(_OK)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    closed = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), closed.set)
    connection.send(server.sockets[0].getsockname()[1])
    await closed.wait()


def touch_memory(nbytes: int) -> None:
    """Write to memory in pages of both sizes, and free it, so that no load includes the time of new memory.

    A virtual machine gets memory from its host at the first write to it. A host may take back free blocks of 2 MiB and
    leave smaller ones; stio's loads use such blocks.
    """
    for advice in ("MADV_NOHUGEPAGE", "MADV_HUGEPAGE"):
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            if hasattr(mmap, advice):
                memory.madvise(getattr(mmap, advice))
            memory[:: mmap.PAGESIZE] = bytes(len(range(0, nbytes, mmap.PAGESIZE)))


# The client.


@dataclass(frozen=True, slots=True)
class Round:
    """One load. Times are in seconds since the client requested it."""

    load_seconds: float
    answers: list[tuple[float, float]]
    """When each health check was sent, and when it was answered."""

    def waits(self) -> list[float]:
        """Return how many seconds each health check waited that was in progress during the load, and the next one."""
        during = [(sent, answered) for sent, answered in self.answers if sent < self.load_seconds and answered > 0]
        following = [(sent, answered) for sent, answered in self.answers if sent >= self.load_seconds]
        return [answered - sent for sent, answered in during + following[:1]]


def measure(contestant: str, path: Path, tiny: Path) -> Round:
    """Start a server, and measure its answers while it loads `path`."""
    with child(run_server, contestant, path, tiny) as (_, connection):
        port = receive(connection)
        gc.collect()
        gc.disable()  # a pause of the client would count as one of the server
        try:
            return asyncio.run(asyncio.wait_for(_measure(port), PATIENCE_SECONDS))
        except TimeoutError:
            raise SystemExit(f"{contestant}: no load within {PATIENCE_SECONDS:.0f} s; choose a smaller file") from None
        finally:
            gc.enable()


async def _measure(port: int) -> Round:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = asyncio.Event()
    probing = asyncio.create_task(_probe(port, end))
    await asyncio.sleep(MARGIN_SECONDS)
    began = perf_counter()
    writer.write(_LOAD)
    await reader.readexactly(len(_OK))
    load_seconds = perf_counter() - began
    await asyncio.sleep(MARGIN_SECONDS)
    end.set()
    answers = await probing
    writer.close()
    return Round(load_seconds, [(sent - began, answered - began) for sent, answered in answers])


async def _probe(port: int, end: asyncio.Event) -> list[tuple[float, float]]:
    """Send health checks at the pace; return when each was sent and answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent: list[float] = []

    async def send() -> None:
        due = perf_counter()
        while not end.is_set():
            sent.append(perf_counter())
            writer.write(_HEALTH)
            due += PACE_SECONDS
            await asyncio.sleep(max(0.0, due - perf_counter()))
        writer.write_eof()

    sending = asyncio.create_task(send())
    answers: list[tuple[float, float]] = []
    with suppress(asyncio.IncompleteReadError):  # the server closes the connection after the last answer
        while True:
            await reader.readexactly(len(_OK))
            answers.append((sent[len(answers)], perf_counter()))
    await sending
    writer.close()
    if len(answers) < len(sent):
        raise RuntimeError(f"the server answered {len(answers)} of {len(sent)} requests")
    return answers
