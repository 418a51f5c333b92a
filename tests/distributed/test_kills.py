"""Ranks that are killed, or that raise, at random moments of saves and loads."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rank_kills import SHAPES, SHARD_BYTES, Ended, Round, Workers, whole

from stio import sync
from stio.errors import StioError
from tests.storage.transactions import sweep

KILLS = int(os.environ.get("STIO_RANK_KILLS", "200"))
SEED = int(os.environ.get("STIO_RANK_KILLS_SEED", "1000"))


def generation_of(path: Path) -> int:
    """Return which generation a checkpoint is; fail if it is not one as a whole."""
    found = sync.load(path)
    assert found.keys() == SHAPES.keys()
    generation = int(found["plain"][0, 0])
    for name, tensor in found.items():
        assert torch.equal(tensor, whole(name, generation)), (name, generation)
    return generation


def require_nothing_else(path: Path) -> None:
    """Fail if there is anything beside the files that the index names."""
    index = json.loads((path / "model.safetensors.index.json").read_text())
    expected = {"model.safetensors.index.json", *index["weight_map"].values()}
    assert set(os.listdir(path)) == expected
    assert os.listdir(path.parent) == [path.name]


def outcome_of(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> str:
    """Check how a round ended; return whether the checkpoint is the old or the new one."""
    this = ended.of
    assert not ended.wrong, "\n".join(ended.wrong)
    others = set(range(this.num_ranks)) - {this.victim}
    assert ended.errors.keys() >= others, "a rank did not raise"
    for rank in others:
        kind, cause, text, _ = ended.errors[rank]
        assert kind == "RankError", text
        assert ended.delays[rank] < (2 if this.raises else this.rank_timeout + 1), text
        if this.raises:
            assert cause == ended.errors[this.victim][0], text
            assert f"failed on rank {this.victim}: " in text
        else:
            assert ("the store of the process group" if this.victim == 0 else f"rank {this.victim} ") in text, text
    generation = generation_of(ended.path)
    assert ended.acknowledged <= generation <= min(ended.acknowledged + 1, ended.began)
    if not this.raises and this.victim != 0:  # a fault may also hit the roll-back; then the collection removes the rest
        require_nothing_else(ended.path)
    sweep(monkeypatch, ended.path)
    require_nothing_else(ended.path)
    assert generation_of(ended.path) == generation
    sync.save({name: whole(name, 99) for name in SHAPES}, ended.path, max_shard_size=SHARD_BYTES, durability="none")
    assert generation_of(ended.path) == 99
    require_nothing_else(ended.path)
    return "old" if generation == ended.acknowledged else "new"


def play_all(
    rounds: Sequence[Round], folder: Path, monkeypatch: pytest.MonkeyPatch, *, at_once: int
) -> list[tuple[Ended, str]]:
    """Play rounds, several at once; return how each ended."""

    def some(k: int) -> list[Ended]:
        own = folder / str(k)
        own.mkdir()
        with Workers(own) as workers:
            return [workers.play(this) for this in rounds[k::at_once]]

    with ThreadPoolExecutor(at_once) as threads:
        all_ended = [ended for one in threads.map(some, range(at_once)) for ended in one]
    found, failed = [], []
    for ended in all_ended:
        try:
            found.append((ended, outcome_of(ended, monkeypatch)))
        except (AssertionError, OSError, ValueError, StioError) as error:
            failed.append(f"{ended}\n{type(error).__name__}: {error}")
    print(described(found))
    assert not failed, f"{len(failed)} of {len(rounds)} rounds failed\n" + "\n\n".join(failed)
    return found


def described(found: Sequence[tuple[Ended, str]]) -> str:
    """Return a line for each kind."""
    lines = []
    for kind in sorted({(ended.of.kind, ended.of.raises) for ended, _ in found}):
        some = [(ended, outcome) for ended, outcome in found if (ended.of.kind, ended.of.raises) == kind]
        counts = Counter(outcome for _, outcome in some)
        first = [max(ended.delays.values()) for ended, _ in some if ended.of.victim == 0]
        later = [max(ended.delays.values()) for ended, _ in some if ended.of.victim != 0]
        lines.append(
            f"{kind[0]}, {'raises' if kind[1] else 'killed'}: {len(some)} rounds, {counts['old']} old, {counts['new']} new; "
            f"slowest: {max(first, default=0):.2f} s (rank 0), {max(later, default=0):.2f} s (others)"
        )
    return "\n".join(lines)


# Not in the gate: where other tests take the cores for two seconds, ranks count as silent. There a rank is killed in
# `test_ranks.py`, `test_save.py`, `test_broadcast.py` and `test_training.py`.
@pytest.mark.slow
def test_c115_a_rank_ends_at_a_random_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [Round.from_seed(seed, rank_timeout=2.0) for seed in range(8)]
    play_all(rounds, tmp_path, monkeypatch, at_once=2)


@pytest.mark.slow
@pytest.mark.timeout(120 + 10 * KILLS)
def test_c115_many_ranks_end_at_random_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, `STIO_RANK_KILLS` times."""
    rounds = [Round.from_seed(SEED + k, rank_timeout=2.0) for k in range(KILLS)]
    play_all(rounds, tmp_path, monkeypatch, at_once=2)
