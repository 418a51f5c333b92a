"""The benchmark beside a busy thread: it has every public operation that moves tensors, and each one runs."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerators import gpu

import stio
import stio.sync
from benchmarks import busy
from benchmarks.busy import FACES, MODES, MOVE_NO_TENSORS, OPERATIONS, Bench, Operation, Run
from stio.device.base import resolve_device

ROOT = Path(__file__).resolve().parent.parent
PROTOCOL = {"__anext__", "__await__", "__iter__", "__next__"}


def callables(api: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public functions of a module, and the methods of its classes, by name; errors are no operations."""
    for name in api.__all__:
        value = getattr(api, name)
        if inspect.isclass(value):
            if not issubclass(value, BaseException):
                methods = inspect.getmembers(value, inspect.isroutine)
                yield from (
                    (f"{name}.{key}", one) for key, one in methods if not key.startswith("_") or key in PROTOCOL
                )
        elif callable(value):
            yield name, value


def public() -> dict[str, Any]:
    return dict(callables(stio)) | dict(callables(stio.sync))


def test_every_public_operation_is_measured() -> None:
    measured = {name for operation in OPERATIONS for name in operation.covers}
    assert sorted(public().keys() - measured - MOVE_NO_TENSORS) == []
    assert sorted(measured & MOVE_NO_TENSORS) == []
    assert sorted((measured | MOVE_NO_TENSORS) - public().keys()) == []  # names that are no longer there


def test_a_new_operation_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stio.sync, "merge", lambda source: None, raising=False)
    monkeypatch.setattr(stio.sync, "__all__", [*stio.sync.__all__, "merge"])
    monkeypatch.setattr(stio.Checkpoint, "copy", lambda self: None, raising=False)
    with pytest.raises(AssertionError, match=r"\['Checkpoint.copy', 'merge'\]"):
        test_every_public_operation_is_measured()


def test_operations_that_take_a_switch_interval_are_measured_with_it() -> None:
    found = public()
    for operation in OPERATIONS:
        functions = [found[name] for name in operation.covers if "." not in name]
        for function in functions:
            assert ("switch_interval" in inspect.signature(function).parameters) == operation.has_switch_interval


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("busy")
    busy._make_files(made, ["small"], str(ROOT))
    return made


def time_of(bench: Bench, operation: Operation) -> float:
    work = busy._time(bench, operation, "small", is_busy=True)
    return (busy._at_once(work) if bench.is_blocking else asyncio.run(work))["seconds"]


@pytest.mark.matrix
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_each_operation_runs(directory: Path, operation: Operation, face: str) -> None:
    if face in operation.faces:
        bench = Bench(stio, directory, is_blocking=face == "blocking", switch_interval=busy.SWITCH_SECONDS)
        assert time_of(bench, operation) > 0


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each.on_device], ids=lambda each: each.name)
def test_each_operation_runs_on_a_device(directory: Path, operation: Operation) -> None:
    bench = Bench(stio, directory, device=resolve_device("auto"))
    assert time_of(bench, operation) > 0


def test_lag(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "FEWEST_LAGS", 5)
    found = asyncio.run(busy._lag(Bench(stio, directory), OPERATIONS[0], "small", is_busy=False))
    assert found["beats"] >= 5 and found["turns"] >= 1
    assert found["lag"]["p99"] >= 0 and found["baseline"]["p99"] >= 0


def test_a_run_that_fails_is_a_result(tmp_path: Path, zygote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(zygote.python))
    run = Run("time", str(ROOT), "load", "small", "cpu", "async", MODES[0])
    figures = busy.run_child(run, tmp_path)  # nothing was written there
    assert "CheckpointNotFoundError" in figures["error"] and figures["other_cpus"] >= 0


def test_another_tree_is_not_measured_by_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = Run("time", str(tmp_path), "load", "small", "cpu", "async", MODES[0])
    with pytest.raises(RuntimeError, match="stio came from"):
        busy.measure(run, tmp_path)


def test_the_plan_pairs_the_trees() -> None:
    options = busy.parse(["--operations", "load", "convert from torch.save", "--tree", "a", "--tree", "b"])
    together = list(busy.plan(options))
    assert all([Path(run.tree).name for run in runs] == ["a", "b"] for runs in together)
    lines = {(runs[0].operation, runs[0].device, runs[0].mode) for runs in together}
    assert len(lines) == 2 * 4 + 3  # `load` on two devices in four modes; `convert` takes no switch interval
    assert len(together) == len(lines) * 2 * 2  # layouts, times and lags
    assert all(runs[0].kind == "time" for runs in busy.plan(busy.parse(["--operations", "stio verify"])))


def test_report() -> None:
    line = {"operation": "load", "layout": "many", "device": "cpu", "face": "async", "mode": "alone", "tree": "/x/a"}
    machine = {"date": "2026-01-01", "cpu": "c", "num_cpus": 2, "memory_bytes": 1 << 30, "kernel": "6", "python": "3"}
    records: list[dict[str, Any]] = [
        {"kind": "machine", "trees": ["/x/a", "/x/b"], "packages": {}, "disk": {"filesystem": "ext4"}, **machine},
        *({"kind": "time", **line, "seconds": seconds, "other_cpus": 0.5} for seconds in (0.3, 0.05, 0.2)),
        {"kind": "time", **line, "tree": "/x/b", "error": "SIGKILL: "},
        {"kind": "lag", **line, "lag": {"p99": 0.004}, "baseline": {"p99": 0.001}},
    ]
    printed = busy.report(json.loads(json.dumps(records)))
    assert "| load | many | cpu | 0.200 (0.0500 to 0.300) | failed: SIGKILL:  |" in printed
    assert "| load | many | cpu | 4.0 (1.0) |  |" in printed
    assert "Other processes kept 0.5 CPUs busy" in printed
