"""`examples/train.py`: killed at any moment and started again, it ends with the weights of an undisturbed run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from checkout import REPOSITORY, python_path
from crash.zygote import Zygote
from integrations.plain_case import NUM_STEPS

from stio import sync

KILLS = int(os.environ.get("STIO_TRAIN_KILLS", "0"))
"""Set for the long form: so many more kills, of which each training gets six."""


def run_kills(zygote: Zygote, case: str, directory: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": python_path()}
    command = [str(zygote.python), "-m", "integrations.kills", f"integrations.{case}", str(directory)]
    return subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.timeout(120 + KILLS)
def test_killed_at_every_step(tmp_path: Path, trainer_zygote: Zygote) -> None:
    steps = range(1, NUM_STEPS + 1, 1 if KILLS else 8)
    done = run_kills(
        trainer_zygote,
        "plain_case",
        tmp_path,
        "--steps",
        *steps,
        "--trainings",
        1 + KILLS // 6,
        "--kills",
        6 if KILLS else 3,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'kills in a save'" in done.stdout


@pytest.mark.slow
def test_a_forgotten_generator_is_noticed(tmp_path: Path, trainer_zygote: Zygote) -> None:
    done = run_kills(trainer_zygote, "forgetful_case", tmp_path, "--steps", 20)
    assert done.returncode == 1, done.stderr
    assert "model.safetensors" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, trainer_zygote: Zygote) -> None:
    def train(*arguments: object) -> str:
        command = [trainer_zygote.python, REPOSITORY / "examples" / "train.py", tmp_path / "new" / "out", *arguments]
        return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout

    first = train("--steps", 12, "--save-every", 4)
    assert first.splitlines()[0].startswith("step 1: loss ")
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == [
        "model.safetensors",
        "step-00000008.safetensors",
        "step-00000012.safetensors",
    ]
    again = train("--steps", 12, "--save-every", 4)
    assert again == "resumed after step 12\n"
    weights = sync.load(tmp_path / "new" / "out" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
