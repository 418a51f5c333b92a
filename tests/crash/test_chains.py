"""Faults 108, 109 and 122 of chains of deltas: at each kill and power cut what stands loads, and nothing durable is lost."""

from __future__ import annotations

import os

import pytest
from crash import powercut
from crash.chains import standing, tensors_at
from crash.cuts import copy_image, refuse_direct
from crash.generations import Torn
from crash.powercut import Camera, make_image, mounted
from crash.shim import run_module

import stio.sync
from stio.storage.commit.recovery import collect_garbage

KILLS = int(os.environ.get("STIO_CRASH_KILLS", "24"))
CUT_STEPS = int(os.environ.get("STIO_CRASH_CUT_STEPS", "7"))
"""Steps of a chain whose power is cut at each system call; full saves are at 1, 4, 7, and so on."""


@pytest.mark.slow
@pytest.mark.timeout(100 + 2 * KILLS)
def test_c108_a_saver_of_deltas_is_killed_at_random(fast_path, zygote):
    found = run_module(
        "crash.chains", fast_path, "--rounds", min(KILLS, 500), timeout=90 + 2 * KILLS, python=zygote.python
    )
    print(found)


@pytest.mark.slow
def test_c108_a_base_that_is_deleted_is_found(fast_path, zygote):
    """Negative control."""
    with pytest.raises(AssertionError, match="the base of this delta is missing"):
        run_module("crash.chains", fast_path, "--control", "--rounds", 30, timeout=90, python=zygote.python)


def _cuts_of_chain(image, tmp_path, monkeypatch, lie=()):
    """Save some steps; return what each power cut would have left, with the step that was durable before."""
    found = []
    with mounted(image, tmp_path / "disk") as disk, monkeypatch.context() as patch:
        camera = Camera(image, tmp_path, lie=lie)
        with stio.sync.Saver(full_every=3, keep_last=1) as saver:
            saver.save(tensors_at(1), disk / "step-1").result()
            camera.watch(patch)
            for step in range(2, CUT_STEPS + 1):
                before = len(camera.cuts)
                kind = saver.save(tensors_at(step), disk / f"step-{step}").result().kind
                assert kind == ("full" if step % 3 == 1 else "delta")
                found += [(cut, step - 1) for cut in camera.cuts[before:]]
                camera.take(f"step {step}", acknowledged=True)
                found.append((camera.cuts[-1], step))
    return found


def _require_chains(cuts, tmp_path):
    problems = []
    for cut, at_least in cuts:
        with mounted(cut.image, tmp_path / "after") as disk:
            try:
                before = standing(disk)
                assert max(before, default=0) >= at_least, f"{before} stand, {at_least} was durable"
                collect_garbage(disk)
                assert standing(disk) == before
            except (AssertionError, OSError) as error:
                problems.append(f"power cut after {cut.after}: {error}")
        cut.image.unlink()
    if problems:
        raise Torn("; ".join(problems))


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(powercut.why_not() is not None, reason=str(powercut.why_not()))
@pytest.mark.timeout(60 + 20 * CUT_STEPS)
@pytest.mark.parametrize("way", ["direct", "buffered"])
def test_c109_c122_power_cuts_inside_a_chain(tmp_path, monkeypatch, way):
    if way == "buffered":
        refuse_direct(monkeypatch)
    cuts = _cuts_of_chain(copy_image(make_image(tmp_path / "empty"), tmp_path / "image"), tmp_path, monkeypatch)
    print(len(cuts), "power cuts")
    assert len(cuts) > 20
    _require_chains(cuts, tmp_path)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(powercut.why_not() is not None, reason=str(powercut.why_not()))
def test_c109_without_syncs_a_chain_is_torn(tmp_path, monkeypatch):
    """Negative control."""
    refuse_direct(monkeypatch)
    image = copy_image(make_image(tmp_path / "empty"), tmp_path / "image")
    cuts = _cuts_of_chain(image, tmp_path, monkeypatch, lie=("fsync", "sync_directory"))
    with pytest.raises(Torn):
        _require_chains(cuts, tmp_path)
