"""Checkpoints of steps: published when all of their saves are durable, at the interpreter's exit too, or not at all."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch
from support import run_python

from stio.errors import StorageError
from stio.integrations import _step_dirs as _steps
from stio.integrations._step_dirs import STATE_NAME, TRAINER_STATE, PublishedSave, latest_checkpoint
from stio.storage.commit import syscalls as calls
from stio.sync import Saver, load, load_state

WEIGHTS = {"w": torch.arange(4.0)}


def begin(home: Path, step: int, saver: Saver, *, keep_last: int | None = None, state: object = 1) -> PublishedSave:
    with PublishedSave(str(home), step, durable=True) as save:
        Path(save.path, TRAINER_STATE).touch()
        save.add(saver.save(WEIGHTS, save.path))
        save.add(saver.save_state(state, os.path.join(save.path, STATE_NAME)))
    save.start(keep_last=keep_last)
    return save


def test_published_and_rotated(tmp_path: Path) -> None:
    with Saver(max_pending=2) as saver:
        for step in (9, 10, 11):
            begin(tmp_path, step, saver, keep_last=2).result()
        begin(tmp_path, 3, saver, keep_last=2).result()  # a training that began again does not touch what is later
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-11", "checkpoint-3"]
    last = latest_checkpoint(tmp_path)
    assert last == str(tmp_path / "checkpoint-11")
    assert torch.equal(load(last)["w"], WEIGHTS["w"])
    assert load_state(os.path.join(last, STATE_NAME)) == 1


def test_an_old_one_that_stays_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StorageError("it stays")

    monkeypatch.setattr(_steps, "remove_checkpoint", refuse)
    with Saver(max_pending=2) as saver:
        for step in (1, 2):
            begin(tmp_path, step, saver, keep_last=1).result()
    assert len(os.listdir(tmp_path)) == 2
    assert "could not be deleted: it stays" in caplog.text


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with Saver(max_pending=2) as saver:
        with pytest.raises(TypeError):
            begin(tmp_path, 1, saver, state=object())
        assert os.listdir(tmp_path) == []
        begin(tmp_path, 2, saver).result()


def test_a_failure_is_logged_and_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(calls, "fsync", refuse)
    with caplog.at_level(logging.ERROR), Saver(max_pending=2) as saver:
        save = begin(tmp_path, 7, saver)
        with pytest.raises(StorageError):
            save.result()
    assert "checkpoint of step 7 failed" in caplog.text
    assert os.listdir(tmp_path) == []


def test_a_script_that_ends_lets_it_be_published(tmp_path: Path) -> None:
    code = f"""
from integrations.test_step_dirs import begin
from stio.sync import Saver
from pathlib import Path
saver = Saver(max_pending=2)
begin(Path({str(tmp_path)!r}), 5, saver)
raise SystemExit(3)
"""
    done = run_python(code)
    assert done.returncode == 3, done.stderr
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")
