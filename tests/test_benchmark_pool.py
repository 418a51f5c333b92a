"""The benchmark of pools: each way answers every request by the right weights, and a pool keeps its bounds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import simdevice
from accelerators import gpu

from benchmarks import pool
from benchmarks.pool import WAYS, Work


def work_in(directory: Path, device: str) -> Work:
    work = Work(
        directory,
        num_models=4,
        model_bytes=2 << 20,
        num_on_device=2,
        num_in_memory=3,
        num_requests=300,
        num_callers=8,
        leaving=0.1,
        hold_seconds=0.02,
        device=device,
    )
    for k in range(work.num_models):
        pool.write(work, k, float(k + 1))
    return work


def require_right(work: Work, way: str) -> None:
    found = pool.run(work, way)
    assert found["wrong"] == 0 and found["loads"] > 2
    assert found["answers"] + found["left"] + found["failed"] >= work.num_requests, "each has an end"
    assert found["answers"] > 150 and found["p50"] <= found["p99"] <= found["longest_wait"]
    assert work.path(3).stat().st_size > 1_900_000, "the damaged file is whole again"
    if way == "pool":
        assert found["max_host_bytes"] <= work.host_bytes
        assert found["peak_device_bytes"] <= work.device_bytes
        assert found["max_device_bytes"] <= work.device_bytes
    printed = pool.table(json.loads(json.dumps([{"way": "machine"}, found])))
    assert printed.splitlines()[-1].startswith(f"| {way} | ")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_way(way: str, tmp_path: Path) -> None:
    require_right(work_in(tmp_path, "cpu"), way)


@pytest.mark.slow
@gpu
@pytest.mark.skipif(not simdevice.installed(), reason="of the simulated device")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_on_a_device(way: str, tmp_path: Path) -> None:
    try:
        require_right(work_in(tmp_path, "sim"), way)
    finally:
        simdevice.set_fills(True)
        simdevice.set_released(0)


def test_swaps(tmp_path: Path) -> None:
    found = pool.swaps(work_in(tmp_path, "cpu"), 3)
    assert found["swap_seconds"] > 0 and found["min_ratio"] <= found["ratio"] <= found["max_ratio"]
    assert "Swap from host memory" in pool.table([found])


@pytest.mark.slow
def test_a_wrong_answer_is_counted(tmp_path: Path) -> None:
    work = work_in(tmp_path, "cpu")
    pool.write(work, 0, 2.0)  # the weights of another model
    assert pool.run(work, "load_file")["wrong"] > 50
