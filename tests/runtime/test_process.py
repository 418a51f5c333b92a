"""Settings of the whole process: what is left of them after an interruption."""

from __future__ import annotations

import gc

import pytest

from stio import process as process
from stio.process import collection_paused


def test_an_interruption_at_the_begin_of_a_pause_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gc.disable

    def disable() -> None:
        plain()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", disable)
    with pytest.raises(KeyboardInterrupt), collection_paused(1_000_000):
        pass
    assert gc.isenabled()
    assert process._pauses == []
