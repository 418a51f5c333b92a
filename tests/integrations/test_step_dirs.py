"""Checkpoints of steps: published when all of their saves are durable, at the interpreter's exit too, or not at all."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import run_python

from stio.errors import StorageError
from stio.integrations import _step_dirs as _steps
from stio.integrations._step_dirs import STATE_NAME, TRAINER_STATE, PublishedSave, latest_checkpoint
from stio.storage.commit import syscalls as calls
from stio.storage.commit.retention import WrittenFiles
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

    monkeypatch.setattr(WrittenFiles, "remove", refuse)
    with Saver(max_pending=2) as saver:
        for step in (1, 2):
            begin(tmp_path, step, saver, keep_last=1).result()
    assert len(os.listdir(tmp_path)) == 2
    assert "could not be deleted: it stays" in caplog.text


def test_directories_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another user's, or one that another program removes at this moment: they are no checkpoints to resume from."""
    plain, refused = os.listdir, {"checkpoint-1": PermissionError, "checkpoint-2": FileNotFoundError}

    def listdir(path: Any = ".") -> list[str]:
        error = refused.get(os.path.basename(path) if isinstance(path, str | os.PathLike) else "")
        if error is not None:
            raise error(path)
        return plain(path)

    for name in refused:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(os, "listdir", listdir)
    with Saver(max_pending=2) as saver:
        for step in (3, 4):
            begin(tmp_path, step, saver, keep_last=1).result()
        assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
        assert not caplog.text
        refused[tmp_path.name] = OSError
        begin(tmp_path, 5, saver, keep_last=1).result()  # it is durable, and that counts
    assert "old checkpoints could not be deleted" in caplog.text
    assert sorted(plain(tmp_path)) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_what_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    with Saver(max_pending=2) as saver:
        with pytest.raises(TypeError):
            begin(tmp_path, 1, saver, state=object())
        assert os.listdir(tmp_path) == []
        begin(tmp_path, 2, saver).result()


def test_without_a_thread_to_publish_it_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def start(self) -> None:
            raise StorageError("no more threads")

    with Saver(max_pending=2) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(_steps, "Operation", Refused)
            with pytest.raises(StorageError, match="no more threads"):
                begin(tmp_path, 1, saver)
        assert os.listdir(tmp_path) == []
        begin(tmp_path, 2, saver).result()


def test_a_failure_is_logged_and_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = threading.Event()

    def refuse(fd: int) -> None:
        assert begun.wait(20)  # else the second save of the step would raise the failure of the first
        raise OSError(5, "broken")

    monkeypatch.setattr(calls, "fsync", refuse)
    with caplog.at_level(logging.ERROR), Saver(max_pending=2) as saver:
        save = begin(tmp_path, 7, saver)
        begun.set()
        with pytest.raises(StorageError):
            save.result()
    assert "checkpoint of step 7 failed" in caplog.text
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_script_that_ends_lets_it_be_published(tmp_path: Path, torch_zygote: Any) -> None:
    code = f"""
from integrations.test_step_dirs import begin
from stio.sync import Saver
from pathlib import Path
saver = Saver(max_pending=2)
begin(Path({str(tmp_path)!r}), 5, saver)
raise SystemExit(3)
"""
    done = run_python(code, python=torch_zygote.python)
    assert done.returncode == 3, done.stderr
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-5")


def test_what_others_added_or_replaced_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Saver(max_pending=2) as saver:
        for step in range(4):
            begin(tmp_path, step, saver).result()
        (tmp_path / "checkpoint-0" / "notes.txt").write_text("mine")
        replaced = tmp_path / "checkpoint-1" / "model.safetensors"
        replaced.write_bytes(b"theirs")
        (tmp_path / "checkpoint-2").rename(tmp_path / "best")
        (tmp_path / "checkpoint-2").mkdir()
        (tmp_path / "checkpoint-2" / TRAINER_STATE).touch()
        begin(tmp_path, 4, saver, keep_last=1).result()
        begin(tmp_path, 5, saver, keep_last=1).result()
    assert os.listdir(tmp_path / "checkpoint-0") == ["notes.txt"]
    assert replaced.read_bytes() == b"theirs"
    assert os.listdir(tmp_path / "checkpoint-1") == ["model.safetensors"]
    assert os.listdir(tmp_path / "checkpoint-2") == [TRAINER_STATE]
    assert torch.equal(load(tmp_path / "best")["w"], WEIGHTS["w"])
    assert sorted(os.listdir(tmp_path))[:4] == ["best", "checkpoint-0", "checkpoint-1", "checkpoint-2"]
    assert sorted(os.listdir(tmp_path))[4:] == ["checkpoint-5"]
    assert len([record for record in caplog.records if "stays" in record.getMessage()]) == 2


def test_the_same_step_again_keeps_what_others_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    added = ("eval-results.json", f"{STATE_NAME}/notes.txt")
    with Saver(max_pending=2) as saver:
        begin(tmp_path, 5, saver).result()
        for name in added:
            (tmp_path / "checkpoint-5" / name).write_text("mine")
        begin(tmp_path, 5, saver, state=2).result()
        (added_ones,) = tmp_path.glob(".stio-kept-*")
        assert [(added_ones / name).read_text() for name in added] == ["mine"] * 2
        assert load_state(tmp_path / "checkpoint-5" / STATE_NAME) == 2
        assert caplog.text.count(added_ones.name) == 1
        (tmp_path / "checkpoint-5" / "model.safetensors").write_bytes(b"theirs")
        begin(tmp_path, 5, saver, keep_last=1).result()
    assert torch.equal(load(tmp_path / "checkpoint-5")["w"], WEIGHTS["w"])
    (kept,) = {*tmp_path.glob(".stio-kept-*")} - {added_ones}
    assert os.listdir(kept) == ["model.safetensors"]
    assert (kept / "model.safetensors").read_bytes() == b"theirs"
    assert caplog.text.count(kept.name) == 1


def test_a_copy_of_a_checkpoint_stays(tmp_path: Path) -> None:
    with Saver(max_pending=2) as saver:
        begin(tmp_path, 5, saver).result()
        shutil.copytree(tmp_path / "checkpoint-5", tmp_path / "checkpoint-2")
        begin(tmp_path, 6, saver, keep_last=1).result()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-6"]
