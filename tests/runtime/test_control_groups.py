"""What control groups leave, of either version, at any place below the mount; real groups: tests/faults/test_machines.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stio.runtime import memory as control_groups

GIB = 1 << 30
MEMINFO = "MemTotal: 64 kB\nMemFree: 10 kB\nMemAvailable: 30 kB\nSwapFree: {swap} kB\n"


class Machine:
    """Files of /proc that are claimed, and a directory for those of /sys."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.texts: dict[str, str] = {}
        self._read = control_groups.read_text

    def read(self, path: str) -> str:
        """Return the text of a file."""
        return self.texts.get(path, "" if path.startswith("/proc/") else self._read(path))

    def write(self, **texts: str) -> None:
        """Write files of a group; `a__b__memory_max` is `a/b/memory.max`."""
        for name, text in texts.items():
            *folders, file = name.split("__")
            path = self.directory.joinpath(*folders, file.replace("_", ".", 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    monkeypatch.setattr(control_groups, "read_text", machine.read)
    monkeypatch.setattr(control_groups, "_MOUNT", str(tmp_path))
    control_groups._find_groups.cache_clear()
    machine.texts["/proc/meminfo"] = MEMINFO.format(swap=0)
    yield machine
    control_groups._find_groups.cache_clear()


@pytest.fixture
def in_version_2(machine: Machine) -> Machine:
    (machine.directory / "job" / "step").mkdir(parents=True)
    machine.texts["/proc/self/cgroup"] = "0::/job/step\n"
    return machine


@pytest.fixture
def in_version_1(machine: Machine) -> Machine:
    for controller in ("memory", "cpu"):
        (machine.directory / controller / "job" / "step").mkdir(parents=True)
    machine.texts["/proc/self/cgroup"] = "3:cpu,cpuacct:/job/step\n2:memory:/job/step\n0::/elsewhere\n"
    return machine


STAT = "anon 700\nfile 90\nshmem 50\nactive_file 30\ninactive_file 10\nslab_reclaimable 5\n"


def test_version_2(in_version_2: Machine) -> None:
    write = in_version_2.write
    write(job__step__memory_max="max", job__step__memory_current="800", job__step__memory_stat=STAT)
    assert control_groups.available_bytes() == 30 << 10
    write(job__step__memory_max="1000")
    assert control_groups.available_bytes() == 245, "the page cache gives way, shared memory does not"
    write(job__memory_max="850", job__memory_current="800")
    assert control_groups.available_bytes() == 50, "the group above counts"
    assert control_groups.room_in_memory() == 50
    write(job__memory_high="820")
    assert (control_groups.room_in_memory(), control_groups.available_bytes()) == (20, 50)
    write(job__memory_max="700", job__memory_high="max")
    assert control_groups.available_bytes() == 0


def test_swap_counts_for_what_can_be_allocated(in_version_2: Machine) -> None:
    write = in_version_2.write
    write(job__step__memory_max="1000", job__step__memory_current="800", job__step__memory_stat="")
    for name, text in (("swap.max", "500"), ("swap.current", "100")):
        (in_version_2.directory / "job" / "step" / f"memory.{name}").write_text(text)
    assert control_groups.available_bytes() == 200, "no swap on the machine"
    in_version_2.texts["/proc/meminfo"] = MEMINFO.format(swap=8)
    assert control_groups.available_bytes() == 600
    assert control_groups.room_in_memory() == 200


def test_version_1(in_version_1: Machine) -> None:
    folder = in_version_1.directory / "memory" / "job" / "step"
    (folder / "memory.limit_in_bytes").write_text("1000\n")
    (folder / "memory.usage_in_bytes").write_text("800\n")
    (folder / "memory.stat").write_text("cache 1\ntotal_cache 90\ntotal_active_file 30\ntotal_inactive_file 10\n")
    assert control_groups.available_bytes() == 240
    (folder / "memory.kmem.usage_in_bytes").write_text("7\n")
    assert control_groups.available_bytes() == 247
    in_version_1.texts["/proc/meminfo"] = MEMINFO.format(swap=8)
    assert control_groups.available_bytes() == 247 + (8 << 10)
    assert control_groups.room_in_memory() == 247
    (folder.parent / "memory.limit_in_bytes").write_text("900\n")
    (folder.parent / "memory.usage_in_bytes").write_text("890\n")
    assert control_groups.room_in_memory() == 10


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ({}, 16), ({"job/step": "max 100000"}, 16), ({"job/step": "200000 100000"}, 2), ({"job": "350000 100000"}, 4),
        ({"job": "300000 100000", "job/step": "50000 100000"}, 1), ({"": "100 50"}, 2), ({"job": "9900000 100000"}, 16),
        ({"job": "nonsense"}, 16), ({"job": "0 0"}, 16),
    ],
)  # fmt: skip
def test_quotas(in_version_2: Machine, quotas: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for folder, text in quotas.items():
        (in_version_2.directory / folder / "cpu.max").write_text(text)
    assert control_groups.num_processors() == expected


@pytest.mark.parametrize("text", ["", "\n", "0\n", "0:\n", "0::\n", "nonsense\n", "a:b\n", "2:memory\n", "0::job\n"])
def test_malformed_memberships_limit_nothing(in_version_2: Machine, text: str) -> None:
    (in_version_2.directory / "job" / "memory.max").write_text("1000\n")
    in_version_2.texts["/proc/self/cgroup"] = text
    assert control_groups.available_bytes() > 1000
    in_version_2.texts["/proc/self/cgroup"] = f"{text.strip()}\n0::/job\n"
    assert control_groups.available_bytes() == 1000


def test_a_quota_of_version_1(in_version_1: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    folder = in_version_1.directory / "cpu" / "job"
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert control_groups.num_processors() == 16
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    assert control_groups.num_processors() == 2


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", [""]), ("/a", ["/a", ""]), ("/a/b", ["/a/b", "/a", ""]),
        ("/docker/x", [""]), ("/../other", [""]),
    ],
)  # fmt: skip
def test_the_place_of_the_own_group(machine: Machine, path: str, found: list[str]) -> None:
    """A container without a namespace of its own names a group above its mount."""
    (machine.directory / "a" / "b").mkdir(parents=True)
    machine.texts["/proc/self/cgroup"] = f"0::{path}\n"
    assert control_groups._groups("memory") == tuple((2, f"{machine.directory}{folder}") for folder in found)


def test_nothing_can_be_read(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may hide /proc and /sys: nothing is limited then."""
    machine.texts.clear()
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    assert control_groups.available_bytes() > GIB
    assert control_groups.room_in_memory() > GIB
    assert control_groups.num_processors() >= 1
    assert control_groups.address_space_left() > GIB


def test_the_whole_machine(machine: Machine) -> None:
    machine.texts["/proc/meminfo"] = MEMINFO.format(swap=3)
    assert control_groups.available_bytes() == (30 + 3) << 10
    assert control_groups.room_in_memory() == 30 << 10
    machine.texts["/proc/spl/kstat/zfs/arcstats"] = (
        "13 1 0x01 123\nname type data\nsize                            4    1024\nc 4 7\n"
    )
    assert control_groups.available_bytes() == (30 + 3 + 1) << 10


def test_address_space(machine: Machine) -> None:
    machine.texts["/proc/self/limits"] = (
        "Max address space         1000000              unlimited            bytes     \n"
    )
    machine.texts["/proc/self/statm"] = "100 50 1 1 1 1 1\n"
    assert control_groups.address_space_left() == 1000000 - 100 * os.sysconf("SC_PAGE_SIZE")
    machine.texts["/proc/self/limits"] = (
        "Max address space         unlimited            unlimited            bytes     \n"
    )
    assert control_groups.address_space_left() > GIB


@pytest.mark.parametrize("count", [control_groups.available_bytes, control_groups.room_in_memory])
def test_here(count: Callable[[], int]) -> None:
    assert 0 < count() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4
    assert 1 <= control_groups.num_processors() <= (os.cpu_count() or 1)


def test_a_long_file_is_read_whole(tmp_path: Path) -> None:
    (tmp_path / "long").write_text("x" * 50_000)
    assert len(control_groups.read_text(str(tmp_path / "long"))) == 50_000
    assert control_groups.read_text(str(tmp_path / "none")) == ""
