"""A handler of `logging` that raises changes no outcome."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from clocks import Clock

import stio
from stio.storage.commit import syscalls as calls
from stio.sync import Saver
from stio.text import RareWarnings, log


class Broken(logging.Handler):
    """Raises at each line."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the handler is broken")


@pytest.fixture
def broken() -> Iterator[None]:
    logger, handler = logging.getLogger("stio"), Broken()
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


@pytest.mark.usefixtures("broken")
def test_a_handler_that_raises() -> None:
    log(logging.ERROR, "%s", "text")
    log(logging.ERROR, "%s %s", "too few values")


def test_the_line_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    log(logging.WARNING, "%d of %d", 1, 2)
    (record,) = caplog.records
    assert (record.name, record.getMessage(), record.filename) == ("stio", "1 of 2", os.path.basename(__file__))


@pytest.mark.usefixtures("broken")
def test_a_durable_save_does_not_fail_by_a_handler(tmp_path: Path) -> None:
    """Its retention warns that a file of the user's stays."""
    with Saver(keep_last=1) as saver:
        for step in range(1, 5):
            assert saver.save({"w": torch.ones(4)}, tmp_path / f"step-{step}").result().path
            (tmp_path / f"step-{step}" / "mine.txt").touch()
    assert [os.listdir(tmp_path / f"step-{step}") for step in range(1, 4)] == [["mine.txt"]] * 3


@pytest.mark.usefixtures("broken")
def test_a_rollback_does_not_fail_by_a_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(calls, "fsync", refuse)
    monkeypatch.setattr(calls, "rename", refuse)  # also the staging directory's
    with Saver() as saver, pytest.raises(stio.StorageError, match="Input/output error"):
        saver.save({"w": torch.ones(4)}, tmp_path / "x").result()


def test_warnings_become_rare(clock: Clock) -> None:
    warnings, found = RareWarnings(), []
    for now in range(100):
        if warnings.level() == logging.WARNING:
            found.append(now)
        clock.advance(1)
    assert found == [0, 5, 15, 35, 75]
