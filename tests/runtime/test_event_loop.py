"""The event loop on a thread of stio's own, for coroutines of storages and producers."""

from __future__ import annotations

import errno
import threading

import pytest
from support import eventually

from stio.errors import StorageError
from stio.runtime import calls
from stio.runtime.calls import LoopTask, run_on_loop


async def one() -> int:
    return 1


def test_a_loop_without_a_thread_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next coroutine would wait for it for ever."""
    monkeypatch.setattr(calls, "_loop", None)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for begin in (run_on_loop, LoopTask):
            with pytest.raises(StorageError, match="starts no thread for the event loop") as caught:
                begin(one)
            assert caught.value.errno == errno.EAGAIN
    assert run_on_loop(one) == 1
    assert LoopTask(one).result() == 1
    loop = calls._running_loop()
    loop.call_soon_threadsafe(loop.stop)
    assert eventually(lambda: not loop.is_running())
    loop.close()
