"""The engine's event loop, for storages that are asynchronous by nature; it starts when the first of them is used."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["engine_call"]

T = TypeVar("T")


class _EngineLoop:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="stio-engine", daemon=True).start()
            return self._loop


_engine = _EngineLoop()


def engine_call(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the engine's loop and wait for it in this worker thread."""
    return asyncio.run_coroutine_threadsafe(make(), _engine.get()).result()


def _forget_parent() -> None:
    """Start afresh in a forked child: the loop's thread is not here."""
    global _engine
    _engine = _EngineLoop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
