"""transformers' Trainer, killed at any moment and started again: it ends with the files of an undisturbed training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from crash.zygote import Zygote
from integrations.test_train_example import run_kills

CASES = ["trainer_case", "ddp_case", "fsdp_case"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES[:2], pytest.param(CASES[2], marks=pytest.mark.slow)])
@pytest.mark.timeout(180)
def test_killed(tmp_path: Path, trainer_zygote: Zygote, case: str) -> None:
    done = run_kills(trainer_zygote, case, tmp_path, "--trainings", 1, "--kills", 3, "--at-least", 2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.timeout(900)
def test_killed_twenty_times(tmp_path: Path, trainer_zygote: Zygote, case: str) -> None:
    done = run_kills(trainer_zygote, case, tmp_path, "--kills", 4, "--at-least", 20)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"'kills': (\d+), 'kills in a save': (\d+)", done.stdout)
    assert counted is not None and int(counted[1]) >= 20
    assert int(counted[2]) > 0, "no kill came while a checkpoint was written"
