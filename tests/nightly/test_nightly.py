"""The programs of `make nightly` in short forms, and proof that each would find something."""

from __future__ import annotations

import random
import sys

import anyio
import pytest
import torch
from crash.shim import run_module
from nightly import cancels, fuzz, leaks, parsers, run, shared_directory
from nightly.run import SKIPPED, Command, Run, Stage, carry_out

from stio import sync

# Parsers.


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_seeds_are_as_they_must_be(name):
    target = parsers.TARGETS[name]
    seeds = list(target.seeds())
    numbers = random.Random(1)
    for seed in seeds:
        target.run(seed)
        for _ in range(5):
            mutated = bytearray(seed)
            mutated[numbers.randrange(len(mutated))] ^= 1 << numbers.randrange(8)
            target.run(bytes(mutated))
    assert list(parsers.TARGETS) == list(fuzz.NAMES)


def test_a_wrong_pickle_is_found(monkeypatch):
    monkeypatch.setattr(parsers.PlainPickles, "loads", lambda *_, **__: {"a": 2})
    with pytest.raises(parsers.Finding, match="is not"):
        parsers.run_pickle(b"\x80\x02}U\x01aK\x01s.")


def test_another_error_is_found(monkeypatch):
    def parse(*_, **__):
        raise KeyError("raw")

    monkeypatch.setattr(parsers, "parse_tree", parse)
    with pytest.raises(KeyError):
        parsers.run_tree(b"{}")


def test_an_unsafe_name_is_found(monkeypatch):
    plain = parsers.parse_index
    monkeypatch.setattr("stio.format.files.index.check_shard_name", lambda *_, **__: None)
    monkeypatch.setattr(parsers, "parse_index", plain)
    with pytest.raises(parsers.Finding, match="leads out"):
        parsers.run_index(b'{"weight_map":{"a":"../x.safetensors"}}')


# Leaks and cancels.


@pytest.mark.slow
def test_a_leak_is_found(tmp_path):
    held = []
    assert any("objects" in problem for problem in leaks.run(lambda: held.append([]), 500))
    assert any("anonymous" in problem for problem in leaks.run(lambda: held.append(torch.ones(40_000)), 100))
    files = []
    assert any("files" in problem for problem in leaks.run(lambda: files.append(open(tmp_path / "x", "w")), 3))  # noqa: SIM115
    for file in files:
        file.close()


@pytest.mark.slow
def test_loads_do_not_leak(tmp_path):
    sync.save({"w": torch.ones(100)}, tmp_path / "model")
    assert leaks.run(lambda: sync.load(tmp_path / "model"), 30) == []


@pytest.mark.slow
@pytest.mark.parametrize("loop", cancels.LOOPS)
def test_random_cancels(tmp_path, loop):
    backend, options = cancels.LOOPS[loop]
    cancelling = cancels.Cancelling(loop, tmp_path, 1, cancels.NAMES)
    anyio.run(cancelling.run, 20, backend=backend, backend_options=options)
    assert cancelling.problems == []
    assert cancelling.counts.total() == 20


def test_what_a_cancel_leaves_is_found(tmp_path):
    async def body():
        cancelling = cancels.Cancelling("asyncio", tmp_path, 1, ["load"])
        await cancelling.calls.prepare()
        kept = []

        async def load():
            kept.append(open(tmp_path / "kept", "w"))  # noqa: SIM115
            await anyio.sleep(10)  # waits: until it is cancelled

        cancelling.calls.load = load
        with pytest.raises(AssertionError, match="files are open"):
            await cancelling._one("load", 0.01)
        kept[0].close()

    anyio.run(body)


# A shared directory.


@pytest.mark.slow
def test_four_savers_and_four_readers(tmp_path):
    said = run_module("nightly.shared_directory", tmp_path, "--seconds", 0.5, timeout=60)
    assert "0 problems" in said


@pytest.mark.parametrize(
    ("reads", "number"),
    [
        ([(5.0, 2)], 0),  # after both
        ([(2.5, 1)], 0),  # the second save had not returned
        ([(3.5, 1)], 1),  # it had
        ([(5.0, 9)], 1),  # nobody saved it
        ([(5.0, 3), (0.1, 3)], 0),  # whether a failed save stands is open
    ],
)
def test_an_outdated_read_is_found(reads, number):
    saves = [(0.0, 1.0, 1), (2.0, 3.0, 2), (2.0, None, 3)]
    assert len(shared_directory.outdated(saves, reads)) == number


# The driver.


def _stage(name, code, **options):
    return Stage(name, "for a test", 1, lambda *_: [Command([sys.executable, "-c", code])], **options)


def test_a_run(tmp_path):
    stages = [
        _stage("good", "print('5 cuts, 0 problems')"),
        _stage("bad", "print('the reason'); raise SystemExit(3)"),
        _stage("absent", f"print('no mkfs | here'); raise SystemExit({SKIPPED})", alone=True),
    ]
    assert carry_out(Run(7, 1.0, tmp_path, sys.executable), stages) == 1
    text = (tmp_path / "summary.md").read_text()
    assert "seed 7" in text
    assert "1 stages passed, 1 failed, 1 skipped" in text
    assert "| good | for a test | passed | 5 cuts, 0 problems |" in text
    assert "| absent | for a test | skipped | no mkfs \\| here |" in text
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["bad"]
    assert "the reason" in (tmp_path / "failures" / "bad" / "output.txt").read_text()
    assert "--stage bad --seed 7" in (tmp_path / "failures" / "bad" / "command.txt").read_text()


def test_a_stage_that_hangs_shows_its_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(run, "LONGEST", 0.0)
    hung = _stage("hung", "import time\ntime.sleep(60)")  # waits: until it is killed
    assert carry_out(Run(7, 1.0, tmp_path, sys.executable), [hung]) == 1
    assert "most recent call first" in (tmp_path / "failures" / "hung" / "output.txt").read_text()


def test_stages_have_names_of_their_own():
    names = [stage.name for stage in run.STAGES]
    assert len(set(names)) == len(names)
