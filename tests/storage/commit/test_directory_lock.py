"""The lock of a directory: who can take it, how long others wait for it, and what is left of it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import os
import signal
import socket
import stat
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from clocks import Clock

from stio.errors import ConcurrentSaveError
from stio.storage.commit import directory_lock as module
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import DIRECTORY_LOCK_NAME, FileLock, LockTimeout, directory_lock
from stio.storage.commit.files import closing
from stio.storage.commit.recovery import collect_garbage
from tests.storage.transactions import Killed, System, begin_local, names_in, read, save

root = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs other users to be")
NOBODY, MAKER, MEMBER, GROUP = 65534, 64001, 64002, 64100


@contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def held(directory: Path, seconds: float = 5.0) -> Iterator[None]:
    """Hold the lock of a directory."""
    with opened(directory) as fd, directory_lock(fd, str(directory), LockTimeout(seconds)):
        yield


def lock_file(directory: Path) -> Path:
    """Return the only lock file."""
    (path,) = directory.glob(f"{DIRECTORY_LOCK_NAME}*")
    return path


def as_user(user: int, groups: list[int], body: Callable[[], object]) -> str:
    """Run a function in a forked child as another user; return what it returned or raised, as text."""
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups(groups)
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            text = str(body())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(target, text.encode())
        os._exit(0)
    os.close(target)
    with open(source) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a directory that other users can reach."""
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    directory = tmp_path / "shared"
    directory.mkdir()
    return directory


# The file.


@pytest.mark.parametrize("umask", [0o022, 0o077])
@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        (0o755, DIRECTORY_LOCK_NAME, 0o600),
        (0o700, DIRECTORY_LOCK_NAME, 0o600),
        (0o775, DIRECTORY_LOCK_NAME, 0o660),
        (0o2775, DIRECTORY_LOCK_NAME, 0o660),
        (0o777, DIRECTORY_LOCK_NAME, 0o666),
        (0o757, DIRECTORY_LOCK_NAME, 0o606),
        (0o1777, f"{DIRECTORY_LOCK_NAME}-{os.geteuid()}", 0o600),
        (0o3775, f"{DIRECTORY_LOCK_NAME}-{os.geteuid()}", 0o600),
    ],
    ids=lambda value: f"{value:o}" if isinstance(value, int) else None,
)
def test_those_who_may_write_the_directory_may_open_it(
    tmp_path: Path, mode: int, name: str, expected: int, umask: int
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(mode)
    before = os.umask(umask)
    try:
        with held(tmp_path / "c"):
            path = lock_file(tmp_path / "c")
            assert path.name == name
            assert stat.S_IMODE(path.stat().st_mode) == expected
            owner = json.loads(path.read_text())
            assert (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
    finally:
        os.umask(before)
    assert names_in(tmp_path / "c") == set()


def test_the_file_of_a_dead_owner_is_taken_and_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        with held(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert names_in(tmp_path) == {DIRECTORY_LOCK_NAME}
    with held(tmp_path, 0):
        assert json.loads(lock_file(tmp_path).read_text())["pid"] == os.getpid()
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("mode", [0o775, 0o1777], ids=oct)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_maker_that_dies_leaves_a_file_with_its_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool, mode: int
) -> None:
    """All who may write the directory could open the file, whenever its maker dies."""
    for n in range(1, 30):
        place = tmp_path / str(n)
        place.mkdir()
        place.chmod(mode)
        with monkeypatch.context() as patch:
            system = System(patch, kill_at=n, kill_after=after)
            with suppress(Killed), opened(place) as fd, directory_lock(fd, str(place)):
                pass
            system.bury()
        left = names_in(place)
        assert {name for name in left if not module.is_directory_lock(name)} == set()
        for name in left & {DIRECTORY_LOCK_NAME}:
            assert stat.S_IMODE((place / name).stat().st_mode) == 0o660
        collect_garbage(place)
        assert names_in(place) == set()
        if system.hit is None:
            break
    assert system.hit is None and n > 5


def test_a_recovery_that_removes_a_file_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, num_times = calls.fchmod, [0]

    def fchmod(fd: int, mode: int) -> None:
        plain(fd, mode)
        if num_times[0] < 3:
            num_times[0] += 1
            collect_garbage(tmp_path)

    monkeypatch.setattr(calls, "fchmod", fchmod)
    with held(tmp_path):
        assert names_in(tmp_path) == {DIRECTORY_LOCK_NAME}
    assert names_in(tmp_path) == set()
    assert num_times == [3]


def test_recovery_removes_a_free_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY_LOCK_NAME).write_text("of a dead save")
    other = tmp_path / f"{DIRECTORY_LOCK_NAME}-{os.geteuid() + 1}"
    other.write_text("of another user")
    collect_garbage(tmp_path, dry_run=True)
    assert len(names_in(tmp_path)) == 2
    collect_garbage(tmp_path)
    assert names_in(tmp_path) == {other.name}
    other.unlink()
    with held(tmp_path):
        collect_garbage(tmp_path)
        assert names_in(tmp_path) == {DIRECTORY_LOCK_NAME}
        with pytest.raises(ConcurrentSaveError), held(tmp_path, 0):
            pass


def test_a_file_that_another_program_has_replaced_is_not_removed(tmp_path: Path) -> None:
    with held(tmp_path):
        lock_file(tmp_path).unlink()
        (tmp_path / DIRECTORY_LOCK_NAME).write_text("of another save")
    assert (tmp_path / DIRECTORY_LOCK_NAME).read_text() == "of another save"


def test_the_file_of_an_owner_with_an_odd_description(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"pid": "x", "host": "h"}', "\0" * 2000, "[" * 5000, '{"pid": 7, "host": "a\\u001b"}'):
        (tmp_path / DIRECTORY_LOCK_NAME).write_text(text)
        with open(tmp_path / DIRECTORY_LOCK_NAME, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(ConcurrentSaveError) as caught, held(tmp_path, 0):
                pass
        assert str(caught.value).isprintable()


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["directory", "staging directory"])
def test_a_forked_child_does_not_hold_the_locks_of_a_dead_parent(tmp_path: Path, kind: str) -> None:
    """Such as a worker of a data loader, forked while a save is under way."""
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        transaction = begin_local(tmp_path, num_shards=1)
        if kind == "directory":
            transaction.prepare_commit()
        if not os.fork():
            os.write(target, str(os.getpid()).encode())  # by the child: its descriptors are closed by then
            time.sleep(30)  # waits: until it is killed
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    child = int(os.read(source, 100))
    os.close(source)
    os.close(target)
    try:
        assert (DIRECTORY_LOCK_NAME in names_in(tmp_path)) == (kind == "directory")
        save(tmp_path, "new", lock_timeout=0)
        assert names_in(tmp_path) == {"model.safetensors"}
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_child_forked_while_a_lock_is_taken_does_not_hold_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system call releases the GIL, and another thread may fork before it is back."""
    plain, closed_in_child = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        plain(fd, operation)
        closed_in_child.append(fd in calls._locked)

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("w") as file, (tmp_path / "lock").open("w") as other:
        assert calls.try_lock(file.fileno()) is True
        assert closed_in_child == [True]
        assert calls.try_lock(other.fileno()) is False
        assert other.fileno() not in calls._locked
        calls.unlock(file.fileno())


def test_a_forked_child_releases_no_lock_of_its_parent(tmp_path: Path) -> None:
    with held(tmp_path):
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(ConcurrentSaveError), held(tmp_path, 0):
            pass


def test_log_handlers_run_when_the_lock_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that saves to the same place would wait for the save that calls it."""
    save(tmp_path / "c", "old", 2)
    told = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with held(tmp_path / "c", 0):
                told.append(record.getMessage())

    def unlink(name: str, *, dir_fd: int) -> None:
        if name.startswith("model"):
            raise OSError(errno.EIO, "")
        os.unlink(name, dir_fd=dir_fd)

    handler = Handler()
    logging.getLogger("stio").addHandler(handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(calls, "unlink", unlink)
            save(tmp_path / "c", "new", 2)
    finally:
        logging.getLogger("stio").removeHandler(handler)
    assert any("cleaning up failed" in text for text in told)


# Waits.


def test_owners_exclude_each_other(tmp_path: Path) -> None:
    """Also while files are removed and made again between two of them."""
    inside, rounds, failures = [0], 40, []

    def work() -> None:
        for _ in range(rounds):
            with held(tmp_path, 30):
                inside[0] += 1
                if inside[0] != 1:
                    failures.append(inside[0])
                time.sleep(0.0002)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert names_in(tmp_path) == set()


def test_the_error_names_the_owner_and_the_time(tmp_path: Path) -> None:
    with held(tmp_path), pytest.raises(ConcurrentSaveError, match=r"waited 0\.05 s in all \(lock_timeout=\)") as caught:
        with held(tmp_path, 0.05):
            pass
    assert caught.value.path == str(tmp_path)
    assert f"process {os.getpid()} on {socket.gethostname()}" in str(caught.value)


def test_a_check_ends_the_wait(tmp_path: Path, clock: Clock) -> None:
    class Stopped(BaseException):
        pass

    looks = []

    def check() -> None:
        looks.append(clock.seconds)
        if len(looks) == 12:
            raise Stopped

    with held(tmp_path), opened(tmp_path) as fd:
        with pytest.raises(Stopped), directory_lock(fd, str(tmp_path), LockTimeout(30), check):
            pass
    assert max(later - earlier for earlier, later in itertools.pairwise(looks)) < 1


def test_all_waits_have_one_time(clock: Clock) -> None:
    whole = LockTimeout(10)
    assert whole.wait_until(lambda: clock.seconds >= 8)
    assert not whole.wait_until(lambda: False) and clock.seconds == pytest.approx(10, abs=0.1)
    assert not whole.wait_until(lambda: False) and clock.seconds == pytest.approx(10, abs=0.1)
    assert whole.wait_until(lambda: True)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_block_runs_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with held(tmp_path, 0), held(tmp_path, 0):
        assert names_in(tmp_path) == set()


def test_without_locks_another_save_may_remove_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def remove(fd: int) -> None:
        (tmp_path / DIRECTORY_LOCK_NAME).unlink()

    monkeypatch.setattr(calls, "try_lock", remove)
    with held(tmp_path, 0):
        assert names_in(tmp_path) == set()


@pytest.mark.parametrize("stays", [True, False])
def test_a_lock_that_stays_has_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(calls, "write_bytes", refuse)
    with closing(calls.open_directory(os.fspath(tmp_path))) as fd:
        lock = FileLock("lock", fd, stays=stays)
        if stays:
            with pytest.raises(OSError, match="full"):
                lock.try_lock()
        else:
            assert lock.try_lock()
        assert lock.is_held == (not stays)
        lock.release()


def test_a_forked_child_closes_no_descriptor_for_a_lock(tmp_path: Path) -> None:
    with closing(calls.open_directory(os.fspath(tmp_path))) as fd:
        lock = FileLock("lock", fd)
        assert lock.try_lock()
        pid = os.fork()
        if not pid:
            with suppress(BaseException):
                opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
                lock.release()
                [os.fstat(one) for one in opened]
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        lock.release()
        assert names_in(tmp_path) == set()


def test_a_directory_that_vanished_is_an_error_and_no_wait(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with opened(tmp_path / "c") as fd:
        (tmp_path / "c").rmdir()
        with pytest.raises(FileNotFoundError), directory_lock(fd, "c", LockTimeout(60)):
            pass


# Locks of others.


PLANTED: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a link that leads to nothing": lambda path, victim: path.symlink_to("nothing"),
    "a hard link": lambda path, victim: path.hardlink_to(victim),
    "a directory": lambda path, victim: path.mkdir(),
    "a FIFO": lambda path, victim: os.mkfifo(path),
}


def test_the_warning_names_the_file_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.safetensors"
    save(path, "old")
    (tmp_path / DIRECTORY_LOCK_NAME).mkdir()
    save(path, "new")
    assert f"{tmp_path / DIRECTORY_LOCK_NAME} cannot be used as a lock" in caplog.text


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=oct)
def test_what_is_no_lock_file_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, mode: int
) -> None:
    place, victim = tmp_path / "c", tmp_path / "victim"
    victim.write_text("precious")
    save(place, "old", 2)
    place.chmod(mode)
    name = f"{DIRECTORY_LOCK_NAME}-{os.geteuid()}" if mode & stat.S_ISVTX else DIRECTORY_LOCK_NAME
    PLANTED[kind](place / name, victim)
    save(place, "new", 2)
    assert read(place) == "new"
    assert victim.read_text() == "precious"
    assert os.path.lexists(place / name)
    assert f"{place / name} cannot be used as a lock" in caplog.text


@root
def test_a_file_of_another_user_in_a_sticky_directory_is_not_used(shared: Path) -> None:
    """That user would hold it for ever."""
    shared.chmod(0o1777)
    path = shared / f"{DIRECTORY_LOCK_NAME}-{MAKER}"
    path.touch()
    os.chown(path, NOBODY, NOBODY)
    path.chmod(0o666)
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert as_user(MAKER, [], lambda: save(shared / "x.safetensors", "new", lock_timeout=1).path) == str(
            shared / "x.safetensors"
        )


@pytest.mark.slow
@root
def test_members_of_the_group_exclude_each_other_and_readers_do_not(shared: Path) -> None:
    os.chown(shared, 0, GROUP)
    shared.chmod(0o775)

    def inside() -> tuple[str, str, str]:
        path = str(lock_file(shared))
        mode = stat.S_IMODE(os.stat(path).st_mode)
        with opened(shared) as fd:
            member = as_user(MEMBER, [GROUP], lambda: module._DirectoryLock(fd).try_lock())
            reader = as_user(NOBODY, [], lambda: os.open(path, os.O_RDONLY))
        return f"{mode:o} {os.stat(path).st_gid}", member, reader

    # As root: the child that makes the lock file forks the others.
    source, target = os.pipe()
    pid = os.fork()
    if not pid:
        os.setgroups([GROUP])
        os.setegid(MAKER)
        os.seteuid(MAKER)
        try:
            with held(shared):
                os.seteuid(0)
                os.write(target, json.dumps(inside()).encode())
                os.seteuid(MAKER)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(target)
    with open(source) as file:
        rights, member, reader = json.loads(file.read())
    os.waitpid(pid, 0)
    assert rights == f"660 {GROUP}"
    assert member == "False"
    assert reader.startswith("PermissionError")
    assert names_in(shared) == set()


@root
def test_the_file_that_root_makes_belongs_to_the_directorys_owner(shared: Path) -> None:
    os.chown(shared, MAKER, MAKER)
    with held(shared), opened(shared) as fd:
        assert lock_file(shared).stat().st_uid == MAKER
        assert as_user(MAKER, [], lambda: module._DirectoryLock(fd).try_lock()) == "False"


def access_list(*entries: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@pytest.mark.slow
@root
@pytest.mark.parametrize("inherited", [False, True])
def test_who_writes_only_by_a_list_saves_without_the_lock(shared: Path, inherited: bool) -> None:
    """A member may write, the group and a named user may read only; the mode shows neither."""
    none = 0xFFFFFFFF
    entries = access_list((1, 7, none), (2, 7, MEMBER), (2, 5, NOBODY), (4, 5, none), (16, 7, none), (32, 5, none))
    try:
        os.setxattr(shared, "system.posix_acl_access", entries)
        if inherited:
            os.setxattr(shared, "system.posix_acl_default", access_list(
                (1, 7, none), (2, 6, NOBODY), (4, 6, none), (16, 7, none), (32, 6, none),
            ))  # fmt: skip
    except OSError as error:
        pytest.skip(f"no access control lists: {error}")
    os.chown(shared, 0, GROUP)
    with held(shared):
        path = lock_file(shared)
        for user, groups in ((MEMBER, []), (NOBODY, []), (MAKER, [GROUP]), (MAKER, [])):
            assert as_user(user, groups, lambda: os.open(path, os.O_RDONLY)).startswith("PermissionError")
        one = shared / "x.safetensors"
        assert as_user(MEMBER, [], lambda: save(one, "new").path) == str(one)


@root
def test_a_default_list_gives_readers_nothing(shared: Path) -> None:
    none = 0xFFFFFFFF
    try:
        os.setxattr(shared, "system.posix_acl_default", access_list(
            (1, 7, none), (2, 6, NOBODY), (4, 6, none), (16, 7, none), (32, 6, none),
        ))  # fmt: skip
    except OSError as error:
        pytest.skip(f"no access control lists: {error}")
    shared.chmod(0o775)
    with held(shared):
        path = lock_file(shared)
        assert as_user(NOBODY, [], lambda: os.open(path, os.O_RDONLY)).startswith("PermissionError")
