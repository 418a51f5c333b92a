"""What the tests of faulty saves share: generations of tensors, a directory for two users, a commit that is held."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from crash.zygote import Zygote
from support import eventually

from stio import sync
from stio.errors import CheckpointNotFoundError

Tensors = dict[str, torch.Tensor]

NOBODY = 65534
INDEX = "model.safetensors.index.json"
SHARDED = 100
"""A `max_shard_size` that gives `generation` two shards."""


def generation(number: float) -> Tensors:
    """Return two small tensors that hold a number in all elements."""
    return {"a": torch.full((20,), float(number)), "b": torch.full((20,), float(number))}


def require_generation(path: Path, number: float) -> None:
    """Require that a whole generation stands at a path; what is not there fails by an `AssertionError` too."""
    try:
        found = sync.load(path)
    except CheckpointNotFoundError as error:
        raise AssertionError(str(error)) from error
    assert found.keys() == generation(number).keys()
    assert all(bool((tensor == number).all()) for tensor in found.values()), found


def leftovers(directory: Path) -> list[str]:
    """Return the names of stio's own working directories below a directory."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob(".stio-*"))


@contextmanager
def public_directory(owner: int | None = None) -> Iterator[Path]:
    """Make a directory that all users can reach: pytest's own are closed to other users."""
    directory = Path(tempfile.mkdtemp(prefix="stio-faults-"))
    directory.chmod(0o755)
    if owner is not None and os.geteuid() == 0:
        os.chown(directory, owner, owner)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


class HeldRename:
    """Holds the rename onto one name, the last step of a commit; it stands for `os.rename` and `os.replace`.

    Args:
        name: The file name that the rename is held for.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._rename = os.rename
        self.reached = threading.Event()
        """Set once the rename was called."""
        self.opened = threading.Event()
        """Set to let it go on."""

    def __call__(
        self, source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        if os.path.basename(os.fsdecode(target)) == self._name and not self.reached.is_set():
            self.reached.set()
            assert self.opened.wait(20), "the rename was never let go on"
        self._rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)


# POSIX access control lists, in the form of the extended attribute that holds one (acl(5), linux/posix_acl_xattr.h).

ACCESS_ACL = "system.posix_acl_access"
DEFAULT_ACL = "system.posix_acl_default"
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 1, 2, 4, 8, 16, 32
_NO_ID = 0xFFFFFFFF


def acl(*entries: tuple[int, int, int | None]) -> bytes:
    """Return an access control list: tag, permissions and id of each entry."""
    packed = (struct.pack("<HHI", tag, rights, _NO_ID if number is None else number) for tag, rights, number in entries)
    return struct.pack("<I", 2) + b"".join(packed)


def group_rights(path: Path) -> int:
    """Return what the owning group may do: with a list the mode's group bits are the mask, and no answer."""
    try:
        raw = os.getxattr(path, ACCESS_ACL)
    except OSError:
        return path.stat().st_mode >> 3 & 7
    entries = {tag: rights for tag, rights, _ in struct.iter_unpack("<HHI", raw[4:])}
    return entries[GROUP_OBJ] & entries.get(MASK, 7)


# Other processes in the way, for scripts of the `zygote`: forked there, while no save is under way.


def become_nobody() -> None:
    """Give root's rights up, for good."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def saver_that_gets(number: int, where: Path) -> int:
    """Fork a process that saves, and sends itself a signal in the last step of its commit; return it, stopped or dead.

    Args:
        number: SIGSTOP or SIGKILL.
        where: Destination: a file, or a directory with an index.
    """
    name = where.name if where.suffix == ".safetensors" else INDEX
    pid = os.fork()
    if not pid:
        plain = os.rename

        def rename(source: Any, target: Any, **directories: Any) -> None:
            if os.path.basename(os.fsdecode(target)) == name:
                os.kill(os.getpid(), number)
                time.sleep(60)  # waits: the signal stops this thread some steps later, not to rename until then
            plain(source, target, **directories)

        os.rename = os.replace = rename  # type: ignore[assignment]
        try:
            sync.save(generation(8), where, **({} if where.suffix else {"max_shard_size": SHARDED}))
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, os.WUNTRACED)
    found = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)
    assert found == number, f"{status}: no call of os.rename or os.replace put {name} in its place"
    return pid


def leave_behind(count: int, where: Path) -> Callable[[], None]:
    """Fork savers that die in the last step of their commit.

    Returns:
        What makes their staging directories appear: until then they have other names, or the next saver would remove
        them.
    """
    hidden = []
    for _ in range(count):
        saver_that_gets(signal.SIGKILL, where)
        for found in where.parent.rglob(".stio-*"):
            if found.is_dir():
                hidden.append((found.rename(found.with_name(f"hidden{found.name}")), found))

    def appear() -> None:
        for now, then in hidden:
            now.rename(then)

    return appear


def reader_with_locks(directory: Path) -> int:
    """Fork a process without rights to write that locks all it can open below a directory, again and again."""
    source, target = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        become_nobody()
        while os.getppid() == parent:
            for path in (str(directory), *glob.iglob(f"{directory}/**", recursive=True, include_hidden=True)):
                with suppress(OSError):
                    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held from now on: the descriptor stays open
                    except BlockingIOError:
                        os.close(fd)
            if target >= 0:
                os.write(target, b"1")
                os.close(target)
                target = -1
            time.sleep(0.001)  # it must not take a processor from the saver
        os._exit(0)
    os.close(target)
    assert os.read(source, 1) == b"1"
    os.close(source)
    return pid


def end(pid: int) -> None:
    """Kill a process that a script has forked."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


# Scripts in processes of their own.

SCRIPT = """
import asyncio, json, logging, os, signal, sys, threading, time
from collections.abc import Mapping
from pathlib import Path
import torch
import stio
from stio import sync
from support import eventually
from faults.save_helpers import *
"""
"""Begin of a script: its imports."""


def script(code: str) -> str:
    """Return a script that begins with `SCRIPT`."""
    return SCRIPT + textwrap.dedent(code)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a script that had to end in time."""

    ended: bool
    """Whether it did; if not it was killed."""
    stdout: str
    """What it printed."""
    stderr: str
    """Standard error."""


MOST_SECONDS = 40.0
"""How long scripts may take together, on a busy machine."""

TOGETHER = """
import warnings
from fakes import MemoryDestination
warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which may be on their last steps
directory = Path(sys.argv[1])
scripts = json.loads((directory / "scripts").read_text())
sync.save(generation(0), MemoryDestination())  # imports what a save needs
asyncio.run(asyncio.sleep(0))
pids = {}
for k, code in enumerate(scripts):
    where = directory / f"script{k}"  # a number alone would be that of a step
    where.mkdir(mode=0o755)
    pid = os.fork()
    if not pid:
        break
    pids[pid] = where
if pids and pid:
    code = "finish(pids, float(sys.argv[2]))"
else:
    os.setpgrp()
    redirect(where)
exec(code)
"""
"""Runs each script in a fork of its own; in each the main module ends as any does, and exit handlers run."""


def run_together(
    zygote: Zygote, scripts: Mapping[str, str], directory: Path, idle_seconds: float
) -> dict[str, Outcome]:
    """Run scripts at the same time, so that those that hang cost one patience together.

    Args:
        zygote: Their parent.
        scripts: Code by name; `where` is a directory of its own in each.
        directory: Where those are made.
        idle_seconds: After which time without activity a script is taken for hanging. It is killed, with all that it
            has forked.
    """
    (directory / "scripts").write_text(json.dumps([textwrap.dedent(code) for code in scripts.values()]))
    found = zygote.run(script(TOGETHER), directory, idle_seconds)
    assert found.returncode == 0, found.stderr
    ended = json.loads(found.stdout)
    return {
        name: Outcome(ended[f"script{k}"], *((directory / f"script{k}.{end}").read_text() for end in ("out", "err")))
        for k, name in enumerate(scripts)
    }


def redirect(where: Path) -> None:
    """Send what this process prints to files beside its directory."""
    for fd, suffix in ((1, "out"), (2, "err")):
        target = os.open(where.with_suffix(f".{suffix}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(target, fd)
        os.close(target)


def finish(pids: Mapping[int, Path], idle_seconds: float) -> None:
    """Wait for forked processes, kill those that hang, and print which have ended."""
    ended: set[int] = set()
    hanging: set[int] = set()
    watched = {pid: Activity(pid) for pid in pids}

    def all_settled() -> bool:
        for pid in pids.keys() - ended:
            # It stays a zombie, so that its number stays its own until its group is killed.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                ended.add(pid)
            elif pid not in hanging and watched[pid].idle_seconds() > idle_seconds:
                hanging.add(pid)
        time.sleep(0.05)
        return ended | hanging == pids.keys()

    eventually(all_settled, MOST_SECONDS)
    print(json.dumps({where.name: pid in ended for pid, where in pids.items()}))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # what it has forked too
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Activity:
    """Tells a process that hangs from one that gets no processor: the former takes none and does not ask for one."""

    def __init__(self, pid: int) -> None:
        self._directory = Path(f"/proc/{pid}/task")
        self._last = time.monotonic()
        self._ticks = 0
        self._wanted = False

    def idle_seconds(self) -> float:
        """Look at all threads; return how long ago one of them was last seen to run or to wait for its turn."""
        ticks, wants = 0, False
        for thread in self._directory.glob("*/stat"):
            with suppress(OSError):
                fields = thread.read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
                wants |= fields[0] in "RD"
        if ticks != self._ticks or (wants and self._wanted):  # at one look alone it may be a poll
            self._last = time.monotonic()
        self._ticks, self._wanted = ticks, wants
        return time.monotonic() - self._last


# A filesystem in user space, for root on Linux: what libfuse does with the names of open files.

_ENTRY, _ATTRIBUTES, _OPENED = struct.Struct("<QQQQII"), struct.Struct("<6Q10I"), struct.Struct("<QII")
DAY_NS = 24 * 3600 * 10**9


class Node:
    """A file or directory in memory."""

    def __init__(self, number: int, mode: int, owner: tuple[int, int]) -> None:
        self.number, self.mode, self.owner = number, mode, owner
        self.data = bytearray()
        self.children: dict[str, Node] = {}
        self.num_open = 0
        self.hidden_in: tuple[Node, str] | None = None
        self.removed = False
        self.mtime_ns = time.time_ns()

    @property
    def is_directory(self) -> bool:
        """Whether it has children."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_old(self) -> bool:
        """Whether it was not changed for a day."""
        return time.time_ns() - self.mtime_ns > DAY_NS

    def attributes(self) -> bytes:
        """Return `struct fuse_attr`."""
        seconds, rest = divmod(self.mtime_ns, 10**9)
        size = len(self.data)
        times = seconds, seconds, seconds, rest, rest, rest
        return _ATTRIBUTES.pack(self.number, size, -(-size // 512), *times, self.mode, 1, *self.owner, 0, 4096, 0)


class MemoryFilesystem:
    """Answers the kernel's requests (linux/fuse.h), one after the other, as libfuse's path-based interface does.

    A file that is open and loses its name gets the name `.fuse_hidden...` in its directory, until it is closed: so a
    directory with such a file cannot be removed. There are no hard links, no attributes, no exchange by rename. A
    directory that was not changed for a day, and is empty or stands in another one of this age, another machine removes
    as soon as this one opens it: so two clean up at once.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._nodes: dict[int, Node] = {}
        self._root = self._make(0o40755, (0, 0))
        self._num_hidden = 0

    def serve(self) -> None:
        """Answer until the filesystem is unmounted."""
        calls: dict[int, Callable[[Node, bytes, tuple[int, int]], bytes | None]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 11: self._rmdir,
            12: self._rename, 14: self._open, 15: self._read, 16: self._write, 17: self._statfs, 18: self._release,
            20: self._nothing, 25: self._nothing, 26: self._init, 27: self._opendir, 28: self._readdir, 29: self._release,
            30: self._nothing, 35: self._create, 45: self._rename2,
        }  # fmt: skip
        while True:
            try:
                request = os.read(self._fd, (1 << 20) + 4096)
            except InterruptedError:
                continue
            except OSError:  # ENODEV: unmounted
                return
            _, call, unique, number, uid, gid, _, _ = struct.unpack_from("<IIQQIIII", request)
            if call in (2, 36, 42):  # forget, interrupt: no answer is expected
                continue
            node, error, answer = self._nodes.get(number, self._root), 0, b""
            try:
                if node.removed and call not in (18, 29):  # it has no path any more
                    raise FileNotFoundError(errno.ENOENT, "removed")
                answer = calls[call](node, request[40:], (uid, gid)) or b""
            except KeyError:
                error = -errno.ENOSYS
            except OSError as refused:
                error = -(refused.errno or errno.EIO)
            with suppress(FileNotFoundError):  # the caller was killed meanwhile
                os.write(self._fd, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

    def _make(self, mode: int, owner: tuple[int, int]) -> Node:
        number = len(self._nodes) + 1
        node = self._nodes[number] = Node(number, mode, owner)
        return node

    def _entry(self, node: Node) -> bytes:
        return _ENTRY.pack(node.number, 0, 0, 0, 0, 0) + node.attributes()

    def _init(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        return struct.pack("<4I2H2I2H8I", 7, 31, 1 << 17, 1 << 5, 12, 9, 1 << 17, 1, 32, 0, *[0] * 8)

    def _nothing(self, node: Node, body: bytes, owner: tuple[int, int]) -> None:
        return None

    def _lookup(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        return self._entry(self._child(node, body.rstrip(b"\0").decode()))

    def _child(self, node: Node, name: str) -> Node:
        if name not in node.children:
            raise FileNotFoundError(errno.ENOENT, name)
        return node.children[name]

    def _getattr(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + node.attributes()

    def _setattr(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        valid, _, _, size, _, _, seconds, _, _, rest, _, mode = struct.unpack_from("<IIQQQQQQIIII", body)
        if valid & 1:
            node.mode = stat.S_IFMT(node.mode) | stat.S_IMODE(mode)
        if valid & 8:
            del node.data[size:]
            node.data.extend(bytes(size - len(node.data)))
        if valid & 32:
            node.mtime_ns = time.time_ns() if valid & 256 else seconds * 10**9 + rest
        return self._getattr(node, body, owner)

    def _mkdir(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        mode, umask = struct.unpack_from("<II", body)
        return self._entry(self._add(node, body[8:].rstrip(b"\0").decode(), stat.S_IFDIR | mode & ~umask, owner))

    def _create(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        _, mode, umask, _ = struct.unpack_from("<4I", body)
        made = self._add(node, body[16:].rstrip(b"\0").decode(), stat.S_IFREG | mode & 0o7777 & ~umask, owner)
        made.num_open += 1
        return self._entry(made) + _OPENED.pack(made.number, 0, 0)

    def _add(self, node: Node, name: str, mode: int, owner: tuple[int, int]) -> Node:
        if name in node.children:
            raise FileExistsError(errno.EEXIST, name)
        node.mtime_ns = time.time_ns()
        made = node.children[name] = self._make(mode, owner)
        return made

    def _unlink(self, node: Node, body: bytes, owner: tuple[int, int]) -> None:
        name = body.rstrip(b"\0").decode()
        gone = self._child(node, name)
        del node.children[name]
        if gone.num_open:
            self._num_hidden += 1
            hidden = f".fuse_hidden{gone.number:08x}{self._num_hidden:08x}"
            node.children[hidden], gone.hidden_in = gone, (node, hidden)

    def _rmdir(self, node: Node, body: bytes, owner: tuple[int, int]) -> None:
        name = body.rstrip(b"\0").decode()
        if self._child(node, name).children:
            raise OSError(errno.ENOTEMPTY, name)
        node.children.pop(name).removed = True

    def _rename(self, node: Node, body: bytes, owner: tuple[int, int], begin: int = 8) -> None:
        source, target = (name.decode() for name in body[begin:].rstrip(b"\0").split(b"\0"))
        directory = self._nodes[struct.unpack_from("<Q", body)[0]]
        moved, replaced = self._child(node, source), directory.children.get(target)
        if replaced is moved:
            return
        if replaced is not None and replaced.is_directory:
            self._rmdir(directory, target.encode(), owner)
        elif replaced is not None:
            self._unlink(directory, target.encode(), owner)
        del node.children[source]
        directory.children[target] = moved
        if moved.hidden_in is not None:
            moved.hidden_in = directory, target

    def _rename2(self, node: Node, body: bytes, owner: tuple[int, int]) -> None:
        if struct.unpack_from("<QI", body)[1]:
            raise OSError(errno.EINVAL, "flags of renameat2")
        self._rename(node, body, owner, 16)

    def _open(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        node.num_open += 1
        return _OPENED.pack(node.number, 0, 0)

    def _opendir(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        parent = next((it for it in self._nodes.values() if node in it.children.values()), self._root)
        if node.is_old and (parent.is_old or not node.children):
            self._vanish(node)
            parent.children = {name: child for name, child in parent.children.items() if child is not node}
        return self._open(node, body, owner)

    def _vanish(self, node: Node) -> None:
        node.removed = True
        for child in node.children.values():
            self._vanish(child)

    def _release(self, node: Node, body: bytes, owner: tuple[int, int]) -> None:
        node.num_open -= 1
        if not node.num_open and node.hidden_in is not None:
            directory, name = node.hidden_in
            del directory.children[name]

    def _read(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(node.data[offset : offset + size])

    def _write(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        node.data.extend(bytes(max(0, offset - len(node.data))))
        node.data[offset : offset + size] = body[40 : 40 + size]
        node.mtime_ns = time.time_ns()
        return struct.pack("<II", size, 0)

    def _readdir(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for k, (name, child) in enumerate([(".", node), ("..", node), *node.children.items()]):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", child.number, k + 1, len(raw), child.mode >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if k >= offset:
                if len(answer) + len(entry) > size:
                    break
                answer += entry
        return answer

    def _statfs(self, node: Node, body: bytes, owner: tuple[int, int]) -> bytes:
        return struct.pack("<5Q10I", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, *[0] * 7)


def mount_memory_filesystem(where: Path) -> None:
    """Mount a `MemoryFilesystem`, say so, and serve it until it is unmounted."""
    fd = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
    if libc.mount(b"memory", os.fsencode(where), b"fuse", 0, options.encode()):
        print("refused:", os.strerror(ctypes.get_errno()), flush=True)
        return
    print("up", flush=True)
    MemoryFilesystem(fd).serve()


@contextmanager
def mounted_in_memory(zygote: Zygote, where: Path) -> Iterator[Path]:
    """Mount a `MemoryFilesystem` that a process of its own serves; yield its root.

    Raises:
        OSError: The system refused.
    """
    server = zygote.start(
        "from pathlib import Path\nimport sys\nfrom faults.save_helpers import *\n"
        "mount_memory_filesystem(Path(sys.argv[1]))",
        where,
    )
    try:
        assert eventually(lambda: server.stdout().endswith("\n"), 20)
        if server.stdout() != "up\n":
            raise OSError(server.stdout())
        yield where
    finally:
        subprocess.run(["umount", "--lazy", where], check=False, capture_output=True)
        os.kill(server.pid, signal.SIGKILL)  # whatever still waits for an answer of it gets an error
        server.wait()
