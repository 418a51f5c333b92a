"""transformers' Trainer in several processes: an error of one is raised on both, and both see the same checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import python_path


@pytest.mark.slow
@pytest.mark.parametrize("case", ["failing_ranks", "fsdp_ranks"])
def test_processes_together(tmp_path: Path, case: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"integrations.{case}", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
