"""Processes that are the ranks of a group (gloo), for the tests of `stio.distributed`."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.zygote import Zygote

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def _forked_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fork each rank from a process that has imported what ranks need; as started ones, they share nothing with this one."""
    modules = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "stio.sync", "support"]
    zygote = Zygote(tmp_path_factory.mktemp("output"), modules)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.spawn.set_executable(str(zygote.python))
    yield
    multiprocessing.spawn.set_executable(before)
    zygote.close()
