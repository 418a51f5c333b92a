"""What tests of saving share: a save in a line, a reader that tells whole from mixed, and a system that fails on request."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from stio.limits import PAGE_BYTES
from stio.runtime.memory import allocate
from stio.storage.base import Note
from stio.storage.commit import recovery
from stio.storage.commit import syscalls as calls
from stio.storage.commit import transaction as transactions
from stio.storage.commit.recovery import GarbageReport, collect_garbage
from stio.storage.commit.transaction import LocalTransaction

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOTE = "model.safetensors.manifest.json"
OTHER = "tokenizer.json"


@dataclass(frozen=True)
class Rules:
    """The fields of `SaveOptions` that a transaction needs, with their defaults; imports no torch."""

    filename_pattern: str = "model{suffix}.safetensors"
    shard_names: Literal["auto", "hub"] = "auto"
    commit: Literal["index", "files"] = "index"
    durability: Literal["full", "none"] = "full"
    lock_timeout: float = 60.0


def begin_local(destination: str | os.PathLike[str], num_shards: int = 1, **options: Any) -> LocalTransaction:
    """Begin a transaction with these options, and the defaults of others."""
    return transactions.begin_local(destination, num_shards, Rules(**options))


def content(tag: str, k: int) -> bytes:
    """Return a shard's bytes: two pages and a piece, different in each save and shard."""
    return f"{tag}/{k};".encode() * (2 * PAGE_BYTES // 6 + 11 * k)


def fill(transaction: LocalTransaction, tag: str) -> None:
    """Create, write and finish all shards."""
    shards = [content(tag, k) for k in range(len(transaction.shard_names))]
    for writer, data in zip(transaction.create([len(data) for data in shards]), shards, strict=True):
        region = allocate(len(data))
        region.write(0, data)
        writer.write_from(PAGE_BYTES, region.sub(PAGE_BYTES, len(data) - PAGE_BYTES))
        writer.write_from(0, region.sub(0, PAGE_BYTES))
        writer.finish()


def index_of(transaction: LocalTransaction, tag: str) -> bytes | None:
    """Return an index over all shards if there is to be one."""
    if not transaction.takes_index:
        return None
    names = {f"{tag}{k}": name for k, name in enumerate(transaction.shard_names)}
    return json.dumps({"metadata": {"tag": tag}, "weight_map": names}).encode()


def save(
    destination: str | os.PathLike[str], tag: str, num_shards: int = 1, *, notes: Sequence[Note] = (), **options: Any
) -> LocalTransaction:
    """Save a checkpoint whose every shard says which one it is."""
    transaction = begin_local(destination, num_shards=num_shards, **options)
    try:
        fill(transaction, tag)
        transaction.commit(index=index_of(transaction, tag), notes=notes)
    finally:
        transaction.roll_back()
    return transaction


def note(tag: str) -> Note:
    """Return a note that names the checkpoints that it is right for."""
    return Note(NOTE, f"old {tag}".encode(), tag.encode())


def read(destination: Path) -> str | None:
    """Return which checkpoint a reader finds, None for none; fail if it is not whole, or mixed."""
    return whole(destination)[0]


def whole(destination: Path) -> tuple[str | None, set[str]]:
    """Return which checkpoint a reader finds, and the names of its files."""
    if destination.suffix == ".safetensors":
        return (_tag(destination, 0), {destination.name}) if destination.exists() else (None, set())
    index = destination / INDEX
    if index.exists():
        document = json.loads(index.read_bytes())
        names = list(document["weight_map"].values())
        tags = {_tag(destination / name, k) for k, name in enumerate(names)}
        assert tags == {document["metadata"]["tag"]}, f"mixed: {tags}"
        return tags.pop(), {INDEX, *names}
    if (destination / SINGLE).exists():
        return _tag(destination / SINGLE, 0), {SINGLE}
    return None, set()


def _tag(path: Path, k: int) -> str:
    data = path.read_bytes()
    tag = data.partition(b"/")[0].decode(errors="replace")
    assert data == content(tag, k), f"{path} is not whole"
    return tag


def names_in(directory: Path) -> set[str]:
    """Return the names in a directory."""
    return set(os.listdir(directory)) if directory.is_dir() else set()


def require_clean(destination: Path, tags: Iterable[str | None]) -> None:
    """Require one of these checkpoints, whole, with nothing besides it but the user's own file and a fitting note."""
    tag, files = whole(destination)
    assert tag in set(tags), f"found {tag}"
    inside = destination.parent if destination.suffix == ".safetensors" else destination
    assert names_in(inside) - {OTHER, NOTE} == files
    if inside != destination.parent:
        assert names_in(destination.parent) <= {destination.name, OTHER}
    if (inside / NOTE).exists():
        assert (tag or "old") in (inside / NOTE).read_text().split()


def sweep(monkeypatch: pytest.MonkeyPatch, destination: Path) -> GarbageReport:
    """Collect garbage as if a minute had passed."""
    with monkeypatch.context() as patch:
        patch.setattr(recovery, "_UNLOCKED_SECONDS", -1.0)
        return collect_garbage(destination)


@dataclass(frozen=True)
class Change:
    """One save over a checkpoint."""

    name: str
    old_shards: int
    """0: none stands there."""
    new_shards: int
    kind: str = "dir"
    """`dir`: the directory is there; `fresh`: it is not; `file`: one file."""
    notes: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def prepare(self, place: Path) -> Path:
        """Make what stands there before; return the destination.

        The first one is saved, beside the place; the others are its copies, since saves wait for the disk.
        """
        first = place.with_name(f"before {self.name}")
        if not first.exists():
            self._make(first)
        shutil.copytree(first, place, dirs_exist_ok=True)
        return self._in(place)

    def _in(self, place: Path) -> Path:
        return place / ("x.safetensors" if self.kind == "file" else "checkpoint")

    def _make(self, place: Path) -> None:
        destination = self._in(place)
        place.mkdir(parents=True)
        if self.kind == "dir":
            destination.mkdir()
            (destination / OTHER).write_text("{}")
        if self.old_shards:
            save(destination, "old", self.old_shards)
        if self.notes and self.kind != "fresh":
            ((destination if self.kind == "dir" else place) / NOTE).write_text("old")

    @property
    def old(self) -> str | None:
        """Tag of the old checkpoint."""
        return "old" if self.old_shards else None

    def carry_out(self, destination: Path) -> None:
        """Save the new checkpoint."""
        save(destination, "new", self.new_shards, notes=[note("new")] if self.notes else [], **self.options)


HUB_FILES = {"shard_names": "hub", "commit": "files"}
CHANGES = [
    Change("fresh_one", 0, 1, "fresh"),
    Change("fresh_many", 0, 3, "fresh", notes=True),
    Change("file_new", 0, 1, "file"),
    Change("file_over", 1, 1, "file"),
    Change("file_over_noted", 1, 1, "file", notes=True),
    Change("none_to_one", 0, 1),
    Change("none_to_many", 0, 2, notes=True),
    Change("one_to_one", 1, 1),
    Change("one_to_one_noted", 1, 1, notes=True),
    Change("one_to_many", 1, 2),
    Change("many_to_many", 2, 3, notes=True),
    Change("many_to_one", 2, 1),
    Change("one_to_hub_many", 1, 2, options=HUB_FILES),
]
FILES_CHANGE = Change("hub_over_hub", 2, 2, notes=True, options=HUB_FILES)


# The system.


class Killed(BaseException):
    """The process is gone: nothing that it does counts any more."""


FALLIBLE = [
    "fsync", "make_directory", "open_directory", "open_file", "rename", "rename_new", "reserve", "sync_directory",
    "unlink", "write", "write_bytes",
]  # fmt: skip
INFALLIBLE = [
    "birth_of", "close", "copy_owner", "exists", "fchmod", "has_access_list", "remove_access_list",
    "remove_directory", "remove_tree", "start_writeback", "try_lock", "unlock",
]  # fmt: skip


class System:
    """Stands between saves and the system calls: counts them, fails one, or ends the process at one.

    Args:
        monkeypatch: For the time of the test, or of its context.
        fail_at: Number of the call that fails, from 1; calls that cannot fail do not count.
        persistent: Whether all calls after it fail too.
        error_number: With this errno.
        kill_at: Number of the call at which the process ends.
        kill_after: Whether that call was carried out.
        drop: Calls that do nothing.
        hook: Called after each call with its name, its arguments and its result.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        fail_at: int | None = None,
        persistent: bool = False,
        error_number: int = errno.EIO,
        kill_at: int | None = None,
        kill_after: bool = False,
        drop: Sequence[str] = (),
        hook: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        self.num_calls = 0
        self.hit: str | None = None
        """Name of the call that failed first."""
        self._open: set[int] = set()
        self._dead = False

        def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._dead:
                    raise Killed
                if kill_at is not None or name in FALLIBLE:
                    self.num_calls += 1
                if fail_at is not None and name in FALLIBLE:
                    if self.num_calls == fail_at or (persistent and self.num_calls > fail_at):
                        self.hit = self.hit or name
                        raise OSError(error_number, os.strerror(error_number))
                if self.num_calls == kill_at and not kill_after:
                    self._die(name)
                try:
                    # No power cut here, so nothing has to reach the disk.
                    result = None if name in drop or name in ("fsync", "sync_directory") else function(*args, **kwargs)
                except OSError:
                    if self.num_calls == kill_at:
                        self._die(name)
                    raise
                if name.startswith("open_"):
                    self._open.add(result)
                elif name == "close":
                    self._open.discard(args[0])
                if hook is not None and name not in drop:
                    hook(name, args, kwargs, result)
                if self.num_calls == kill_at:
                    self._die(name)
                return result

            return call

        for name in FALLIBLE + INFALLIBLE:
            monkeypatch.setattr(calls, name, wrap(name, getattr(calls, name)))

    def _die(self, name: str) -> None:
        self.hit, self._dead = name, True
        raise Killed

    def bury(self) -> None:
        """Do what the system does for a process that is gone: close its files, and so free its locks."""
        for fd in self._open:
            os.close(fd)
        self._open.clear()

    @property
    def num_open(self) -> int:
        """Descriptors that were opened and not closed."""
        return len(self._open)
