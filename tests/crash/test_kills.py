"""Faults 105-108 and 121: a process that dies at any moment of a save, or whose system calls fail."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from crash import shim
from crash.generations import SCENARIOS, fast_directory
from crash.shim import run_module

LONG = "STIO_CRASH_KILLS" in os.environ
"""Set by `make crash`: how many kills; all faults are tried then, too."""
KILLS = int(os.environ.get("STIO_CRASH_KILLS", "70"))
PLAYED = [one for one in SCENARIOS if LONG or one.distinct]
HALVES = [[one.name for one in PLAYED[k::2]] for k in range(2)]


@pytest.fixture
def place(tmp_path):
    """A directory in memory, where there is one: whether a call is made does not depend on the disk below it."""
    parent = fast_directory()
    if parent is None:
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir=parent))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.timeout(100 + KILLS)
def test_c108_killed_at_random(place):
    """Whole generations only, none older than what was acknowledged, nothing left; readers never see a mixture."""
    print(run_module("crash.kills", place, "--rounds", KILLS, timeout=90 + KILLS))


def test_c108_negative_control(place):
    """Files that are written in place are found torn by the same look."""
    with pytest.raises(AssertionError, match="written in place"):
        run_module("crash.kills", place, "--control", "--rounds", 30, timeout=60)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if shim.why_not():
        pytest.skip(str(shim.why_not()))
    return shim.build(tmp_path_factory.mktemp("shim"))


@pytest.mark.timeout(1800 if LONG else 120)
@pytest.mark.parametrize("names", HALVES, ids=["even", "odd"])
def test_c103_c104_c105_c106_c107_c108_every_call_goes_wrong(built, place, names):
    """Each call fails, falls short, or is the process's last, in each scenario; see `crash.faults`.

    `make crash` and the stage `faults` of `make nightly` let each call fail in each way. Here each way hits
    the first four calls and a sixth of the later ones; the process is killed at each call.
    """
    chosen = [word for name in names for word in ("--scenario", name)]
    long = ["--long"] if LONG else ["--every", "6"]
    print(run_module("crash.faults", place, *chosen, *long, timeout=1700 if LONG else 110, preload=built))
