"""A small ext4 in a file, and what a power cut would leave of it after each system call of a save.

The loop device writes through the page cache of the file's own filesystem, so a copy of the file holds what has reached
the device, and nothing that is still in memory above it: that is the power cut. Mounting the copy replays the journal.
"""

from __future__ import annotations

import functools
import hashlib
import os
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


def why_not() -> str | None:
    """Return why there can be no loop mounts here, None if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root"
    if not os.path.exists("/dev/loop-control"):
        return "needs loop devices"
    return None


def make_image(path: Path, nbytes: int = IMAGE_BYTES) -> Path:
    """Make an empty ext4 in a file; nothing of it is written later by the kernel's own will."""
    path.touch()
    os.truncate(path, nbytes)
    lazy = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", "-b", "4096", "-J", "size=4", "-E", lazy, path], check=True)
    return path


@contextmanager
def mounted(image: Path, where: Path) -> Iterator[Path]:
    """Mount an image on a loop device."""
    where.mkdir(exist_ok=True)
    # The journal's own clock would make states durable that no fsync asked for, and a negative control pass by luck.
    subprocess.run(["mount", "-t", "ext4", "-o", "loop,commit=300", image, where], check=True)
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
    """

    def __init__(self, image: Path, directory: Path, *, lie: tuple[str, ...] = ()) -> None:
        self._image, self._directory, self._lie = image, directory, lie
        self._lock = threading.RLock()
        self._last = b""
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
                    return function(*arguments, **keywords)
                finally:
                    self.num_calls += 1
                    self.take(f"call {self.num_calls}, {name}{arguments[:2]}")

        return call

    def take(self, after: str, *, acknowledged: bool = False) -> None:
        """Copy the image now, if it changed."""
        pieces = list(pieces_of(self._image))
        digest = hashlib.sha256()
        for offset, piece in pieces:
            digest.update(offset.to_bytes(8, "little") + piece)
        if digest.digest() == self._last and not acknowledged:
            return
        self._last = digest.digest()
        target = self._directory / f"cut-{len(self.cuts)}"
        with open(target, "wb") as file:
            for offset, piece in pieces:
                file.seek(offset)
                file.write(piece)
            file.truncate(IMAGE_BYTES)
        self.cuts.append(Cut(target, after, acknowledged))


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
