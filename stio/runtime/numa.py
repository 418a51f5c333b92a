"""NUMA: on which node of the host a device is, so that memory for its copies is pinned there.

A copy between a device and memory of another node crosses the link between the processors, which is slower than the
bus and shared with all other programs. Only Linux is supported.
"""

from __future__ import annotations

from stio.runtime.control_groups import read_text


def node_of(pci_address: str, *, sysfs: str = "/sys") -> int | None:
    """Return the node of a device; None if it is not known, or if the host has one node only.

    Args:
        pci_address: Address of the device on its bus, `"0000:3b:00.0"`.
        sysfs: Where the kernel's description of the devices is mounted.
    """
    nodes = read_text(f"{sysfs}/devices/system/node/has_memory").strip()
    if "," not in nodes and "-" not in nodes:
        return None
    text = read_text(f"{sysfs}/bus/pci/devices/{pci_address.lower()}/numa_node").strip()
    return int(text) if text.isdigit() else None  # the kernel writes -1 if the firmware does not say
