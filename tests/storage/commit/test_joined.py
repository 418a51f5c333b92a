"""One staging directory in which several processes write: they see the same files, or say so; the owner decides alone."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from stio.errors import StorageError
from stio.limits import PAGE_BYTES
from stio.runtime.memory import Region, allocate
from stio.storage.commit import files, transaction
from stio.storage.commit.transaction import Invitation, JoinedTransaction, LocalTransaction
from tests.storage.transactions import (
    INDEX,
    SINGLE,
    Killed,
    System,
    begin_local,
    content,
    index_of,
    names_in,
    read,
    require_clean,
    save,
    sweep,
)

DATA = [random.Random(k).randbytes(3 * PAGE_BYTES + 100 * k) for k in range(2)]
HALF = [len(data) // 2 for data in DATA]


def region_of(data: bytes) -> Region:
    region = allocate(len(data) or 1)
    region.write(0, data)
    return region.sub(0, len(data))


def begun(destination: Path, num_shards: int = 2) -> tuple[LocalTransaction, JoinedTransaction]:
    """Return a transaction whose first halves are written, and another process's view of it."""
    owner = begin_local(destination, num_shards=num_shards)
    data, half = DATA[:num_shards], HALF[:num_shards]
    writers = owner.create([len(one) for one in data], half)
    other = JoinedTransaction(Invitation.from_json(owner.invite().to_json()))
    for writer, one, own in zip(writers, data, half, strict=True):
        writer.write_from(0, region_of(one[:own]))
        writer.finish()
    return owner, other


def write_rest(other: JoinedTransaction, num_shards: int = 2) -> None:
    data, half = DATA[:num_shards], HALF[:num_shards]
    writers = other.create([len(one) - own for one, own in zip(data, half, strict=True)])
    for writer, one, own in zip(writers, data, half, strict=True):
        writer.write_from(own, region_of(one[own:]))
        writer.finish()


def publish(owner: LocalTransaction) -> None:
    for name, data in zip(owner.shard_names, DATA, strict=False):
        owner.finish_file(name, len(data))
    owner.commit(index=b"{}" if owner.takes_index else None)


@pytest.mark.parametrize("old", ["none", "index", "file"])
def test_files_of_two_processes_are_one_checkpoint(tmp_path: Path, old: str) -> None:
    destination = tmp_path / ("a.safetensors" if old == "file" else "a")
    num_shards = 1 if old == "file" else 2
    if old != "none":
        save(destination, "old", num_shards)
        if old == "file":
            destination.chmod(0o640)
    owner, other = begun(destination, num_shards)
    assert read(destination) == (None if old == "none" else "old")
    write_rest(other, num_shards)
    name = owner.shard_names[0]
    expected = hashlib.sha256(DATA[0]).hexdigest()
    assert other.digest(name, hashlib.sha256(), lambda: None) == expected
    assert owner.digest(name, hashlib.sha256(), lambda: None) == expected
    other.roll_back()
    publish(owner)
    files = [destination] if old == "file" else [destination / name for name in owner.shard_names]
    assert [file.read_bytes() for file in files] == DATA[:num_shards]
    if old == "file":
        assert destination.stat().st_mode & 0o777 == 0o640, "as the file that it replaces"
    else:
        assert names_in(destination) == {INDEX, *owner.shard_names}
    assert names_in(tmp_path) == {destination.name}


def test_parts_alone_are_no_file(tmp_path: Path) -> None:
    """The owner's own parts are durable, and the save cannot be published before `finish_file`."""
    owner, other = begun(tmp_path / "a")
    with pytest.raises(ValueError, match="not all files are finished"):
        owner.commit(index=b"{}")
    write_rest(other)
    os.truncate(os.path.join(owner.files_path, owner.shard_names[1]), 5)
    owner.finish_file(owner.shard_names[0], len(DATA[0]))
    with pytest.raises(StorageError, match="another size"):
        owner.finish_file(owner.shard_names[1], len(DATA[1]))
    other.roll_back()
    owner.roll_back()
    assert names_in(tmp_path) == set()


def test_another_directory_of_the_same_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine without a shared filesystem; on one that shows files late it is tried again."""
    owner, other = begun(tmp_path / "a")
    other.roll_back()
    invitation = other.invitation
    nonce = Path(invitation.staging, transaction.NONCE_NAME)
    text = nonce.read_text()
    nonce.write_text(text[::-1])
    for is_local, tries in ((True, 1), (False, 2)):
        looks: list[bool] = []

        def look(is_local: bool = is_local, looks: list[bool] = looks) -> bool:
            looks.append(True)
            return is_local

        monkeypatch.setattr(transaction, "_VISIBLE_SECONDS", 0.05)
        monkeypatch.setattr(transaction, "_is_on_local_filesystem", lambda _, look=look: look())
        with pytest.raises(StorageError, match="a filesystem that all processes share"):
            JoinedTransaction(invitation)
        assert len(looks) >= tries
        assert is_local == (len(looks) == 1)
    nonce.write_text(text)
    JoinedTransaction(invitation).roll_back()
    owner.roll_back()
    with pytest.raises(StorageError, match="a filesystem that all processes share"):
        JoinedTransaction(invitation)
    shutil.rmtree(tmp_path)
    with pytest.raises(StorageError, match="a filesystem that all processes share"):
        JoinedTransaction(invitation)


def test_a_wait_for_the_directory_can_be_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = begun(tmp_path / "a")
    other.roll_back()
    owner.roll_back()
    monkeypatch.setattr(transaction, "_is_on_local_filesystem", lambda _: False)
    with pytest.raises(RuntimeError):
        JoinedTransaction(other.invitation, check=check)


def check() -> None:
    raise RuntimeError


def test_a_late_writer_changes_nothing_after_a_roll_back(tmp_path: Path) -> None:
    save(tmp_path / "a", "old", 2)
    owner, other = begun(tmp_path / "a")
    writers = other.create([len(one) - own for one, own in zip(DATA, HALF, strict=True)])
    writers[0].write_from(HALF[0], region_of(DATA[0][HALF[0] :]))
    owner.roll_back()
    writers[0].finish()  # into a file that has no name any more
    with pytest.raises(StorageError, match="No such file"):
        writers[1].write_from(HALF[1], region_of(DATA[1][HALF[1] :]))
    other.roll_back()
    assert read(tmp_path / "a") == "old"
    assert names_in(tmp_path) == {"a"}


@pytest.mark.slow
def test_the_death_of_the_owner_is_found_in_spite_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has joined keeps no lock: the next save, or `stio gc`, undoes the owner's save."""
    destination = tmp_path / "a"
    save(destination, "old", 2)
    script = textwrap.dedent(
        f"""
        import sys, time
        from tests.storage.transactions import begin_local
        owner = begin_local({str(destination)!r}, num_shards=1)
        owner.create([{len(DATA[0])}], [{HALF[0]}])
        print(owner.invite().to_json().decode(), flush=True)
        sys.stdin.read()
        """
    )
    # A real interpreter without torch: SIGKILL must find the one that holds the lock.
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    try:
        other = JoinedTransaction(Invitation.from_json(process.stdout.readline()))
        (writer,) = other.create([len(DATA[0]) - HALF[0]])
        writer.write_from(HALF[0], region_of(DATA[0][HALF[0] :]))
        assert sweep(monkeypatch, destination).kept, "the owner lives"
        process.send_signal(signal.SIGKILL)
        process.wait()
        report = sweep(monkeypatch, destination)
        assert len(report.undone) == 1 and not report.kept
        assert read(destination) == "old" and names_in(tmp_path) == {"a"}
        assert not [name for name in names_in(destination) if name.startswith(".stio")]
        other.roll_back()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    assert SINGLE not in names_in(destination)


# Every call.


def shared_save(destination: Path, tag: str, num_shards: int) -> None:
    """Save as `save` does, by two processes; the second one writes columns of some pages and the end."""
    owner = begin_local(destination, num_shards=num_shards)
    other: JoinedTransaction | None = None
    try:
        shards = [content(tag, k) for k in range(num_shards)]
        cuts = [PAGE_BYTES + 8 * (k + 1) for k in range(num_shards)]
        writers = owner.create([len(one) for one in shards], [cut // 2 for cut in cuts])
        other = JoinedTransaction(owner.invite())
        others = other.create([len(one) - cut // 2 for one, cut in zip(shards, cuts, strict=True)])
        for data, cut, writer, second in zip(shards, cuts, writers, others, strict=True):
            width = cut // 8
            columns = [data[k : k + width] for k in range(0, cut, width)]
            writer.write_strided(0, region_of(b"".join(columns[::2])), width, 2 * width)
            second.write_strided(width, region_of(b"".join(columns[1::2])), width, 2 * width)
            second.write_from(cut, region_of(data[cut:]))
            writer.finish()
            second.finish()
        other.roll_back()
        for name, data in zip(owner.shard_names, shards, strict=True):
            owner.finish_file(name, len(data))
        owner.commit(index=index_of(owner, tag))
    finally:
        if other is not None:
            other.roll_back()
        owner.roll_back()


@pytest.mark.matrix
@pytest.mark.parametrize(("old", "new"), [(0, 2), (2, 2), (1, 1)])
def test_the_end_of_all_processes_at_any_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int, new: int
) -> None:
    found = []
    monkeypatch.setattr(files, "_O_DIRECT", 0)  # fewer calls
    for n in itertools.count(1, 3):
        destination = tmp_path / str(n) / "a"
        destination.parent.mkdir()
        if old:
            save(destination, "old", old)
        with monkeypatch.context() as patch:
            system = System(patch, kill_at=n)
            with suppress(Killed):
                shared_save(destination, "new", new)
            system.bury()
        read(destination)
        sweep(monkeypatch, destination)
        require_clean(destination, ["old" if old else None, "new"])
        found.append(read(destination))
        if system.hit is None:
            break
    turn = found.index("new")
    assert set(found[turn:]) == {"new"} and set(found[:turn]) == {"old" if old else None}


def test_an_error_at_any_call_of_any_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    destination = tmp_path / "a"
    save(destination, "old", 2)
    num_errors = 0
    for n in itertools.count(1, 3):
        with monkeypatch.context() as patch:
            system = System(patch, fail_at=n)
            with suppress(StorageError):
                shared_save(destination, "new", 2)
            assert system.num_open == 0
        sweep(monkeypatch, destination)  # what could not be removed
        require_clean(destination, ["old", "new"])
        if system.hit is None:
            break
        num_errors += 1
    assert num_errors > 20 and read(destination) == "new"
