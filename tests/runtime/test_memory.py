"""Regions and page mappings: where they begin, what they cost, when they go."""

import ctypes
import errno
import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from stio.errors import HostMemoryError
from stio.limits import HUGE_PAGE_BYTES, PAGE_BYTES
from stio.runtime import memory
from stio.runtime.memory import Region, allocate, map_file, populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="page mappings are Linux's here")


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if low <= address < high:
            return True
    return False


@pytest.mark.parametrize("nbytes", [1, PAGE_BYTES, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_fresh_memory_is_zero_writable_and_aligned(nbytes: int) -> None:
    region = allocate(nbytes)
    assert region.nbytes == nbytes
    assert region.address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE_BYTES) == 0
    assert region.tobytes() == bytes(nbytes)
    region.write(nbytes - 1, b"\x7f")
    assert region.tobytes()[-1] == 0x7F


def test_nothing_allocated_still_has_an_address() -> None:
    assert allocate(0).address


def test_pages_go_with_their_last_owner() -> None:
    region = allocate(3 * HUGE_PAGE_BYTES)
    array = np.ndarray((5,), np.uint8, region.owner, region.address - ctypes.addressof(region.owner))
    address = region.address
    del region
    gc.collect()
    assert is_mapped(address), "an array over the pages keeps them"
    del array
    gc.collect()
    assert not is_mapped(address)


def test_much_memory_goes_without_holding_up_whoever_drops_it() -> None:
    region = allocate(memory._UNMAP_HERE_BYTES + 1)
    address = region.address
    del region
    gc.collect()
    deadline = time.monotonic() + 30
    while is_mapped(address):  # another thread does it
        assert time.monotonic() < deadline


def test_a_part_of_a_region_keeps_all_of_it() -> None:
    region = allocate(4 * PAGE_BYTES)
    region.write(PAGE_BYTES, b"stio")
    part = region.sub(PAGE_BYTES, 4)
    del region
    gc.collect()
    assert part.tobytes() == b"stio"


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 1), (0, 11), (10, 1), (5, -1)])
def test_a_part_outside_is_refused(start: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="outside a region of 10 bytes"):
        Region(4096, 10).sub(start, nbytes)


def test_more_than_the_address_space_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        allocate(1 << 62)


@pytest.mark.parametrize("huge_pages", [False, True])
def test_a_mapping_outlives_its_descriptor_and_never_writes_back(tmp_path: Path, huge_pages: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdefgh" * PAGE_BYTES)
    fd = os.open(path, os.O_RDONLY)
    region = map_file(fd, 8 * PAGE_BYTES, huge_pages=huge_pages)
    os.close(fd)
    assert populate(region.sub(5, 3 * PAGE_BYTES)) == 0
    region.write(0, b"X")
    assert region.tobytes() == b"X" + (b"abcdefgh" * PAGE_BYTES)[1:]
    assert path.read_bytes()[:1] == b"a"


def test_populating_past_the_end_says_so_instead_of_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * PAGE_BYTES))
    fd = os.open(path, os.O_RDONLY)
    region = map_file(fd, 4 * PAGE_BYTES, huge_pages=False)
    os.close(fd)
    os.truncate(path, PAGE_BYTES)
    assert populate(region) == errno.EFAULT


def test_a_descriptor_that_cannot_be_mapped_is_an_os_error() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="mmap of 4,096 bytes failed"):
            map_file(reader, PAGE_BYTES, huge_pages=False)
    finally:
        os.close(reader)
        os.close(writer)


def test_what_fits_is_what_the_machine_has() -> None:
    assert memory.fits(1)
    assert not memory.fits(os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES * 2)


@pytest.mark.parametrize(
    ("available", "budget"),
    [(1 << 40, 512 << 20), (1 << 30, 512 << 20), (100 << 20, 50 << 20), (1 << 20, 4 << 20), (0, 4 << 20)],
)
def test_the_default_budget_is_smaller_where_memory_is_short(
    available: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    assert memory.default_budget_bytes() == budget
    assert memory.default_budget_bytes(memory.UNCHECKED_BYTES) == 512 << 20


def test_what_is_required_and_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    assert memory.require(100, path="p") == 0
    assert memory.require(1, path="p") == 99
    with pytest.raises(HostMemoryError, match="p: the tensors do not fit") as caught:
        memory.require(101, path="p")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (101, 100)


def test_a_shortage_of_any_library_is_one_error() -> None:
    for refused in (
        lambda: torch.empty(1 << 60, dtype=torch.uint8),
        lambda: np.zeros(1 << 60, dtype=np.uint8),
        lambda: bytes(1 << 60),
    ):
        with pytest.raises(HostMemoryError) as caught, memory.reporting_shortage("p"):
            refused()
        assert caught.value.path == "p"
        assert caught.value.needed_bytes in (1 << 60, None)
        assert caught.value.free_bytes is not None
    with pytest.raises(HostMemoryError, match="refused to map") as caught, memory.reporting_shortage("p"):
        memory.allocate(1 << 60)
    assert (caught.value.path, caught.value.needed_bytes) == ("p", (1 << 60) + HUGE_PAGE_BYTES)
    with pytest.raises(RuntimeError, match="other"), memory.reporting_shortage("p"):
        raise RuntimeError("other")


def test_a_finaliser_may_map_memory_while_ended_mappings_are_dropped() -> None:
    """The collector runs at any allocation, and a finaliser may use stio."""
    kept = [memory.allocate(4096) for _ in range(100)]

    class Maps:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            kept.append(memory.allocate(4096))

    threshold = gc.get_threshold()
    gc.set_threshold(20)
    try:
        for _ in range(30):
            for _ in range(15):
                Maps()
            memory._drop_unmapped()
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(kept) == 550


def test_populating_begins_at_a_page_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some have pages of 64 KiB, and refuse any other address."""
    found = []

    class Libc:
        def madvise(self, address: int, nbytes: int, advice: int) -> int:
            found.append((address, nbytes))
            return 0

    monkeypatch.setattr(memory, "libc", Libc())
    monkeypatch.setattr(memory, "SYSTEM_PAGE_BYTES", 1 << 16)
    assert populate(Region((1 << 20) + PAGE_BYTES, 2 * PAGE_BYTES)) == 0
    assert found == [(1 << 20, 3 * PAGE_BYTES)]
