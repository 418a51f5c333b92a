"""Two processes that train together, of which one fails to save; run: `python -m integrations.failing_ranks DIRECTORY`.

Both are forked from one process, which imports all once. An assertion that fails in one of them makes it end with 1.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from integrations.trainer_case import AtStep, make_trainer

import stio
from stio.integrations import transformers as ours
from stio.integrations.transformers import StioCallback, latest_checkpoint
from stio.storage.commit import syscalls as calls

LAST = "checkpoint-6"


def no_disk(*arguments: Any, **keywords: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def on_first(rank: int, patch: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    return patch if rank == 0 else mock.patch.object(calls, "fsync", calls.fsync)


def expect(rank: int, kind: type[Exception], act: Callable[[], object]) -> Exception:
    try:
        act()
    except kind as error:
        if rank:
            assert error.__notes__ == ["process 0 raised it"], error.__notes__
        return error
    raise AssertionError("no error")


def run(directory: Path, rank: int) -> None:
    torch.set_num_threads(1)
    steps: list[int] = []

    def resume(name: str, callback: StioCallback, **arguments: Any) -> Any:
        steps.clear()
        trainer = make_trainer(directory / name, [AtStep(steps.append)], ddp_backend="gloo", **arguments)
        assert trainer.args.world_size == 2
        callback.resume(trainer)
        return trainer

    # At the return of the call each process sees the last checkpoint.
    resume("good", StioCallback())
    assert latest_checkpoint(directory / "good") == str(directory / "good" / LAST)
    resume("good", StioCallback())
    assert steps == []

    # The disk fails while a checkpoint is written: the next save raises it, or the end of the training.
    for save_steps, last in [(2, 4), (6, 6)]:
        with on_first(rank, mock.patch.object(calls, "fsync", no_disk)):
            name = f"written-{save_steps}"
            act = partial(resume, name, StioCallback(), save_steps=save_steps)
            error = expect(rank, stio.StorageError, act)
        assert "Input/output error" in str(error)
        assert steps[-1] == last
        assert latest_checkpoint(directory / name) is None

    # The snapshot fails: this save raises it, before the next step.
    with on_first(rank, mock.patch.object(ours, "PublishedSave", no_disk)):
        expect(rank, OSError, lambda: resume("begun", StioCallback(), save_steps=2))
    assert steps == [1, 2]

    class Unsendable(Exception):
        def __reduce__(self) -> Any:
            raise TypeError

    def raise_it(*arguments: Any, **keywords: Any) -> None:
        raise Unsendable("not to be pickled")

    with on_first(rank, mock.patch.object(ours, "PublishedSave", raise_it)):
        error = expect(rank, stio.StioError if rank else Unsendable, lambda: resume("begun", StioCallback()))
    assert "not to be pickled" in str(error)

    # A process that sees no checkpoint does not start from the beginning beside one that resumes.
    try:
        resume("good", StioCallback(directory / ("good" if rank == 0 else "nothing")))
        raise AssertionError("no error")
    except stio.MismatchError as error:
        assert "some processes see a checkpoint" in str(error)

    # One process cannot list the directory, or cannot read the state: all of them raise it.
    for function in ("resumable_checkpoints", "load_state"):
        with on_first(rank, mock.patch.object(ours, function, no_disk)):
            expect(rank, OSError, lambda: resume("good", StioCallback()))

    # All load the best one, and the same.
    trainer = resume(
        "best",
        StioCallback(),
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        greater_is_better=True,
        load_best_model_at_end=True,
    )
    assert trainer.state.best_model_checkpoint == str(directory / "best" / "checkpoint-2")
    saved = stio.sync.load(directory / "best" / "checkpoint-2")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, saved.get(name, tensor)), name


def fork_ranks(act: Callable[[int], None], num_ranks: int) -> int:
    """Call a function in processes that train together; return the worst exit status."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                act(rank)
                torch.distributed.barrier()
                os._exit(0)  # the end of gloo's threads, at a regular exit, sometimes waits for ever
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(fork_ranks(partial(run, Path(sys.argv[1])), 2))
