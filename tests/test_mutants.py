"""The mutants of `make mutants` can be made: a change of the code must not leave them behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from mutants import MUTANTS, REPOSITORY, Mutant, is_native


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_old_text_of_a_mutant_is_in_the_code_once(mutant: Mutant) -> None:
    text = (REPOSITORY / mutant.file).read_text()
    assert [text.count(old) for old, _ in mutant.changes] == [1] * len(mutant.changes)
    for old, new in mutant.changes:
        text = text.replace(old, new)
    if mutant.file.endswith(".py"):
        compile(text, mutant.file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True], ids=["engine", "device"])
def test_a_mutant_has_a_stage_if_no_test_of_it_is_quick(on_device: bool) -> None:
    """What runs the engine's tests alone is not the device's: see `mutants.run_tests`."""
    mutants = [mutant for mutant in MUTANTS if all(is_native(test) != on_device for test in mutant.tests)]
    names = sorted({test for mutant in mutants for test in mutant.tests})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", *names]
    device = {"STIO_TEST_DEVICE": "sim"} if on_device else {}
    # a real interpreter: the device is chosen before torch is imported
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **device}, capture_output=True, text=True)
    quick = [line for line in done.stdout.splitlines() if "::" in line]
    assert mutants and quick
    for mutant in mutants:
        has_quick = any(
            line == test or line.startswith((f"{test}[", f"{test}::")) for line in quick for test in mutant.tests
        )
        assert (mutant.stage == "") == has_quick, mutant.name
