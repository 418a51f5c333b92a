"""A rank that leaves the block of a `distributed.Saver` by an exception: 456."""

from __future__ import annotations

import importlib
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks

import stio
from stio import sync

RANKS = 2
STATE = {"w": torch.ones(3)}


def leaves(folder: str) -> list[str]:
    """Save in blocks that one rank leaves by an exception; return what the other one gets."""
    rank, texts = dist.get_rank(), []
    for number, (leaver, num_saves) in enumerate(((0, 0), (0, 1), (1, 2))):
        began = time.monotonic()
        try:
            with sync.distributed.Saver() as saver:
                for step in range(num_saves):
                    saver.save(STATE, f"{folder}/{number}-{step}").result()
                if rank == leaver:
                    raise KeyError("left")
                saver.save(STATE, f"{folder}/{number}-late").result()
        except KeyError:
            assert rank == leaver
        except stio.RankError as error:
            assert error.ranks == (leaver,) and isinstance(error.__cause__, KeyError)
            texts.append(str(error))
        assert time.monotonic() - began < 20
        assert not Path(f"{folder}/{number}-late").exists()
    return texts


def goes_on(folder: str) -> None:
    """The other rank begins no save of the block: the calls that follow are those of both."""
    rank = dist.get_rank()
    try:
        with sync.distributed.Saver() as saver:
            saver.save(STATE, f"{folder}/first").result()
            if rank == 0:
                raise ValueError("left")
    except ValueError:
        pass
    sync.distributed.save(STATE, f"{folder}/second")
    with sync.distributed.Saver() as saver:
        for step in range(2):
            saver.save(STATE, f"{folder}/third-{step}").result()


def leaves_after_a_refusal(folder: str) -> str:
    """The error that leaves the block has the `id` of an earlier one, which was caught and freed."""
    saves = vars(importlib.import_module("stio.distributed.save"))
    saves["id"] = lambda error: 1
    try:
        with sync.distributed.Saver(rank_timeout=10) as saver:
            with suppress(Exception):
                saver.save(STATE, f"{folder}/refused", max_shard_size="no")
            if dist.get_rank() == 0:
                raise KeyError("left")
            saver.save(STATE, f"{folder}/late").result()
    except KeyError:
        return ""
    except stio.RankError as error:
        return str(error)
    finally:
        del saves["id"]
    raise AssertionError


def test_c456_an_error_after_a_refusal_is_told_too(tmp_path: Path) -> None:
    assert run_ranks(leaves_after_a_refusal, RANKS, tmp_path, str(tmp_path)) == [
        "",
        "the save failed on rank 0: KeyError: 'left'",
    ]


def test_c456_the_other_ranks_hear_of_it_at_once(tmp_path: Path) -> None:
    first, second = run_ranks(leaves, RANKS, tmp_path, str(tmp_path))
    assert second == ["the save failed on rank 0: KeyError: 'left'"] * 2
    assert first == ["the save failed on rank 1: KeyError: 'left'"]


def test_c456_calls_after_the_block_are_still_those_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(goes_on, RANKS, tmp_path, str(tmp_path))
    for name in ("first", "second", "third-0", "third-1"):
        assert torch.equal(sync.load(tmp_path / name)["w"], STATE["w"])


@pytest.mark.anyio
async def test_c456_one_rank_alone_leaves_as_before(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        async with stio.distributed.Saver() as saver:
            await saver.save(STATE, tmp_path / "a")
            raise KeyError
    assert (tmp_path / "a").exists()
