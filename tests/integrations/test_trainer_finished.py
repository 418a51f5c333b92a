"""A training that is complete and is started again: no further step, no error, nothing saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from integrations.trainer_case import NUM_STEPS, AtStep, make_trainer
from support import require_equal
from transformers import Trainer

from stio.integrations.transformers import StioCallback

EVALUATED = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "loss"}


def identities(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_ino for path in directory.rglob("*")}


BEST = {**EVALUATED, "load_best_model_at_end": True, "greater_is_better": True, "save_total_limit": 2}


def require_nothing_done(directory: Path, first: Trainer, again: Trainer, start: Callable[[], Any]) -> None:
    files = identities(directory)
    steps: list[int] = []
    again.add_callback(AtStep(steps.append))
    start()
    assert steps == []
    assert identities(directory) == files
    assert again.state.global_step == first.state.global_step
    assert again.state.best_model_checkpoint == first.state.best_model_checkpoint
    require_equal(again.model.state_dict(), first.model.state_dict())
    assert "get_batch_samples" not in vars(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"save_strategy": "epoch"},
        BEST,
        {"max_steps": 8},
        {"max_steps": 8, "save_strategy": "epoch"},
        {"max_steps": 8, "ignore_data_skip": True},
    ],
    ids=["epoch", "best", "max_steps", "max_steps-epoch", "ignore_data_skip"],
)
def test_c243_resume_does_nothing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    first, again = (make_trainer(tmp_path, [], **arguments) for _ in range(2))
    StioCallback().resume(first)
    require_nothing_done(tmp_path, first, again, lambda: StioCallback().resume(again))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"gradient_accumulation_steps": 2}, BEST], ids=["steps", "some", "best"])
def test_c243_train_does_nothing(tmp_path: Path, arguments: dict[str, Any]) -> None:
    first, again = (make_trainer(tmp_path, [StioCallback()], **arguments) for _ in range(2))
    first.train()
    require_nothing_done(tmp_path, first, again, lambda: again.train(resume_from_checkpoint=True))


@pytest.mark.slow
def test_trainers_own_further_step_is_not_saved(tmp_path: Path) -> None:
    make_trainer(tmp_path, [StioCallback()], max_steps=8).train()
    files = identities(tmp_path)
    make_trainer(tmp_path, [StioCallback()], max_steps=8).train(resume_from_checkpoint=True)
    assert identities(tmp_path) == files


def test_a_longer_training_goes_on(tmp_path: Path) -> None:
    """It counts what the training is asked for now, not what the checkpoint says."""
    StioCallback().resume(make_trainer(tmp_path, [], max_steps=6))
    steps: list[int] = []
    StioCallback().resume(make_trainer(tmp_path, [AtStep(steps.append)], max_steps=8))
    assert steps == [7, 8]
    assert sorted(os.listdir(tmp_path))[-1] == "checkpoint-8"
    assert NUM_STEPS > 8
