"""Faults 105-108 and 121: a process that dies at any moment of a save, or whose system calls fail."""

from __future__ import annotations

import os

import pytest
from crash import shim
from crash.generations import SCENARIOS
from crash.shim import run_module

LONG = "STIO_CRASH_KILLS" in os.environ
"""Set by `make crash`: how many kills; all faults are tried then, too."""
KILLS = int(os.environ.get("STIO_CRASH_KILLS", "24"))
PLAYED = [one for one in SCENARIOS if LONG or one.distinct]


@pytest.mark.slow
@pytest.mark.timeout(100 + KILLS)
def test_c108_killed_at_random(fast_path, zygote):
    """Whole generations only, none older than what was acknowledged, nothing left; readers never see a mixture."""
    print(run_module("crash.kills", fast_path, "--rounds", KILLS, timeout=90 + KILLS, python=zygote.python))


@pytest.mark.slow
def test_c108_negative_control(fast_path, zygote):
    """Files that are written in place are found torn by the same look."""
    with pytest.raises(AssertionError, match="written in place"):
        run_module("crash.kills", fast_path, "--control", "--rounds", 30, timeout=60, python=zygote.python)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shim.why_not():
        pytest.skip(str(shim.why_not()))
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 620)
def test_c103_c104_c105_c106_c107_c108_every_call_goes_wrong(built, fast_path):
    """Each call fails, falls short, or is the process's last, in each scenario; see `crash.faults`.

    `make crash` and the stage `faults` of `make nightly` let each call fail in each way. Here each way hits
    the first two calls and a twenty-fourth of the later ones; the process is killed at the first two and each sixth one.
    """
    chosen = [word for one in PLAYED for word in ("--scenario", one.name)]
    long = ["--long"] if LONG else ["--every", "24"]
    # A real interpreter: LD_PRELOAD
    print(run_module("crash.faults", fast_path, *chosen, *long, timeout=3400 if LONG else 600, preload=built))
