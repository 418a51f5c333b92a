"""Faults 409 and 467: saves under way at the program's end are completed, or reported; SIGTERM loses no step."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from crash.zygote import Zygote
from pages import DOCS, blocks_of

import stio
from stio import sync
from stio.runtime import operation
from stio.runtime.operation import Operation, end_all_at_exit
from stio.runtime.reports import counters
from stio.storage.commit import transaction

UNCLOSED = """
import errno, os, sys, threading
import torch
import stio.saving.pending
from stio import sync
from stio import clock
from stio.runtime import operation
from stio.storage.commit import syscalls as calls
from support import eventually

where, mode = sys.argv[1:]
plain, joined = calls.fsync, operation.Operation.join
reached, permits, now = threading.Event(), threading.Semaphore(0), [clock.monotonic()]

def fsync(fd):
    reached.set()
    if mode == "full":
        permits.acquire()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    permits.acquire()
    plain(fd)

def join(self, timeout=None):
    # The disk syncs one file at the end of each wait.
    if self.done or mode == "full" or not self.exit_patience:
        return joined(self, timeout)
    now[0] += timeout
    if mode == "stuck":
        if self.cancelled:
            permits.release(99)
        return joined(self, 20 if self.cancelled else 0)
    before = operation._progressed
    permits.release()
    assert eventually(lambda: self.done or operation._progressed != before, 20)
    return self.done

calls.fsync, operation.Operation.join, clock.monotonic = fsync, join, lambda: now[0]
saver = sync.Saver(max_shard_size=100)
pending = saver.save({f"t{k}": torch.full((20,), float(k)) for k in range(6)}, where)
assert reached.wait(20)
if mode == "full":
    permits.release(99)
    assert eventually(pending.done, 20)
    del pending
"""


def end_of_program(zygote: Zygote, where: Path, mode: str) -> str:
    """Run a program that ends without closing its saver; return what it reports."""
    ended = zygote.run(UNCLOSED, where, mode)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    return ended.stderr


def test_c409_a_slow_disk_is_waited_for(tmp_path: Path, zygote: Zygote) -> None:
    """The disk takes longer than the exit's whole patience for each of six files."""
    assert end_of_program(zygote, tmp_path / "step-1", "slow") == ""
    assert len(sync.load(tmp_path / "step-1")) == 6


def test_c409_what_is_given_up_is_reported(tmp_path: Path, zygote: Zygote) -> None:
    report = end_of_program(zygote, tmp_path / "step-1", "stuck")
    assert report == (
        f"save {tmp_path}/step-1 was rolled back at the program's end (Ctrl-C, or 60 s without progress); wait "
        "for its result, or close its saver, before the program ends\n"
    )
    assert [*tmp_path.iterdir()] == []


def test_c409_a_failure_that_nobody_awaited_is_reported(tmp_path: Path, zygote: Zygote) -> None:
    report = end_of_program(zygote, tmp_path / "step-1", "full")
    assert report.startswith(f"saving failed, and was not awaited: {tmp_path}/step-1/model-0000")
    assert report.count("\n") == 1


CHILD = """
import multiprocessing, sys, time, torch
from stio import sync
from stio.storage.commit import syscalls as calls

def child(where):
    global saver
    plain = calls.fsync
    calls.fsync = lambda fd: (time.sleep(0.05), plain(fd))
    saver = sync.Saver()
    saver.save({"w": torch.ones(4)}, where)

for where in sys.argv[1:]:
    process = multiprocessing.get_context("fork").Process(target=child, args=(where,))
    process.start()
    process.join()
    print(process.exitcode)
"""


def test_c409_a_process_of_multiprocessing_completes_its_saves(tmp_path: Path, zygote: Zygote) -> None:
    """Such a process calls no functions of `atexit`."""
    (tmp_path / "file").write_bytes(b"")
    ended = zygote.run(CHILD, tmp_path / "step-1", tmp_path / "step-2")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n0\n", "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step-1", "step-2"]


def test_c409_a_failure_in_a_process_of_multiprocessing_is_reported(tmp_path: Path, zygote: Zygote) -> None:
    fails = "plain = calls.fsync", "plain = lambda fd: 1 / 0"
    ended = zygote.run(CHILD.replace(*fails), tmp_path / "step-1")
    assert ended.stderr == "saving failed, and was not awaited: division by zero\n"
    assert [*tmp_path.iterdir()] == []


def test_c409_one_interrupt_at_the_exit_gives_up_all_saves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cancelled: list[str] = []
    plain = Operation.cancel

    def body(mine: Operation[None]) -> None:
        stopped = threading.Event()
        mine.on_cancel(stopped.set)
        stopped.wait(20)
        mine.check()

    def cancel(self: Operation[None]) -> None:
        if not self.cancelled:
            cancelled.append(self.about)
        plain(self)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    operations = [Operation(body, name="save", about=str(k), exit_patience=60).start() for k in range(5)]
    monkeypatch.setattr(counters, "running", set(operations))
    monkeypatch.setattr(Operation, "cancel", cancel)
    monkeypatch.setattr(operation, "_wait_while_it_progresses", interrupted)
    end_all_at_exit()
    assert cancelled == ["4", "3", "2", "1", "0"]
    assert caplog.text.count("was rolled back") == 5


def test_c409_the_last_steps_of_a_save_of_ranks_are_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is hashed, and synced again: on a slow disk this takes longer than the exit's patience."""
    marks: list[None] = []
    monkeypatch.setattr(transaction, "mark_progress", lambda: marks.append(None))
    state = {f"t{k}": torch.ones(20) for k in range(3)}
    sync.distributed.save(state, tmp_path / "step-1", max_shard_size=100)
    assert len(marks) == 3
    sync.distributed.save(state, tmp_path / "step-2", max_shard_size=100, hash="sha256")
    assert len(marks) == 9
    staged = transaction.begin_directory(tmp_path / "step-3", durable=True)
    for k in range(3):
        (Path(staged.files_path) / str(k)).touch()
    staged.prepare_commit()
    assert len(marks) == 9 + 3 + 1
    staged.roll_back()


def test_c463_a_program_that_ends_before_its_first_save_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    saver = stio.Saver()
    saver.__del__(lambda: True)
    assert caplog.records == []
    saver.__del__()
    assert "stio.sync.Saver" in caplog.text
    saver._is_used = True


def test_c467_the_recipe_for_sigterm_keeps_the_last_step(tmp_path: Path, zygote: Zygote) -> None:
    """The page's own code; its disk is still busy with the last save when the loop ends."""
    (recipe,) = (block.text for block in blocks_of(DOCS / "howto/training.md") if "signal.SIGTERM" in block.text)
    slow = """
    import os, time, torch, stio, stio.sync
    from stio.storage.commit import syscalls as calls
    plain, model, train = calls.fsync, torch.nn.Linear(2, 2), lambda: None
    calls.fsync = lambda fd: (time.sleep(0.05), plain(fd))
    """
    ended = zygote.run("\n".join(line.strip() for line in slow.splitlines()) + recipe, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "7\n", "")
    assert sorted(path.name for path in (tmp_path / "preempted").iterdir()) == ["step-5", "step-7"]
    assert stio.latest(tmp_path / "preempted") == str(tmp_path / "preempted" / "step-7")
