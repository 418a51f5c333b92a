"""Each fault at each call of the kernel that the engine makes: a library between the two (`tests/storage/conftest.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from native.support import run_script
from storage.conftest import build_shim

SCRIPT = """
import ctypes, errno, mmap, os, sys
from pathlib import Path
from native.support import POISON, File, Memory, devices_of
from stio import native
from stio.native import Failure, Ranges, Transfer

hits = ctypes.CDLL(None).shim_hits
device = devices_of(Path(sys.argv[1]))[0]
path, way, mode = Path(sys.argv[2]) / "faulty", sys.argv[3], sys.argv[4]
SIZE = (5 << 20) + 77
CUT = 3_000_003
os.environ.update(SHIM_SIZE=str(CUT), SHIM_PATH=str(path))

file = None

def once(at):
    # Hit call number `at` of a load of some groups; return the number of calls and what failed.
    os.environ.update(SHIM_MODES="", SHIM_AT="0")
    global file
    if mode == "cut" or file is None:
        if file is not None:
            file.close()
        file = File(path, SIZE)
    assert way != "direct" or file.direct_fd >= 0
    mapping = mmap.mmap(file.fd, SIZE, access=mmap.ACCESS_COPY)
    held = ctypes.c_char.from_buffer(mapping)
    parts = [(0, 5000), (5003, 1 << 20), (1100000, 700), (1101000, 700), (1300000, 3 << 20), (SIZE - 10, 10)]
    if way in ("direct", "direct device"):
        parts = [(0, 2 << 20), (3 << 20, 4096), ((3 << 20) + 8192, SIZE - (3 << 20) - 8192)]
    memory, ranges, transfer = Memory(SIZE), Ranges(), Transfer()
    direct_fd = file.direct_fd if way.startswith("direct") else -1
    for group, (offset, nbytes) in enumerate(parts):
        if way == "mapping":
            flags = native.POPULATE | (native.TOUCH if mode == "broken" else 0)
            ranges.file_to_host(group // 2, file.fd, -1, offset, nbytes, ctypes.addressof(held) + offset, flags)
        elif way.endswith("device"):
            ranges.file_to_device(group // 2, file.fd, direct_fd, offset, nbytes, memory.address + offset, device.ring)
        else:
            ranges.file_to_host(group // 2, file.fd, direct_fd, offset, nbytes, memory.address + offset)
    before = hits()
    os.environ.update(SHIM_MODES=mode, SHIM_AT=str(before + at))
    transfer.add(ranges)
    done, failed = set(), None
    try:
        while len(done) < len({group // 2 for group in range(len(parts))}):
            found = transfer.take(20)
            assert found
            done |= {one.group for one in found}
    except Failure as failure:
        failed = failure
    transfer.end()
    os.environ.update(SHIM_MODES="", SHIM_AT="0")
    count = hits() - before
    end = 0
    # Of a file that is cut the rest of the last page is cleared, also where a read copies it: the range is not complete.
    unread = (POISON, 0) if mode == "cut" else (POISON,)
    for group, (offset, nbytes) in enumerate(parts):
        if way != "mapping":
            found = memory[offset : offset + nbytes]
            expected = file.bytes[offset : offset + nbytes]
            if group // 2 in done:
                assert found == expected, (mode, at, group)
            elif found != expected:
                assert all(a == b or a in unread for a, b in zip(found, expected)), (mode, at, group)
            assert set(memory[end : offset]) <= {POISON}
        end = offset + nbytes
    memory.require_guards()
    del held
    mapping.close()
    return count, failed

count, failed = once(10**9)
assert count > 2 and failed is None
worst = 0
for at in range(1, count + 1):
    _, failed = once(at)
    if mode == "cut" and failed is not None:
        assert failed.kind in (native.TRUNCATED, native.SHRUNK), vars(failed)
        # A short read of a chunk that begins behind the end has no byte of it.
        assert failed.offset >= CUT, vars(failed)
    elif mode == "broken" and way.startswith("direct") and failed is None:
        pass  # read through the page cache
    elif mode == "broken" and way == "mapping":
        assert failed is None, vars(failed)  # a touch is not needed
    elif mode == "broken":
        assert (failed.kind, failed.code) == (native.READING, errno.EIO), vars(failed)
    elif mode == "poisoned":
        if failed is not None:  # EHWPOISON
            assert (failed.kind, failed.code, failed.populates) == (native.READING, 133, True)
            worst += 1
    elif mode != "cut":
        assert failed is None, vars(failed)
    worst += mode == "cut" and failed is not None
if mode in ("cut", "poisoned"):
    assert worst > 0
print(count)
"""


WRITES = """
import ctypes, errno, os, sys
from pathlib import Path
from native.support import Memory, random_bytes
from stio import native
from stio.native import Failure, Ranges, Transfer

shim = ctypes.CDLL(None)
folder, way, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
SIZE = (10 << 20) + 77
PARTS = [(0, 5000), (5000, 3 << 20), ((3 << 20) + 5000, 700), (4 << 20, (5 << 20) + 333), (SIZE - 10, 10)]
data = random_bytes(SIZE)
memory = Memory(SIZE, 0 if way == "direct" else 512)
memory.fill(data)
old = b"o" * SIZE

def is_mixture(found, expected):
    # Whether each byte is the new or the old one; compared in blocks, as most of them are of one kind.
    for k in range(0, len(found), 4096):
        one, new = found[k : k + 4096], expected[k : k + 4096]
        if one not in (new, old[: len(one)]) and not all(a in (b, old[0]) for a, b in zip(one, new)):
            return False
    return True

def once(at):
    # Hit call number `at`, or all of them (0); return how many calls there were, and what failed.
    path = folder / "faulty"
    path.write_bytes(old)
    fd, direct_fd = os.open(path, os.O_WRONLY), os.open(path, os.O_WRONLY | os.O_DIRECT)
    ranges, transfer = Ranges(), Transfer(max_chunks=4)
    for group, (offset, nbytes) in enumerate(PARTS):
        ranges.host_to_file(group, memory.address + offset, nbytes, fd, direct_fd if way == "direct" else -1, offset)
    before = shim.shim_hits()
    os.environ["SHIM_MODES"] = mode
    os.environ.pop("SHIM_AT", None)
    if at:
        os.environ["SHIM_AT"] = str(before + at)
    transfer.add(ranges)
    done, failed = set(), None
    try:
        while len(done) < len(PARTS):
            found = transfer.take(20)
            assert found
            done |= {one.group for one in found}
    except Failure as failure:
        failed = failure
    transfer.end()
    os.environ["SHIM_MODES"] = ""
    count = shim.shim_hits() - before
    os.close(fd), os.close(direct_fd)
    written, end = path.read_bytes(), 0
    assert len(written) == SIZE
    for group, (offset, nbytes) in enumerate(PARTS):
        found, expected = written[offset : offset + nbytes], data[offset : offset + nbytes]
        if group in done:
            assert found == expected, (at, group)
        else:
            assert is_mixture(found, expected), (at, group)
        assert written[end : offset] == old[end : offset], "bytes of others"
        end = offset + nbytes
    return count, failed

def require(failed):
    if mode in ("broken", "full", "nothing"):
        code = {"broken": errno.EIO, "full": errno.ENOSPC, "nothing": errno.EIO}[mode]
        assert (failed.kind, failed.code, failed.populates) == (native.READING, code, False), failed and vars(failed)
        offset, nbytes = PARTS[failed.group]
        assert offset <= failed.offset < offset + nbytes and 0 < failed.nbytes <= nbytes
    else:
        assert failed is None, vars(failed)

mode, wanted = "", mode
count, failed = once(10**9)
assert failed is None and count >= 5
if way == "direct":
    assert shim.shim_writes(1) >= 2, "whole pages go past the page cache"
    assert shim.shim_writebacks() == 0
else:
    assert shim.shim_writes(1) == 0
    assert shim.shim_writebacks() == 1, "of the one that is long"
mode = wanted
for at in range(1, count + 1):
    require(once(at)[1])
if mode != "interrupted":  # without end
    require(once(0)[1])
print(count)
"""


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["direct", "buffered"])
@pytest.mark.parametrize(
    "mode", ["short", "interrupted", "broken", "full", "nothing", "torn", "refused", "refused unsupported"]
)
def test_each_fault_at_each_write(way: str, mode: str, preloaded: Path, tmp_path: Path) -> None:
    _require_direct(tmp_path)
    done = run_script(WRITES, tmp_path, way, mode, seconds=100, LD_PRELOAD=str(preloaded))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= 5


SLOW = """
import ctypes, os, sys
from pathlib import Path
from native.support import Memory, random_bytes
from stio import native
from stio.native import Ranges, Transfer

shim = ctypes.CDLL(None)
native.set_threads(16)
os.environ["SHIM_MODES"] = "slow"
data = random_bytes(2 << 20)
memory, target = Memory(len(data)), Memory(1 << 20)
memory.fill(data)
path = Path(sys.argv[1]) / "faulty"
path.write_bytes(bytes(60 << 20))
fd = os.open(path, os.O_WRONLY)
most = int(sys.argv[2])
transfer, warm = Transfer(max_chunks=most), Transfer()
ranges = Ranges()
for k in range(200):
    ranges.host_to_host(k, memory.address, 2 << 20, memory.address)
warm.add(ranges)  # all threads are there
done = []
while len(done) < 200:
    done += warm.take(20)
ranges = Ranges()
for k in range(30):
    ranges.host_to_file(k, memory.address, len(data), fd, -1, 2 * k << 20)
transfer.add(ranges)
ranges = Ranges()
ranges.host_to_host(30, memory.address, target.nbytes, target.address)  # not behind the writes
transfer.add(ranges)
done = []
while len(done) < 31:
    done += transfer.take(20)
transfer.end()
assert path.read_bytes() == data * 30
assert target[:] == data[: target.nbytes]
order = [one.group for one in done]
assert sorted(order) == list(range(31))
assert [one.group for one in sorted(done, key=lambda one: one.started) if one.group < 30] == list(range(30))
assert order.index(30) < 3 * most, order
assert shim.shim_most_writes() == most, shim.shim_most_writes()
"""


@pytest.mark.matrix
@pytest.mark.parametrize("most", [1, 3])
def test_so_many_writes_are_under_way_and_copies_pass_them(most: int, preloaded: Path, tmp_path: Path) -> None:
    done = run_script(SLOW, tmp_path, most, LD_PRELOAD=str(preloaded))
    assert done.returncode == 0, done.stdout + done.stderr


STANDING = """
import os, sys, time
from pathlib import Path
from native.support import File, Memory, take_all
from stio import native
from stio.native import Ranges, Transfer

folder, MIB = Path(sys.argv[1]), 1 << 20
native.set_threads(6)
faulty, whole = File(folder / "faulty", 64 * MIB), File(folder / "whole", MIB)
memory, copied, out = Memory(64 * MIB), Memory(MIB), os.open(folder / "out", os.O_RDWR | os.O_CREAT)

def run(describe):
    transfer, ranges = Transfer(), Ranges()
    describe(ranges)
    began = time.monotonic()
    transfer.add(ranges)
    return transfer, began

stands, _ = run(lambda ranges: ranges.file_to_host(0, faulty.fd, -1, 0, 64 * MIB, memory.address))
time.sleep(0.2)
assert native.num_threads() == 6
for describe in (
    lambda ranges: ranges.host_to_host(0, copied.address, 4096, copied.address + 8192),
    lambda ranges: ranges.file_to_host(0, whole.fd, -1, 0, MIB, copied.address),
    lambda ranges: ranges.host_to_file(0, copied.address, MIB, out, -1, 0),
):
    transfer, began = run(describe)
    take_all(transfer, 1)
    assert time.monotonic() - began < 1, time.monotonic() - began
    transfer.end()
assert copied[:] == whole.bytes and os.pread(out, MIB, 0) == whole.bytes
assert 6 < native.num_threads() <= 8, native.num_threads()
began = time.monotonic()
stands.end()
assert time.monotonic() - began < 4
"""


@pytest.mark.slow
def test_a_disk_that_stands_still_stops_no_other_transfer(preloaded: Path, tmp_path: Path) -> None:
    """Copies in memory, and files of other disks, move beside it."""
    done = run_script(STANDING, tmp_path, LD_PRELOAD=str(preloaded), SHIM_MODES="standing")
    assert done.returncode == 0, done.stdout + done.stderr


def _require_direct(folder: Path) -> None:
    (folder / "probe").touch()
    try:
        os.close(os.open(folder / "probe", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this filesystem has no direct I/O")


@pytest.fixture(scope="module")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_shim(tmp_path_factory.mktemp("shim"))


READS = ["short", "interrupted", "broken", "cut"]


MODES = ["fault", "again", "oldkernel", "poisoned", "interrupted", "cut", "broken"]  # of populating
CASES = [(way, mode) for way in ("host", "direct", "device", "direct device") for mode in READS]
CASES += [("mapping", mode) for mode in MODES]
QUICK = [*CASES[4:8], *CASES[12:16], ("mapping", "fault"), ("mapping", "cut")]


@pytest.mark.matrix
@pytest.mark.costly("a fault at each call")
@pytest.mark.parametrize(
    ("way", "mode"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_each_fault_at_each_call(way: str, mode: str, preloaded: Path, device_library: Path, tmp_path: Path) -> None:
    if way.startswith("direct"):
        _require_direct(tmp_path)
    done = run_script(SCRIPT, device_library, tmp_path, way, mode, seconds=100, LD_PRELOAD=str(preloaded))
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 2
