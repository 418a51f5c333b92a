"""Memory that one rank has freed or shrunk: the load or save raises on all ranks, and no rank writes past an end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks
from torch import nn

from stio import sync
from stio.errors import MismatchError, RankError
from stio.loading.targets.module import ModuleTarget

SHAPE, NBYTES = (512, 1024), 512 * 1024 * 4
HELD = (0, NBYTES // 2, NBYTES - 1)


class Wide(nn.Module):
    """Tensors that all ranks need, of several chunks of a broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(SHAPE))
        self.second = nn.Parameter(torch.zeros(SHAPE))


def _outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except MismatchError as error:
        assert "second cannot be filled: its memory was freed or shrunk" in str(error)
        return "own"
    except ValueError as error:
        assert "'second' has no data: its memory was freed or shrunk" in str(error)
        return "own"
    except RankError as error:
        assert error.ranks == (1,) and "memory was freed or shrunk" in str(error.__cause__)
        return "of rank 1"
    return "done"


def loads_and_saves(folder: str) -> dict[str, str]:
    found = {}
    is_victim = dist.get_rank() == 1
    for broadcast in (False, True):
        for held in HELD:
            module = Wide()
            if is_victim:
                module.second.untyped_storage().resize_(held)
            load = lambda: sync.distributed.load_into(module, f"{folder}/in", broadcast=broadcast, budget_bytes=8 << 20)  # noqa: B023, E731 - called at once
            found[f"before, {broadcast}, {held}"] = _outcome(load)
            assert not (is_victim and module.first.any())
            module.second.untyped_storage().resize_(NBYTES)
            for name in ("copy", "copy_rows"):
                old = getattr(ModuleTarget, name)

                def shrink_first(target, *arguments, old=old, module=module, held=held):
                    if is_victim:
                        module.second.untyped_storage().resize_(held)
                    return old(target, *arguments)

                if broadcast or name == "copy":
                    with patch.object(ModuleTarget, name, shrink_first):
                        found[f"{name}, {broadcast}, {held}"] = _outcome(load)
                    module.second.untyped_storage().resize_(NBYTES)
            load()
            assert bool((module.first == 1).all() and (module.second == 2).all())
    state = {"first": torch.ones(SHAPE), "second": torch.full(SHAPE, 2.0)}
    if is_victim:
        state["second"].untyped_storage().resize_(NBYTES // 2)
    found["save"] = _outcome(lambda: sync.distributed.save(state, f"{folder}/out"))
    return found


@pytest.mark.slow
def test_c336_one_rank_has_freed_or_shrunk_memory(tmp_path: Path) -> None:
    sync.save({"first": torch.ones(SHAPE), "second": torch.full(SHAPE, 2.0)}, tmp_path / "in")
    first, victim = run_ranks(loads_and_saves, 2, tmp_path, str(tmp_path))
    assert set(victim.values()) <= {"own", "done"} and set(first.values()) <= {"of rank 1", "done"}
    done = {name for name, what in victim.items() if what == "done"}
    assert done == {name for name, what in first.items() if what == "done"}
    # What is not called in such a load shrinks nothing.
    assert done <= {name for name in victim if name.startswith(("copy, True", "copy_rows, True"))}
    assert not (tmp_path / "out").exists()
