"""Ranks on two hosts with one directory: their names, process numbers and clocks differ, and the network may fail."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from host_ranks import RANK_TIMEOUT, cut_off, ended_at_some_moment, first_killed, killed, together
from hosts import Hosts, why_not
from rank_kills import SHAPES, SHARD_BYTES, whole
from test_kills import generation_of, require_nothing_else

from stio import sync
from stio.storage.commit.recovery import GarbageReport
from tests.storage.transactions import require_clean, sweep

CLOCKS = [-24 * 3600, 2 * 3600]
NUM_ROUNDS = int(os.environ.get("STIO_HOST_ROUNDS", "12"))

ranks_per_host = pytest.mark.parametrize("ranks_per_host", [1, pytest.param(2, marks=pytest.mark.slow)])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), CLOCKS) as hosts:
        yield hosts


def old_checkpoint(folder: Path) -> Path:
    """Return a checkpoint of generation 0."""
    tensors = {name: whole(name, 0) for name in SHAPES}
    sync.save(tensors, folder / "model", max_shard_size=SHARD_BYTES, durability="none")
    return folder / "model"


def check(found: tuple[str, str, str, float], text: str, since: float, seconds: float) -> None:
    """Check how a call ended on a rank that has not caused it."""
    __tracebackhide__ = True
    assert found[0] == "RankError" and text in found[2], found
    assert found[3] - since < seconds, found


@pytest.mark.slow
@ranks_per_host
def test_saves_and_loads(tmp_path: Path, hosts: Hosts, ranks_per_host: int) -> None:
    (tmp_path / "steps").mkdir()
    results = hosts.run(together, str(tmp_path), ranks_per_host=ranks_per_host)
    for rank, found in enumerate(results):
        wrong_by = CLOCKS[rank // ranks_per_host]
        assert abs(found["time"] - time.time() - wrong_by) < 100, "the clocks differ"
    for name in ("host", "boot"):
        assert len({found[name] for found in results}) == 2
    assert all(found["pid"] < 1000 for found in results), "process numbers of hosts that have few"

    *others, last = [found["raises"] for found in results]
    assert last[0] == "StorageError"
    for other in others:
        check(other, f"the save failed on rank {len(others)}: StorageError", last[3], 2)
        assert other[1] == "StorageError"
    assert generation_of(tmp_path / "model") == 8
    assert set(os.listdir(tmp_path)) == {"model", "steps", "dcp"} and os.listdir(tmp_path / "steps") == ["5"]
    require_nothing_else(tmp_path / "steps" / "5")
    assert generation_of(tmp_path / "steps" / "5") == 5
    loaded = sync.load_state(tmp_path / "dcp", verify=True)
    assert loaded.pop("step") == 7 and loaded.keys() == SHAPES.keys()


@pytest.mark.slow
@ranks_per_host
def test_a_host_is_cut_off(tmp_path: Path, hosts: Hosts, ranks_per_host: int) -> None:
    """All raise by their deadline. The first rank removes what the save left."""
    path = old_checkpoint(tmp_path)
    results = hosts.run(cut_off, str(path), ranks_per_host=ranks_per_host)
    when = results[-1][0]
    for rank, (_, saved, loaded) in enumerate(results):
        is_cut_off = rank >= ranks_per_host
        text = "the store of the process group" if is_cut_off else " gave no sign of life for 3 s"
        check(saved, text, when, RANK_TIMEOUT + 1)
        silent = saved[2].partition(" gave")[0]
        assert is_cut_off or silent in (["rank 1"] if ranks_per_host == 1 else ["rank 2", "rank 3", "ranks 2, 3"])
        assert loaded[0] == "RankError" and loaded[3] < RANK_TIMEOUT, loaded
    require_nothing_else(path)
    assert generation_of(path) == 0


@ranks_per_host
def test_a_rank_is_killed(tmp_path: Path, hosts: Hosts, ranks_per_host: int) -> None:
    """The others name it, and the first one removes what the save left."""
    path, sign = old_checkpoint(tmp_path), tmp_path / "killed"
    victim = 2 * ranks_per_host - 1
    results = hosts.run(killed, str(path), victim, str(sign), ranks_per_host=ranks_per_host, killed=[victim])
    when = float(sign.read_text())
    sign.unlink()
    assert results[victim] is None
    for found in results[:victim]:
        check(found, f"rank {victim} gave no sign of life for 3 s", when, RANK_TIMEOUT + 1)
    require_nothing_else(path)
    assert generation_of(path) == 0


@pytest.mark.slow
@ranks_per_host
def test_the_first_rank_is_killed(tmp_path: Path, hosts: Hosts, ranks_per_host: int) -> None:
    """Another process saves in the same directory; it goes on while a host with another clock cleans up."""
    place, signs = tmp_path / "place", tmp_path / "signs"
    place.mkdir()
    signs.mkdir()
    path = old_checkpoint(place)
    results = hosts.run(first_killed, str(path), str(signs), ranks_per_host=ranks_per_host, killed=[0])
    when = float((signs / "killed").read_text())
    assert results[0] is None
    for found in results[1:]:
        check(found["save"], "the store of the process group does not answer", when, 2)
        kind, _, text, seconds = found["load"]
        assert kind == "RankError" and "the store of the process group did not answer for" in text, found
        assert seconds < 62, "the call has a rank_timeout of 60 s, and nobody holds the store any more"
    cleaned: dict[str, Any] = results[-1]
    (live,), (dead,) = cleaned["gc"]["kept"], cleaned["gc"]["undone"]
    assert set(cleaned["no locks"]) == {live, dead}, "both are younger than the limit"
    assert cleaned["after"] == GarbageReport()
    require_clean(path, ["live"])


@pytest.mark.slow
@pytest.mark.timeout(120 + 20 * NUM_ROUNDS)
def test_many_ranks_end_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hosts: Hosts) -> None:
    for seed in range(NUM_ROUNDS):
        chance = random.Random(seed)
        how = ["killed", "raises", "cut off"][seed % 3]
        num_ranks = 4
        victim = chance.randrange(num_ranks)
        (tmp_path / str(seed)).mkdir()
        path = old_checkpoint(tmp_path / str(seed))
        results = hosts.run(
            ended_at_some_moment,
            str(path),
            victim,
            chance.randrange(1, 30),
            how,
            ranks_per_host=2,
            killed=[victim] if how == "killed" else [],
        )
        when = float(path.with_suffix(".time").read_text())
        for rank, found in enumerate(results):
            if found is not None and not (how == "raises" and rank == victim):
                assert found[0] == "RankError", (seed, found)
                assert found[3] - when < (2 if how == "raises" else RANK_TIMEOUT + 1), (seed, found)
        path.with_suffix(".time").unlink()
        generation = generation_of(path)
        sweep(monkeypatch, path)
        require_nothing_else(path)
        assert generation_of(path) == generation
