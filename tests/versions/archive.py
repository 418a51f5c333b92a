"""Directories with files of stio as archives, with what git does not keep, and without what belongs to one machine.

An archive is a tar file under xz with all that a recovery looks at: names, contents, modes, times to the nanosecond.
The lock files of staging directories name a host, a boot, a process and a time. Placeholders stand for those in an archive,
and `unpack` puts in what an `Owner` says, so that one archive serves for a dead process of this host and of another
one, for a young and for an old directory.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import socket
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

FILES = Path(__file__).parent / "files"
"""A directory for each version, with its archives and one `scenarios.json`."""

NEWEST = max((path.name for path in FILES.iterdir()), key=Version) if FILES.is_dir() else ""
"""The newest version that has archives."""

STAGING = re.compile(r"\.stio-[0-9a-f]{10}")
"""Name of a staging directory."""

LOCK = "lock"
"""File in it that its owner holds locked, and that says in JSON which process that is."""

OLD_NS = 1_700_000_000_123_456_789
"""Time of change, in archives, of what stood there before the last save began. Records compare it to the nanosecond."""

NEW_NS = 1_700_000_100_987_654_321
"""Time of change, in archives, of what the last save wrote."""

_PLACEHOLDERS = {"pid": 0, "boot": "BOOT", "host": "HOST", "time": 0.0}
_SPEEDS = re.compile(rb'("train_(?:runtime|samples_per_second|steps_per_second)":) [0-9.e+-]+')
_NO_PROCESS = 1 << 22
"""The kernel's largest limit of process numbers: no process has this one."""


def boot_id() -> str:
    """Return what `/proc` says of this start of the machine, as lock files hold it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Owner:
    """Which process the lock files of an unpacked archive name, and how old its staging directories are."""

    host: str = ""
    """Name of its host, empty for this one."""
    boot: str = ""
    """Start of that machine, empty for this one."""
    pid: int = _NO_PROCESS
    """Number of the process; by default there is none of that number."""
    age_seconds: float = 120.0
    """Age of staging directories and of the lock files in them. Without a lock file they are kept for a minute."""

    def text(self) -> bytes:
        """Return the content of a lock file."""
        owner = {
            "pid": self.pid,
            "boot": self.boot or boot_id(),
            "host": self.host or socket.gethostname(),
            "time": time.time() - self.age_seconds,
        }
        return json.dumps(owner).encode()


DEAD = Owner()
"""A process of this host that died two minutes ago."""


# Packing.


def pack(root: Path) -> bytes:
    """Return an archive of all that is below a directory. Equal trees give equal bytes of the tar inside.

    Times of change become `OLD_NS` or `NEW_NS`, in records of saves as well; see `settle`.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            found = path.lstat()
            member = tarfile.TarInfo(path.relative_to(root).as_posix())
            member.mode = found.st_mode & 0o777
            # As text: a float would lose the last digits.
            member.pax_headers = {"mtime": f"{found.st_mtime_ns // 10**9}.{found.st_mtime_ns % 10**9:09d}"}
            if path.is_dir():
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            else:
                assert path.is_file() and not path.is_symlink(), path
                data = path.read_bytes()
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def settle(root: Path, *, before: bool = False) -> None:
    """Replace what depends on the machine and the moment below a directory, so that it is the same at every run.

    Args:
        root: The directory.
        before: Whether it holds what stands there before the save of the scenario.
    """
    for path in sorted(root.rglob("*"), reverse=True):  # what is in a directory comes before it
        found = path.stat()
        wanted = OLD_NS if before or (found.st_mtime_ns == OLD_NS and path.is_file()) else NEW_NS
        if not before and path.is_file():
            data = path.read_bytes()
            if path.name == LOCK and data and STAGING.fullmatch(path.parent.name.replace("trash-", "")):
                assert json.loads(data).keys() == _PLACEHOLDERS.keys(), data
                path.write_bytes(json.dumps(_PLACEHOLDERS).encode())
            elif path.name.startswith("intent.json"):
                # Nanoseconds are the only numbers of so many digits.
                path.write_bytes(re.sub(rb"\b\d{19}\b", _settled_time, data))
            elif path.name == "trainer_state.json":
                path.write_bytes(_SPEEDS.sub(rb"\1 0.0", data))
        os.utime(path, ns=(wanted, wanted))


def _settled_time(found: re.Match[bytes]) -> bytes:
    return found[0] if int(found[0]) == OLD_NS else b"%d" % NEW_NS


# Unpacking.


def unpack(archive: Path, into: Path, owner: Owner = DEAD) -> Path:
    """Unpack an archive into an empty directory, which is returned.

    Args:
        archive: Made by `pack`.
        into: The directory.
        owner: Put into lock files, but not into those that are empty: their owner died before it wrote.
    """
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive.read_bytes()))) as source:
        members = source.getmembers()
        for member in members:
            path = into / member.name
            if member.isdir():
                path.mkdir()
            else:
                file = source.extractfile(member)
                assert file is not None
                data = file.read()
                path.write_bytes(owner.text() if path.name == LOCK and data else data)
    then = time.time_ns() - int(owner.age_seconds * 1e9)
    for member in reversed(members):  # a directory's time is set after all that is in it was made
        path = into / member.name
        seconds, _, nanoseconds = member.pax_headers["mtime"].partition(".")
        when = int(seconds) * 10**9 + int(nanoseconds)
        if STAGING.fullmatch(path.name) or path.name == LOCK:
            when = then
        path.chmod(member.mode)
        os.utime(path, ns=(when, when))
    return into


def contents(archive: Path) -> dict[str, bytes | None]:
    """Return what an archive holds by name: the bytes of files, None for directories."""
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(archive.read_bytes()))) as source:
        found: dict[str, bytes | None] = {}
        for member in source.getmembers():
            file = source.extractfile(member)
            found[member.name] = None if file is None else file.read()
        return found
