"""What the tests of the engine share: memory with an address, files with known bytes, simulated devices."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

from stio.native import Done, Driver, Ring, Transfer

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PYTHON_PATH = os.pathsep.join(
    [str(REPOSITORY), str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
ENGINE_SOURCES = sorted(map(str, (REPOSITORY / "stio" / "native").glob("*.c")))
POISON = 0xA5
GUARD_BYTES = 4096
PATIENCE_SECONDS = 20.0


def compiled(target: Path, source: str, *flags: str) -> Path:
    """Compile a program or a library of this directory."""
    command = ["cc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-pthread", *flags, "-o", str(target)]
    done = subprocess.run([*command, str(HERE / source), "-ldl"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return target


class Memory:
    """Memory that begins with a page, between two pages that must not change."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self.nbytes = nbytes
        self._start = GUARD_BYTES + shift
        self._map = mmap.mmap(-1, nbytes + 2 * GUARD_BYTES + shift)
        self._map.write(bytes([POISON]) * len(self._map))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + self._start
        """Address of its first byte."""

    def __getitem__(self, part: slice) -> bytes:
        low, high, _ = part.indices(self.nbytes)
        return self._map[self._start + low : self._start + high]

    def fill(self, data: bytes) -> None:
        """Set its first bytes."""
        self.fill_at(0, data)

    def fill_at(self, at: int, data: bytes) -> None:
        """Set some of its bytes."""
        assert at + len(data) <= self.nbytes
        self._map[self._start + at : self._start + at + len(data)] = data

    def require_guards(self) -> None:
        behind = self._map[self._start + self.nbytes :]
        assert set(self._map[: self._start]) | set(behind) == {POISON}


def random_bytes(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class OpenedFile:
    """A new file, open with and without O_DIRECT (-1 where the filesystem has none)."""

    def __init__(self, path: Path, data: bytes, flags: int) -> None:
        self.path = path
        path.write_bytes(data)
        self.fd = os.open(path, flags)
        try:
            self.direct_fd = os.open(path, flags | os.O_DIRECT)
        except OSError:
            self.direct_fd = -1

    def close(self) -> None:
        os.close(self.fd)
        if self.direct_fd >= 0:
            os.close(self.direct_fd)


class File(OpenedFile):
    """A file of random bytes to read."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.bytes = random_bytes(nbytes)
        super().__init__(path, self.bytes, os.O_RDONLY)


class Device:
    """A simulated device, and its ring."""

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        self._library = library
        self.pointer: int = library.fake_device(number)
        self.driver = Driver(library.fake_table(), self.pointer)
        self.ring = self._new_ring()

    def _new_ring(self) -> Ring:
        return Ring(self.driver, self.pointer, None)

    def renew(self) -> None:
        """Replace the ring, which may have failed."""
        self.ring.release()
        self.ring = self._new_ring()

    def pause(self) -> None:
        """Let nothing run that is queued."""
        self._library.fake_pause(self.pointer, True)

    def resume(self) -> None:
        self._library.fake_pause(self.pointer, False)

    def step(self, count: int) -> None:
        """Let so many operations run although it is paused."""
        self._library.fake_step(self.pointer, count)

    def hold_unpin(self, is_held: bool) -> None:
        """Let calls that unpin memory wait, or go on."""
        self._library.fake_hold_unpin(is_held)

    @property
    def unpin_waits(self) -> bool:
        """Whether a call that unpins memory waits."""
        return bool(self._library.fake_unpin_waits())

    def delay(self, max_us: int) -> None:
        """Delay each operation by up to so many microseconds."""
        self._library.fake_delay(self.pointer, max_us)

    def fail(self, *, copy: int = 0, event: int = 0, creation: int = 0, context: int = 0, pin: bool = False) -> None:
        """Let the n-th call of each function from now on fail; 0: none."""
        self._library.fake_fail(self.pointer, copy, event, creation, context, pin)

    @property
    def num_copies(self) -> int:
        """How many copies were ever queued."""
        return int(self._library.fake_num_copies(self.pointer))

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are pinned now, of all devices."""
        return int(self._library.fake_pinned_bytes())

    def refers_to(self, memory: Memory) -> bool:
        """Return whether a copy that has not ended reads or writes this memory."""
        return bool(self._library.fake_refers(self.pointer, memory.address, memory.nbytes))

    def reset(self) -> None:
        self.hold_unpin(False)
        self.resume()
        self.delay(0)
        self.fail()
        self.renew()


def devices_of(path: Path) -> list[Device]:
    library = ctypes.CDLL(str(path))
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("fake_table", pointer, []),
        ("fake_device", pointer, [ctypes.c_int]),
        ("fake_hold_unpin", None, [ctypes.c_bool]),
        ("fake_unpin_waits", ctypes.c_bool, []),
        ("fake_pause", None, [pointer, ctypes.c_bool]),
        ("fake_step", None, [pointer, ctypes.c_int]),
        ("fake_fail", None, [pointer, *[ctypes.c_int] * 4, ctypes.c_bool]),
        ("fake_delay", None, [pointer, ctypes.c_uint]),
        ("fake_num_copies", ctypes.c_uint64, [pointer]),
        ("fake_refers", ctypes.c_bool, [pointer, pointer, ctypes.c_size_t]),
        ("fake_pinned_bytes", ctypes.c_int64, []),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return [Device(library, number) for number in range(2)]


def take_all(transfer: Transfer, count: int) -> list[Done]:
    """Take so many groups."""
    done: list[Done] = []
    while len(done) < count:
        found = transfer.take(PATIENCE_SECONDS)
        assert found, f"{len(done)} of {count} groups are complete"
        done += found
    assert len(done) == count == len({one.group for one in done})
    return done


def engine_threads() -> list[Path]:
    """Return the directories in /proc of the engine's threads."""
    tasks = Path("/proc/self/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text().startswith("stio-")]


def run_script(
    body: str, *arguments: object, seconds: float = 60.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, a real interpreter without torch: some need LD_PRELOAD, some end badly."""
    return subprocess.run(
        [sys.executable, "-c", body, *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
