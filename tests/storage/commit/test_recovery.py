"""After a crash: whatever a dead save left is finished or undone, whatever lives is left alone. Power cuts among them."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock
from counts import count

from stio.errors import CheckpointNotFoundError
from stio.storage.commit import recovery
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import is_directory_lock
from stio.storage.commit.journal import JournalRecord, read_record
from stio.storage.commit.recovery import GarbageReport, collect_garbage, recover
from tests.storage.transactions import (
    CHANGES,
    FILES_CHANGE,
    INDEX,
    NOTE,
    OTHER,
    Change,
    Killed,
    System,
    begin_local,
    fill,
    index_of,
    names_in,
    read,
    require_clean,
    save,
    sweep,
)

ALL_CHANGES = [*CHANGES, FILES_CHANGE]
changes = pytest.mark.parametrize("change", ALL_CHANGES, ids=lambda change: change.name)


def die(
    monkeypatch: pytest.MonkeyPatch, change: Change, destination: Path, n: int, *, after: bool = False
) -> str | None:
    """Carry a change out by a process that ends at its n-th call; return the call's name, None if it got through."""
    with monkeypatch.context() as patch:
        system = System(patch, kill_at=n, kill_after=after)
        try:
            change.carry_out(destination)
        except Killed:
            pass
        system.bury()
    return system.hit


def staged_in(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob(".stio-*") if not is_directory_lock(path.name))


# The end of the process at every call.


# After a call the disk is as before the next one: the second form shows that no step depends on more than the disk.
@pytest.mark.matrix
@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["before", "after"])
@changes
def test_c108_killed_at_every_call(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, after: bool
) -> None:
    found: list[str | None] = []
    for n in range(1, 400, count(2, 1)):
        destination = change.prepare(fast_path / str(n))
        hit = die(monkeypatch, change, destination, n, after=after)
        if change is not FILES_CHANGE:
            read(destination)  # whole, at any time
        sweep(monkeypatch, destination)
        require_clean(destination, [change.old, "new"])
        found.append(read(destination))
        if hit is None:
            break
    assert hit is None
    turn = found.index("new")
    assert 0 < turn < len(found) - 1
    assert set(found[:turn]) == {change.old} and set(found[turn:]) == {"new"}


@pytest.mark.matrix
@pytest.mark.costly("processes that are killed")
@pytest.mark.parametrize("every", [10, pytest.param(3, marks=pytest.mark.slow)])
@changes
def test_c108_recovery_killed_at_every_call(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, every: int
) -> None:
    """The one who cleans may die as well, after any death of the one before."""
    destination = change.prepare(fast_path / "whole")
    with monkeypatch.context() as patch:
        counting = System(patch, kill_at=10_000)
        change.carry_out(destination)
    assert 0 < counting.num_calls < 10_000
    for n in range(counting.num_calls // 2, counting.num_calls + 1, every):
        for k in range(1, 100):
            destination = change.prepare(fast_path / f"{n}-{k}")
            die(monkeypatch, change, destination, n)
            with monkeypatch.context() as patch:
                system = System(patch, kill_at=k)
                try:
                    sweep(monkeypatch, destination)
                except Killed:
                    pass
                system.bury()
            sweep(monkeypatch, destination)
            require_clean(destination, [change.old, "new"])
            if system.hit is None:
                break
        assert system.hit is None


@pytest.mark.matrix
@changes
def test_next_save_cleans_up_by_itself(fast_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    for n in (20, 30, 40, 50):
        destination = change.prepare(fast_path / str(n))
        die(monkeypatch, change, destination, n)
        if change.kind == "fresh" and destination.exists():
            continue  # the next save works in it, and not beside it
        (destination.parent / NOTE).unlink(missing_ok=True)
        save(destination, "next", change.new_shards, **change.options)
        if destination.is_dir():
            (destination / NOTE).unlink(missing_ok=True)
        require_clean(destination, ["next"])


# Power cuts: a model of a disk on which only what was synced is certain.


@dataclass
class Node:
    """A file or a directory of the model."""

    entries: dict[str, int] | None = None
    """Names in a directory, now."""
    first: dict[str, int] = field(default_factory=dict)
    """Names in it at the start."""
    changes: list[tuple[str, int | None, tuple[int, int] | None]] = field(default_factory=list)
    """Names that came or went since; of what left by a rename, the directory and the change in which it arrived."""
    num_safe: int = 0
    """How many of the changes are durable; they become so in their order."""
    content: tuple[bytes, int] = (b"", 0)
    """A file's bytes and time of change, now."""
    safe_content: tuple[bytes, int] = (b"", 0)


class Disk:
    """The model: nodes by number, 0 the root. A rename happens in both directories or in none, as journals have it."""

    def __init__(self, root: Path) -> None:
        self.nodes: list[Node] = [Node(entries={})]
        self._load(root, 0)

    def _load(self, path: Path, number: int) -> None:
        for entry in sorted(path.iterdir()):
            child = self.add(number, entry.name, directory=entry.is_dir())
            if entry.is_dir():
                self._load(entry, child)
            else:
                self.nodes[child].content = (entry.read_bytes(), entry.stat().st_mtime_ns)
            self.sync(child)
        self.sync(number)

    def add(self, parent: int, name: str, *, directory: bool) -> int:
        self.nodes.append(Node(entries={} if directory else None))
        self.change(parent, name, len(self.nodes) - 1)
        return len(self.nodes) - 1

    def change(self, parent: int, name: str, child: int | None, arrival: tuple[int, int] | None = None) -> None:
        node = self.nodes[parent]
        assert node.entries is not None
        node.changes.append((name, child, arrival))
        if child is None:
            del node.entries[name]
        else:
            node.entries[name] = child

    def move(self, source: int, name: str, target: int, new_name: str) -> None:
        entries = self.nodes[source].entries
        assert entries is not None
        self.change(target, new_name, entries[name])
        self.change(source, name, None, (target, len(self.nodes[target].changes)))

    def sync(self, number: int) -> None:
        node = self.nodes[number]
        node.safe_content, node.num_safe = node.content, len(node.changes)
        for _, _, arrival in node.changes:
            if arrival is not None:
                there = self.nodes[arrival[0]]
                there.num_safe = max(there.num_safe, arrival[1])

    def write_out(self, path: Path, luck: Callable[[], float]) -> None:
        """Make a real directory of what a power cut leaves; of what was not synced, `luck` decides what is there."""
        kept = [node.num_safe + round(luck() * (len(node.changes) - node.num_safe)) for node in self.nodes]
        self._write_out(path, luck, kept, 0)

    def _write_out(self, path: Path, luck: Callable[[], float], kept: list[int], number: int) -> None:
        node = self.nodes[number]
        if node.entries is None:
            data, mtime = node.content if luck() >= 1 else node.safe_content
            if data != node.content[0] and luck() > 0.5:  # torn: zeros where bytes should be
                data, mtime = node.content[0][:100].ljust(len(node.content[0]), b"\0"), node.content[1]
            path.write_bytes(data)
            os.utime(path, ns=(mtime, mtime))
            return
        entries = dict(node.first)
        for name, child, arrival in node.changes[: kept[number]]:
            if child is not None:
                entries[name] = child
            elif arrival is None or kept[arrival[0]] >= arrival[1]:
                entries.pop(name, None)
        path.mkdir()
        for name, child in entries.items():
            self._write_out(path / name, luck, kept, child)


class Recorder:
    """Listens to a `System` and keeps a log of what it did to a disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._disk = Disk(root)
        self._fds: dict[int, int] = {}
        self.log: list[tuple[Any, ...]] = []

    def __call__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        at = {key: self._fds.get(fd) for key, fd in kwargs.items() if key.endswith("_fd")}
        nodes = self._disk.nodes
        if name == "close":
            self._fds.pop(args[0], None)
        elif name == "open_directory":
            if kwargs.get("dir_fd") is None or args[0] == ".":
                self._fds[result] = self._find(Path(os.readlink(f"/proc/self/fd/{result}")))
            else:
                self._fds[result] = nodes[at["dir_fd"]].entries[args[0]]
        elif name == "open_file":
            entries = nodes[at["dir_fd"]].entries
            if args[0] not in entries:
                self._do("add", at["dir_fd"], args[0], False)
            self._fds[result] = entries[args[0]]
        elif name == "make_directory":
            self._do("add", at["dir_fd"], args[0], True)
        elif name in ("reserve", "write", "write_bytes", "fchmod"):
            content = Path(f"/proc/self/fd/{args[0]}").read_bytes(), os.fstat(args[0]).st_mtime_ns
            self._do("content", self._fds[args[0]], *content)
        elif name in ("rename", "rename_new"):
            self._do("move", at["source_fd"], args[0], at["target_fd"], args[1])
        elif name in ("unlink", "remove_directory", "remove_tree"):
            if args[0] in nodes[at["dir_fd"]].entries:
                self._do("change", at["dir_fd"], args[0], None)
        elif name in ("fsync", "sync_directory"):
            self._do("sync", self._fds[args[0]])

    def _find(self, path: Path) -> int:
        number = 0
        for part in path.relative_to(self._root).parts if path != self._root.parent else ():
            entries = self._disk.nodes[number].entries
            assert entries is not None
            number = entries[part]
        return number

    def _do(self, *step: Any) -> None:
        self.log.append(step)
        self.apply(self._disk, step)

    @staticmethod
    def apply(disk: Disk, step: tuple[Any, ...]) -> None:
        what, *rest = step
        if what == "add":
            disk.add(rest[0], rest[1], directory=rest[2])
        elif what == "content":
            disk.nodes[rest[0]].content = (rest[1], rest[2])
        else:
            getattr(disk, what)(*rest)


def record(
    monkeypatch: pytest.MonkeyPatch, change: Change, place: Path, drop: tuple[str, ...] = ()
) -> tuple[Disk, list[tuple[Any, ...]]]:
    """Carry a change out and return the disk before it, and the log of what it did."""
    destination = change.prepare(place)
    before = Disk(place)
    recorder = Recorder(place)
    with monkeypatch.context() as patch:
        System(patch, hook=recorder, drop=drop)
        change.carry_out(destination)
    assert read(destination) == "new"
    return before, recorder.log


def lucks(seed: int) -> Iterator[Callable[[], float]]:
    """Yield what may happen to unsynced effects: all are lost, names are there and bytes are not, all, some."""
    yield lambda: 0.0
    yield lambda: 0.9999
    yield lambda: 1.0
    for k in range(count(1, 3)):
        yield random.Random(1000 * seed + k).random


def cut_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Change, drop: tuple[str, ...] = ()) -> None:
    before, log = record(monkeypatch, change, tmp_path / "place", drop)
    assert any(step[0] == "sync" for step in log)
    name = "x.safetensors" if change.kind == "file" else "checkpoint"
    for k in range(len(log) + 1):
        for trial, luck in enumerate(lucks(k)):
            disk = copy.deepcopy(before)
            for step in log[:k]:
                Recorder.apply(disk, step)
            place = tmp_path / f"{k}-{trial}"
            disk.write_out(place, luck)
            sweep(monkeypatch, place / name)
            acknowledged = k == len(log)
            require_clean(place / name, ["new"] if acknowledged else [change.old, "new"])
            if change.kind == "dir":
                assert (place / name / OTHER).exists()


CONTROLS = ("fresh_many", "file_over", "one_to_many", "many_to_one", "hub_over_hub")
"""One change of each kind of commit."""


@pytest.mark.matrix
@changes
def test_c109_power_cut_after_every_call(fast_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    cut_everywhere(monkeypatch, fast_path, change)


@pytest.mark.matrix
@pytest.mark.parametrize("drop", ["fsync", "sync_directory"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=change.name, marks=() if change.name in CONTROLS else pytest.mark.slow)
        for change in ALL_CHANGES
    ],
)
def test_c109_the_model_would_notice(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, drop: str
) -> None:
    """The negative control: without these syncs the same check fails."""
    with pytest.raises((AssertionError, ValueError, OSError)):
        cut_everywhere(monkeypatch, fast_path, change, (drop,))


# Who is alive, and who is not.


def abandoned(monkeypatch: pytest.MonkeyPatch, place: Path, n: int = 20) -> Path:
    """Return a destination with a staging directory whose owner is dead."""
    save(place / "c", "old", 2)
    die(monkeypatch, Change("", 2, 2), place / "c", n)
    assert len(staged_in(place / "c")) == 1
    return place / "c"


def test_live_save_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path / "c", "old", 2)
    transaction = begin_local(tmp_path / "c", num_shards=2)
    (mine,) = staged_in(tmp_path / "c")
    for _ in range(2):
        assert collect_garbage(tmp_path / "c", max_age_seconds=0) == GarbageReport(kept=(str(mine),))
    begin_local(tmp_path / "c", num_shards=2).roll_back()
    fill(transaction, "new")
    transaction.commit(index=index_of(transaction, "new"))
    require_clean(tmp_path / "c", ["new"])


def test_report_says_what_was_done(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = abandoned(monkeypatch, fast_path)
    (left,) = staged_in(place)
    assert collect_garbage(place) == GarbageReport(undone=(str(left),))
    assert collect_garbage(place) == GarbageReport()
    n = 20
    while read(place) == "old":
        n += 1
        die(monkeypatch, Change("", 2, 2), place, n)
        left = [path for path in staged_in(place) if "trash" not in path.name]
        report = collect_garbage(place)
        assert report == (
            GarbageReport(finished=(str(left[0]),)) if read(place) == "new" else GarbageReport(undone=(str(left[0]),))
        )


def test_directory_without_a_lock_is_young_first(tmp_path: Path) -> None:
    staged = tmp_path / ".stio-0123456789"
    staged.mkdir()
    assert collect_garbage(tmp_path).kept == (str(staged),)
    past = time.time() - 61
    os.utime(staged, (past, past))
    assert collect_garbage(tmp_path).undone == (str(staged),)
    assert not staged_in(tmp_path)


def test_creator_that_loses_the_race_takes_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_UNLOCKED_SECONDS", -1.0)
    for name in ("make_directory", "open_directory", "open_file", "try_lock"):
        real, met = getattr(calls, name), []

        def with_a_recovery_after(
            *args: Any, real: Callable[..., Any] = real, met: list[int] = met, **kwargs: Any
        ) -> Any:
            result = real(*args, **kwargs)
            if not met and (kwargs or real.__name__ == "try_lock"):  # a directory without `dir_fd` is the home
                met.append(1)
                collect_garbage(tmp_path)
            return result

        with monkeypatch.context() as patch:
            patch.setattr(calls, name, with_a_recovery_after)
            transaction = begin_local(tmp_path, num_shards=1)
        assert met
        (staged,) = staged_in(tmp_path)
        assert (staged / "lock").exists() and str(staged / "new") == transaction.files_path
        transaction.roll_back()
        assert not staged_in(tmp_path)


@pytest.mark.parametrize("locks", [True, False])
def test_where_locks_cannot_be_trusted_age_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    place = abandoned(monkeypatch, tmp_path)
    (left,) = staged_in(place)
    if locks:
        monkeypatch.setattr(recovery, "is_local", lambda fd: False)
    else:
        monkeypatch.setattr(calls, "try_lock", lambda fd: None)
    assert collect_garbage(place).kept == (str(left),)
    assert collect_garbage(place, max_age_seconds=0).kept == (str(left),), "its process, ours, lives"
    owner = json.loads((left / "lock").read_text())
    assert owner["pid"] == os.getpid() and set(owner) == {"pid", "boot", "host", "time"}
    for change in ({"pid": 2**22 + 1}, {"boot": "another"}, {"host": "another"}):
        assert not owner_runs(left, {**owner, **change})
    for text in ("", "[]", "null", '{"pid": "x"}', "[" * 60_000, '{"pid": ' * 8000):
        assert not owner_runs(left, text)
    (left / "lock").write_text("{}")
    assert collect_garbage(place, max_age_seconds=3600).kept == (str(left),)
    assert collect_garbage(place, max_age_seconds=0).undone == (str(left),)
    require_clean(place, ["old"])


def owner_runs(left: Path, owner: dict[str, Any] | str) -> bool:
    (left / "lock").write_text(owner if isinstance(owner, str) else json.dumps(owner))
    fd = os.open(left / "lock", os.O_RDWR)
    try:
        return recovery._owner_runs_here(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("hours", [-26, 2], ids=["behind", "ahead"])
def test_age_is_measured_by_the_clock_of_the_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, hours: int
) -> None:
    """Another host looks, whose clock is wrong; the locks of the filesystem prove nothing."""
    places = [abandoned(monkeypatch, tmp_path / name) for name in ("young", "old", "no_lock")]
    (young,), (old,), (no_lock,) = map(staged_in, places)
    hour_ago = time.time() - 3600
    os.utime(old / "lock", (hour_ago, hour_ago))
    (no_lock / "lock").unlink()
    os.utime(no_lock, (hour_ago, hour_ago))
    for staged in (young, old):
        owner = json.loads((staged / "lock").read_text())
        changed = os.stat(staged / "lock").st_mtime_ns
        (staged / "lock").write_text(json.dumps({**owner, "host": "another"}))
        os.utime(staged / "lock", ns=(changed, changed))
    monkeypatch.setattr(recovery, "is_local", lambda fd: False)
    clock.advance(3600 * hours)
    found = [collect_garbage(place, max_age_seconds=1800) for place in places]
    assert found == [
        GarbageReport(kept=(str(young),)),
        GarbageReport(undone=(str(old),)),
        GarbageReport(kept=(str(no_lock),)),  # a lock was made there, for a maker that is only slow
    ]
    assert collect_garbage(places[2], max_age_seconds=0).undone == (str(no_lock),)
    require_clean(places[1], ["old"])
    assert not [name for place in places for name in os.listdir(place) if name.startswith(".stio-trash")]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_what_was_set_aside_may_have_the_name_of_a_lock(tmp_path: Path, kind: str) -> None:
    staging = tmp_path / ".stio-0123456789"
    aside = staging / "aside" / "lock"
    if kind == "file":
        aside.parent.mkdir(parents=True)
        aside.write_text('{"version": 9}')
    else:
        aside.mkdir(parents=True)
    (staging / "lock").touch()
    assert collect_garbage(tmp_path).undone == (str(staging),)
    assert (tmp_path / "lock").exists() and not staging.exists()


def test_what_was_set_aside_stays_while_it_cannot_be_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = tmp_path / ".stio-0123456789"
    (staging / "aside" / "one").mkdir(parents=True)
    (staging / "lock").touch()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(calls, "rename_new", refuse)
        assert collect_garbage(tmp_path).failed == (str(staging),)
    assert (staging / "aside" / "one").exists()
    assert collect_garbage(tmp_path).undone == (str(staging),)
    assert (tmp_path / "one").exists() and not staging.exists()


def test_where_no_time_can_be_seen_nothing_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = abandoned(monkeypatch, tmp_path)
    (left,) = staged_in(place)

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patch:
        patch.setattr(recovery, "is_local", lambda fd: False)
        patch.setattr(calls, "make_directory", refuse)
        assert collect_garbage(place, max_age_seconds=-1).kept == (str(left),)


def test_two_recoveries_at_once(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(15, 75, 4):
        place = fast_path / str(n)
        save(place / "c", "old", 2)
        die(monkeypatch, Change("", 2, 2), place / "c", n)
        together = threading.Barrier(4)

        def clean(_: int, place: Path = place, together: threading.Barrier = together) -> GarbageReport:
            together.wait()
            return collect_garbage(place / "c")

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(clean, range(4)))
        collect_garbage(place / "c")
        require_clean(place / "c", ["old", "new"])


# What it never touches.


def test_links_and_other_names_are_left(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine").write_text("x")
    home = tmp_path / "home"
    (home / ".stio-0123456789").mkdir(parents=True)
    os.symlink(outside, home / ".stio-0123456789" / "new")
    os.symlink(outside, home / ".stio-abcdefabcd")
    os.symlink(outside, home / ".stio-trash-abcdefabcd")
    (home / ".stio-notes").mkdir()
    (home / ".stio-notes" / "mine").write_text("x")
    past = time.time() - 100
    os.utime(home / ".stio-0123456789", (past, past))
    collect_garbage(home)
    assert (outside / "mine").exists() and (home / ".stio-notes" / "mine").exists()
    assert not os.path.lexists(home / ".stio-0123456789")
    assert os.path.lexists(home / ".stio-abcdefabcd")


def records(monkeypatch: pytest.MonkeyPatch, place: Path) -> tuple[Path, JournalRecord]:
    """Return a staging directory of a dead save with its record, nothing of it visible yet."""
    save(place, "old", 2)
    for n in range(20, 200):
        die(monkeypatch, Change("", 2, 2), place, n)
        (left,) = [path for path in staged_in(place) if "trash" not in path.name]
        fd = calls.open_directory(str(left))
        try:
            found = read_record(fd)
        finally:
            os.close(fd)
        if found is not None:
            return left, found
        collect_garbage(place)
    raise AssertionError


@pytest.mark.matrix
@pytest.mark.parametrize("key", ["moves", "unlink"])
@pytest.mark.parametrize("name", ["../mine", "sub/mine", "..", ""])
def test_record_with_names_that_lead_out_is_void(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    left, _ = records(monkeypatch, fast_path / "c")
    mine = fast_path / "mine"
    mine.write_text("x")
    document = json.loads((left / "intent.json").read_text())
    document[key][name] = {"nbytes": 1, "mtime_ns": mine.stat().st_mtime_ns}
    (left / "intent.json").write_text(json.dumps(document))
    assert collect_garbage(fast_path / "c").undone == (str(left),)
    assert mine.exists()
    require_clean_but(fast_path / "c", mine)


@pytest.mark.matrix
@pytest.mark.parametrize("key", ["moves", "unlink"])
def test_record_with_names_that_are_too_long_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """No file can have such a name, so there is nothing to remove."""
    left, _ = records(monkeypatch, tmp_path / "c")
    document = json.loads((left / "intent.json").read_text())
    document[key]["n" * 300] = {"nbytes": 1, "mtime_ns": 1}
    (left / "intent.json").write_text(json.dumps(document))
    assert collect_garbage(tmp_path / "c").undone == (str(left),)
    require_clean(tmp_path / "c", ["old"])


def require_clean_but(place: Path, mine: Path) -> None:
    mine.unlink()
    require_clean(place, ["old"])


@pytest.mark.matrix
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"moves": 1}', "[" * 100_000])
def test_record_that_is_none_is_void(fast_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    left, _ = records(monkeypatch, fast_path / "c")
    (left / "intent.json").write_text(text)
    assert collect_garbage(fast_path / "c").undone == (str(left),)
    require_clean(fast_path / "c", ["old"])


@pytest.mark.matrix
@pytest.mark.parametrize(
    "text", ['{"version": 2, "what": "ever"}', '{"version": "2"}', '{"version": 1, "commit": "other"}']
)
def test_record_of_another_version_is_left(fast_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    left, _ = records(monkeypatch, fast_path / "c")
    (left / "intent.json").write_text(text)
    report = collect_garbage(fast_path / "c")
    assert (report.kept, report.newer) == ((str(left),), (str(left),))
    assert read(fast_path / "c") == "old"


def test_files_that_another_program_uses_stay(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = fast_path / "c"
    save(place, "old", 2)
    n, moved = 20, []
    while not moved:
        n += 1
        die(monkeypatch, Change("", 2, 2), place, n)
        moved = [
            name for name in names_in(place) if name.startswith("model-") and "-0000" in name[7:] and len(name) > 40
        ]
        if not moved:
            collect_garbage(place)
    (place / INDEX).write_text(json.dumps({"weight_map": {"a": moved[0]}}))
    collect_garbage(place)
    assert moved[0] in names_in(place)


@pytest.mark.slow
def test_replacement_does_not_go_on_over_a_newer_checkpoint(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not reach, another save may come between the death and the recovery."""
    count = 0
    for n in range(30, 200):
        destination = FILES_CHANGE.prepare(fast_path / str(n))
        if die(monkeypatch, FILES_CHANGE, destination, n) is None:
            break
        (destination / NOTE).unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr("stio.storage.commit.transaction.recover", lambda *_: GarbageReport())
            save(destination, "newer", 2)
        count += bool(staged_in(destination))
        sweep(monkeypatch, destination)
        (destination / NOTE).unlink(missing_ok=True)
        require_clean(destination, ["newer"])
    assert count > 5


# Where there is nothing to be done.


def test_read_only_directory_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = abandoned(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:

        def refuse(*_: object, **__: object) -> None:
            raise OSError(30, os.strerror(30))

        for name in ("rename", "unlink", "open_file"):
            patch.setattr(calls, name, refuse)
        assert len(collect_garbage(place).kept) == 1
    assert len(collect_garbage(place).undone) == 1


def test_directory_that_cannot_be_listed_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> list[str]:
        raise PermissionError(13, "")

    fd = calls.open_directory(str(tmp_path))
    monkeypatch.setattr(os, "listdir", refuse)
    assert recover(fd, str(tmp_path)) == GarbageReport()
    os.close(fd)


def test_places_of_a_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for destination, change in (
        (tmp_path / "a" / "fresh", Change("", 0, 2, "fresh")),
        (tmp_path / "b" / "x.safetensors", Change("", 0, 1, "file")),
    ):
        destination.parent.mkdir()
        die(monkeypatch, change, destination, 20)
        assert len(collect_garbage(destination).undone) == 1
        assert not names_in(destination.parent)
    with pytest.raises(CheckpointNotFoundError):
        collect_garbage(tmp_path / "none" / "there")
    assert collect_garbage(str(tmp_path)) == GarbageReport()
