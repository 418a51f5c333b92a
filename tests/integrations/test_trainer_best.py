"""The best model of a training with transformers' Trainer: as Trainer's own saving has it, and never deleted."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.trainer_case import AtStep, make_trainer
from support import require_equal
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import stio
from stio import sync
from stio.integrations.transformers import StioCallback, latest_checkpoint
from stio.storage.commit import syscalls as calls

SCORES = {2: 1.0, 4: 3.0, 5: 3.0, 6: 2.0, 8: 2.5, 10: 0.5}
"""The best is in the middle, and at an end of an epoch too."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "steps": {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 2, "eval_steps": 2},
    "epoch": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "best": {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2},
    "best-epoch": {"save_strategy": "best", "eval_strategy": "epoch"},
}


class Stop(Exception):
    """What stops a training in its middle."""


def stop_at(last: int) -> AtStep:
    def act(step: int) -> None:
        if step == last:
            raise Stop

    return AtStep(act)


def scored(directory: Path, callbacks: list[TrainerCallback], **arguments: Any) -> Trainer:
    """Make a trainer whose evaluation gives the scores above."""
    arguments = {"metric_for_best_model": "score", "load_best_model_at_end": True} | arguments
    trainer = make_trainer(directory, callbacks, **arguments)
    trainer.compute_metrics = lambda _: {"score": SCORES[trainer.state.global_step]}
    return trainer


def of_best(trainer: Trainer, directory: Path) -> tuple[Any, ...]:
    state = trainer.state
    assert state.best_model_checkpoint is not None
    return os.path.relpath(state.best_model_checkpoint, directory), state.best_metric, state.best_global_step


def recorded(directory: Path) -> dict[str, Any]:
    """Return what the checkpoints say of the best one."""
    found = {}
    for path in directory.glob("checkpoint-*"):
        state = json.loads((path / "trainer_state.json").read_text())
        best = state["best_model_checkpoint"]
        found[path.name] = best and os.path.relpath(best, directory), state["best_metric"], state["best_global_step"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "limit"),
    [("steps", None), ("steps", 2), ("steps", 1), ("epoch", 1), ("best", None), ("best", 1), ("best-epoch", None)],
)
def test_as_trainers_own(tmp_path: Path, strategy: str, limit: int | None) -> None:
    arguments = {**STRATEGIES[strategy], "save_total_limit": limit}
    own = scored(tmp_path / "own", [], **arguments)
    own.train()
    trainer = scored(tmp_path / "stio", [StioCallback()], **arguments)
    trainer.train()
    assert of_best(trainer, tmp_path / "stio") == of_best(own, tmp_path / "own")
    assert recorded(tmp_path / "stio") == recorded(tmp_path / "own")
    require_equal(trainer.model.state_dict(), own.model.state_dict())
    for name in os.listdir(tmp_path / "own"):
        theirs, ours = sync.load(tmp_path / "own" / name), sync.load(tmp_path / "stio" / name)
        for key in theirs.keys() & ours.keys():
            assert torch.equal(theirs[key], ours[key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_a_resumed_training_has_the_same_best(tmp_path: Path, strategy: str) -> None:
    arguments = {**STRATEGIES[strategy], "save_total_limit": 2}
    whole = scored(tmp_path / "whole", [StioCallback()], **arguments)
    whole.train()
    callback = StioCallback()
    with pytest.raises(Stop):
        callback.resume(scored(tmp_path / "stopped", [callback, stop_at(9)], **arguments))
    assert latest_checkpoint(tmp_path / "stopped") is not None
    again = scored(tmp_path / "stopped", [], **arguments)
    StioCallback().resume(again)
    assert of_best(again, tmp_path / "stopped") == of_best(whole, tmp_path / "whole")
    require_equal(again.model.state_dict(), whole.model.state_dict())
    assert recorded(tmp_path / "stopped") == recorded(tmp_path / "whole")


@pytest.mark.slow
def test_no_checkpoint_newer_than_the_best_replaces_it(tmp_path: Path) -> None:
    """At each step the best checkpoint so far is there, or is not durable yet."""
    missing: list[int] = []

    def look(step: int) -> None:
        best = trainer.state.best_global_step or step
        callback.wait()
        if step > best + 1 and not (tmp_path / f"checkpoint-{best}").is_dir():
            missing.append(step)

    callback = StioCallback(keep_last=1)
    trainer = scored(tmp_path, [callback, AtStep(look)], **STRATEGIES["steps"])
    trainer.train()
    assert missing == []
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-4"]


def test_in_another_directory(tmp_path: Path) -> None:
    trainer = scored(tmp_path / "out", [StioCallback(tmp_path / "mine", keep_last=1)], **STRATEGIES["best"])
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "mine" / "checkpoint-4")
    require_equal(sync.load(tmp_path / "mine" / "checkpoint-4"), trainer.model.state_dict())


def test_early_stopping(tmp_path: Path) -> None:
    """It stops the training at an evaluation, while the callback holds the request to save."""
    trainer = scored(tmp_path, [EarlyStoppingCallback(1), StioCallback()], **STRATEGIES["best"])
    trainer.train()
    assert trainer.state.global_step == 6
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "checkpoint-4"]
    assert type(trainer.control).__name__ == "TrainerControl"


@pytest.mark.slow
def test_an_evaluation_after_the_training_changes_nothing(tmp_path: Path) -> None:
    trainer = scored(tmp_path, [StioCallback()], **STRATEGIES["best"])
    trainer.train()
    trainer.evaluate()
    trainer.control.should_save = True
    assert trainer.control.should_save


@pytest.mark.slow
def test_a_failed_save_is_raised_before_the_best_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    plain = calls.fsync
    trainer = scored(
        tmp_path,
        [AtStep(lambda step: monkeypatch.setattr(calls, "fsync", fsync if step == 10 else plain)), StioCallback()],
        **STRATEGIES["steps"],
    )
    with pytest.raises(stio.StorageError, match="Input/output error"):
        trainer.train()
    best = sync.load(tmp_path / "checkpoint-4")
    assert any(not torch.equal(tensor, best[name]) for name, tensor in trainer.model.state_dict().items())
    assert not (tmp_path / "checkpoint-10").exists()
