"""A stand-in for another version of stio: takes the locks of the on-disk protocol, and nothing of stio is imported.

Runs as a process of its own (`python -I -S other_version.py`). It reads one request in JSON a line and answers in
one. What it does is the protocol that all versions share; the numbers stand in README.md too.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]

files: dict[str, int] = {}
"""Directories whose lock file is locked, with the descriptors of those files."""

locks: dict[str, int] = {}
"""Staging directories whose lock is held, with the descriptors of their lock files."""


def try_lock(fd: int) -> bool:
    # 1. Every lock is an exclusive flock(2) on a descriptor opened for it alone, asked for without waiting. Not
    #    fcntl(F_SETLK): those locks do not exclude a flock, and end when any descriptor of the file is closed.
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def take_lock_file(path: str) -> Answer:
    """Take the lock that a save holds while it publishes, and a clean-up while it finishes or undoes a save."""
    # 2. Of a checkpoint's directory that is there it is that directory's; of a single file that of the one that holds
    #    it. A first save into a directory that is not there takes none: its commit is a rename that fails where
    #    something has the name (RENAME_NOREPLACE).
    # It is on the file `.stio-lock` in that directory, whose maker writes into it which process it is. The owner removes
    # the file before it releases the lock, so the next one checks that the name is still that of the locked file.
    name = os.path.join(path, ".stio-lock")
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if not try_lock(fd) or not os.path.samestat(os.fstat(fd), os.stat(name)):
        os.close(fd)
        return {"taken": False}
    os.write(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    files[path] = fd
    return {"taken": True}


def drop_lock_file(path: str) -> Answer:
    os.unlink(os.path.join(path, ".stio-lock"))
    os.close(files.pop(path))
    return {}


def stage(path: str, save_id: str) -> Answer:
    """Make a staging directory as a save does that has begun to write, and hold its lock."""
    # 3. Its name is `.stio-` and 8 to 32 (today 10) lower-case hexadecimal digits. It stands in the destination's
    #    directory if that is there, else beside the destination. Its mode is 0700.
    name = os.path.join(path, f".stio-{save_id}")
    os.mkdir(name, 0o700)
    # 4. The file `lock` in it is created exclusively, and locked from then on until its owner is done with the
    #    directory. Whoever gets this lock owns the directory; without the file it is left alone for 60 seconds.
    fd = os.open(os.path.join(name, "lock"), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    assert try_lock(fd)
    # 5. It says in JSON whose it is, for filesystems whose locks do not reach all hosts. There a directory is dead
    #    when this file is 24 hours old, and its process is of another host or boot, or does not exist.
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    owner = {"pid": os.getpid(), "boot": boot, "host": socket.gethostname(), "time": time.time()}
    os.write(fd, json.dumps(owner).encode())
    # 6. New files are in `new`; a record, once there is one, is `intent.json` with an integer "version". A reader that
    #    does not know that number leaves the whole directory alone.
    os.mkdir(os.path.join(name, "new"))
    with open(os.path.join(name, "new", "model.safetensors"), "wb") as file:
        file.write(b"of another version")
    locks[name] = fd
    return {"staging": name}


def try_staging(path: str) -> Answer:
    """Ask for the lock of another save's staging directory, as a cleanup does; release it at once."""
    fd = os.open(os.path.join(path, "lock"), os.O_RDWR | os.O_CLOEXEC)
    try:
        return {"taken": try_lock(fd), "owner": json.loads(os.pread(fd, 65536, 0))}
    finally:
        os.close(fd)


def publish(path: str, files: dict[str, str]) -> Answer:
    """Put files into a directory as a save does: all under the directory's lock, the last one is the commit."""
    # 7. Each file is renamed into its place; the index comes last.
    answer = take_lock_file(path)
    if answer["taken"]:
        for name, source in files.items():
            os.rename(source, os.path.join(path, name))
        drop_lock_file(path)
    return answer


def make_directory(path: str, source: str) -> Answer:
    """Publish a directory that was not there."""
    os.rename(source, path)
    return {}


def drop_all() -> Answer:
    for held in (files, locks):
        while held:
            os.close(held.popitem()[1])
    return {}


def main() -> None:
    assert not any(name.partition(".")[0] == "stio" for name in sys.modules)
    calls: dict[str, Callable[..., Answer]] = {
        call.__name__: call
        for call in (
            take_lock_file,
            drop_lock_file,
            drop_all,
            stage,
            try_staging,
            publish,
            make_directory,
        )
    }
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(calls[request.pop("call")](**request)), flush=True)


if __name__ == "__main__":
    main()
