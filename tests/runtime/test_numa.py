"""NUMA: which node a device is on."""

from __future__ import annotations

from pathlib import Path

import pytest

from stio.device import pinned

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
    assert pinned.numa_node(ADDRESS, sysfs=sysfs(tmp_path, nodes, node)) == expected


def test_without_sysfs_no_node_is_known(tmp_path: Path) -> None:
    assert pinned.numa_node(ADDRESS, sysfs=str(tmp_path)) is None
