"""A small filesystem in a file, and what a power cut would leave of it after each system call of a save.

The loop device writes through the page cache of the file's own filesystem, so a copy of the file holds what has reached
the device, and nothing that is still in memory above it: that is the power cut. Mounting the copy replays the journal.
A device may have a cache of its own, which only a flush empties: then a part of what was written since the last flush
is lost, too (`losses`).
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stio.storage.commit import syscalls as calls
from tests.storage.transactions import FALLIBLE, INFALLIBLE

IMAGE_BYTES = 32 << 20
_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Filesystem:
    """How a filesystem is made and mounted, so that the kernel writes nothing of it at times of its own.

    The clock of a journal would make states durable that no fsync asked for, and a negative control pass by luck.
    """

    make: tuple[str, ...]
    """Command before the name of the image."""
    options: str
    """Options of the mount."""
    image_bytes: int = IMAGE_BYTES


FILESYSTEMS = {
    "ext4": Filesystem(
        ("mkfs.ext4", "-q", "-F", "-m0", "-b4096", "-Jsize=4", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
        "loop,commit=300",
    ),
    # Below 300 MB it is made for tests only. Its journal is written 30 s after a change, which is later than any cut.
    "xfs": Filesystem(("mkfs.xfs", "-q", "-f", "--unsupported", "-lsize=8m"), "loop,nouuid", 64 << 20),
    "btrfs": Filesystem(("mkfs.btrfs", "-q", "-f", "--mixed"), "loop,commit=300", 64 << 20),
}


def why_not(filesystem: str = "ext4") -> str | None:
    """Return why there can be no loop mounts here, None if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices"
    if shutil.which(FILESYSTEMS[filesystem].make[0]) is None:
        return f"needs {FILESYSTEMS[filesystem].make[0]}"
    if filesystem not in Path("/proc/filesystems").read_text().split():
        return f"the kernel has no {filesystem}"
    return None


def make_image(path: Path, nbytes: int = IMAGE_BYTES, filesystem: str = "ext4") -> Path:
    """Make an empty filesystem in a file."""
    path.touch()
    os.truncate(path, nbytes)
    subprocess.run([*FILESYSTEMS[filesystem].make, path], check=True, capture_output=True)
    return path


@contextmanager
def mounted(image: Path, where: Path, filesystem: str = "ext4") -> Iterator[Path]:
    """Mount an image on a loop device."""
    where.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", filesystem, "-o", FILESYSTEMS[filesystem].options, image, where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


@dataclass(frozen=True, slots=True)
class Cut:
    """What a power cut would have left at one moment."""

    image: Path
    """Copy of the filesystem."""
    after: str
    """The call that was the last."""
    acknowledged: bool
    """Whether the save had returned."""


class Camera:
    """Takes a copy of an image after each call of `stio.storage.commit.syscalls`, where it differs from the last one.

    Args:
        image: The file below the filesystem.
        directory: Where the copies go.
        lie: Names of calls that do nothing, for negative controls.
        losses: Source of random choices for further copies, of a device with a cache: some of the blocks that were
            written since the last flush are as they were at that flush. None: there are no such copies.
    """

    def __init__(
        self, image: Path, directory: Path, *, lie: tuple[str, ...] = (), losses: random.Random | None = None
    ) -> None:
        self._image, self._directory, self._lie, self._losses = image, directory, lie, losses
        self._lock = threading.RLock()
        self._last: dict[int, bytes] = {}
        self._flushed = blocks_of(image)
        self.num_calls = 0
        """Calls that were watched."""
        self.cuts: list[Cut] = []
        """Copies that were taken."""

    def watch(self, patch: Any) -> None:
        """Stand between a save and the system (`patch`: pytest's monkeypatch)."""
        for name in FALLIBLE + INFALLIBLE:
            patch.setattr(calls, name, self._watched(name, getattr(calls, name)))

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:  # one call at a time, so that none is cut in the middle
                if name in self._lie:
                    return None
                try:
                    result = function(*arguments, **keywords)
                    if self._losses and name in ("fsync", "sync_directory"):
                        self._flushed = blocks_of(self._image)
                    return result
                finally:
                    self.num_calls += 1
                    self.take(f"call {self.num_calls}, {name}{arguments[:2]}")

        return call

    def take(self, after: str, *, acknowledged: bool = False) -> None:
        """Copy the image now, if it changed."""
        blocks = blocks_of(self._image)
        if blocks == self._last and not acknowledged:
            return
        self._last = blocks
        self._store(blocks, after, acknowledged)
        if self._losses is None:
            return
        unflushed = [k for k, block in blocks.items() if self._flushed.get(k) != block]
        share = self._losses.choice((0.1, 0.5, 1.0))
        lost = [k for k in unflushed if self._losses.random() < share]
        if lost:
            before = {k: self._flushed.get(k, bytes(_BLOCK_BYTES)) for k in lost}
            after += f", {len(lost)} of {len(unflushed)} blocks are lost that were not flushed"
            self._store({**blocks, **before}, after, acknowledged)

    def _store(self, blocks: dict[int, bytes], after: str, acknowledged: bool) -> None:
        target = self._directory / f"cut-{len(self.cuts)}"
        with open(target, "wb") as file:
            for k, block in blocks.items():
                file.seek(k * _BLOCK_BYTES)
                file.write(block)
            file.truncate(self._image.stat().st_size)
        self.cuts.append(Cut(target, after, acknowledged))


def blocks_of(path: Path) -> dict[int, bytes]:
    """Return a sparse file's blocks that are data, by their numbers."""
    return {
        (offset + at) // _BLOCK_BYTES: piece[at : at + _BLOCK_BYTES]
        for offset, piece in pieces_of(path)
        for at in range(0, len(piece), _BLOCK_BYTES)
    }


def pieces_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Give a sparse file's data with their offsets, through the page cache, waiting for nothing."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        at = 0
        while at < end:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: a hole up to the end
                return
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            yield start, os.pread(file.fileno(), at - start, start)
