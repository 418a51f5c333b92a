"""What tests of the engine share: they run workers on their own thread, which is not nice for it."""

from __future__ import annotations

import pytest

from stio.engine import load, save


@pytest.fixture(autouse=True)
def _plain_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, save):
        monkeypatch.setattr(module, "be_nice", lambda: None)
