"""NUMA: which node a device is on, and that the policy of a thread is set for a block only, and only where it matters."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from stio.runtime import numa

ADDRESS = "0000:3B:00.0"


def sysfs(tmp_path: Path, nodes: str, node: str | None) -> str:
    """Write what the kernel would show."""
    (tmp_path / "devices/system/node").mkdir(parents=True)
    (tmp_path / "devices/system/node/has_memory").write_text(f"{nodes}\n")
    device = tmp_path / "bus/pci/devices" / ADDRESS.lower()
    device.mkdir(parents=True)
    if node is not None:
        (device / "numa_node").write_text(f"{node}\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("nodes", "node", "expected"),
    [
        ("0-1", "1", 1), ("0,2", "0", 0), ("0-7", "5", 5),
        ("0", "0", None), ("", "1", None), ("0-1", "-1", None), ("0-1", None, None), ("0-1", "", None),
    ],
)  # fmt: skip
def test_node_of_a_device(tmp_path: Path, nodes: str, node: str | None, expected: int | None) -> None:
    assert numa.node_of(ADDRESS, sysfs=sysfs(tmp_path, nodes, node)) == expected


def test_without_sysfs_no_node_is_known(tmp_path: Path) -> None:
    assert numa.node_of(ADDRESS, sysfs=str(tmp_path)) is None


class Calls:
    """Stands for the system: a thread's policy, and the calls that were made."""

    def __init__(self, *, refuses: str = "") -> None:
        self.mode, self.nodes = 3, [0, 1]
        self.seen: list[tuple[int, list[int]]] = []
        self._refuses = refuses

    def __call__(self, number: int, *arguments: Any) -> int:
        is_get = len(arguments) == 5
        if self._refuses == ("get" if is_get else "set"):
            return -1
        mode, mask, max_node = arguments[:3]
        assert max_node.value == 1024
        if is_get:
            mode._obj.value = self.mode
            mask[0] = sum(1 << node for node in self.nodes)
        else:
            self.mode, self.nodes = mode.value, [node for node in range(1024) if mask[node // 64] >> node % 64 & 1]
            self.seen.append((self.mode, self.nodes))
        return 0


needs_numbers = pytest.mark.skipif(
    numa.platform.machine() not in numa._SYSCALLS or ctypes.sizeof(ctypes.c_ulong) != 8,
    reason="the numbers of the system calls are not known here",
)


@needs_numbers
@pytest.mark.parametrize("node", [0, 1, 70])
@pytest.mark.parametrize("fails", [False, True])
def test_the_policy_holds_for_the_block(node: int, fails: bool) -> None:
    calls = Calls()
    try:
        with numa.preferring(node, call=calls):
            assert (calls.mode, calls.nodes) == (1, [node])
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert calls.seen == [(1, [node]), (3, [0, 1])]


@pytest.mark.parametrize("node", [None, 1024])
def test_without_a_node_nothing_is_called(node: int | None) -> None:
    def call(*_: object) -> int:
        raise AssertionError

    with numa.preferring(node, call=call):
        pass


@needs_numbers
@pytest.mark.parametrize("refuses", ["get", "set"])
def test_a_refusal_changes_nothing(refuses: str) -> None:
    calls, entered = Calls(refuses=refuses), False
    with numa.preferring(1, call=calls):
        entered = True
        assert (calls.mode, calls.nodes) == (3, [0, 1])
    assert entered
    assert calls.seen == []


@needs_numbers
def test_the_system_takes_it() -> None:
    """The system's own calls: the policy is read back inside the block, and is the old one after it."""

    def policy() -> tuple[int, int]:
        mode, mask = ctypes.c_int(-1), numa._Mask()
        number = numa._SYSCALLS[numa.platform.machine()][0]
        if numa._system_call(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), None, ctypes.c_ulong(0)):
            pytest.skip("the system does not tell the policy")
        return mode.value, mask[0]

    before = policy()
    with numa.preferring(0):
        inside = policy()
    assert policy() == before
    if inside == before:
        pytest.skip("the system does not let this process choose")
    assert inside == (1, 1)
