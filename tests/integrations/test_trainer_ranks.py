"""transformers' Trainer in two processes: an error of one is raised on both, and both see the same checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import REPOSITORY


@pytest.mark.slow
def test_one_fails_to_save(tmp_path: Path) -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    done = subprocess.run(
        [sys.executable, "-m", "integrations.failing_ranks", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
