"""What the tests of training frameworks share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from stio.storage.commit import syscalls as calls


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves do not become durable before the event is set."""
    plain, release = calls.fsync, threading.Event()

    def fsync(fd: int) -> None:
        assert release.wait(30)
        plain(fd)

    monkeypatch.setattr(calls, "fsync", fsync)
    yield release
    release.set()
