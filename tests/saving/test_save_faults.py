"""Saving with obstacles: the interpreter's end, signals, readers, other savers, modes, odd targets."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from crash.generations import (
    HASHED,
    MANY,
    ONE,
    fast_directory,
    grow_old,
    leftovers,
    look,
    look_by_stio,
    save,
    tensors_of,
)
from crash.held_saves import script
from crash.powercut import why_not
from support import eventually, nothing_left, require_equal

import stio
from stio import sync
from stio.errors import ConcurrentSaveError, StorageError
from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage

NAMES = ["model", "model.safetensors"]


@pytest.fixture(params=NAMES)
def where(request, tmp_path):
    path = tmp_path / request.param
    save(path, 1, MANY)
    return path


def require_stands(where, generation):
    assert look(where) == look_by_stio(where) == generation
    assert leftovers(where) == []


# 117: saving over what is being read.


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["map", "lazy", "copy"])
def test_c117_over_the_file_that_was_loaded(where, memory):
    """Tensors that were loaded keep their bytes, and may themselves be what is saved."""
    loaded = sync.load(where, memory=memory)
    changed = {name: tensor + 1 if name == "layer.0" else tensor for name, tensor in loaded.items()}
    for _ in range(3):
        sync.save(changed, where, **({} if where.suffix else MANY))
    require_equal(loaded, tensors_of(1))
    require_equal(sync.load(where), {**tensors_of(1), "layer.0": tensors_of(2)["layer.0"]})
    assert leftovers(where) == []


def test_c117_over_the_file_that_others_map(where):
    files = [where] if where.suffix else sorted(where.glob("*.safetensors"))
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(safetensors.safe_open(str(file), framework="np")) for file in files]
        save(where, 2, MANY)
        for file in opened:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                assert np.all(file.get_tensor(name) == 1)
    require_stands(where, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["map", "lazy", "copy"])
def test_c117_under_a_checkpoint_that_is_open(where, memory):
    with nothing_left():
        with sync.open(where, memory=memory, budget_bytes=30_000) as checkpoint:
            stream = checkpoint.stream()
            found = dict([next(stream)])
            save(where, 2, MANY)
            found |= dict(stream)
            require_equal(found, tensors_of(1))
            require_equal(checkpoint.load(), tensors_of(1))
            stream.close()
        del found
        require_stands(where, 2)


# 114: several savers.


@pytest.fixture
def gate(monkeypatch):
    """Holds the first thread that syncs a file."""
    reached, opened, plain = threading.Event(), threading.Event(), calls.fsync
    first = threading.Lock()

    def fsync(fd):
        if first.acquire(blocking=False):
            reached.set()
            assert opened.wait(20)
        plain(fd)

    monkeypatch.setattr(calls, "fsync", fsync)
    yield reached, opened
    opened.set()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("old", [None, 1])
def test_c114_another_save_commits_meanwhile(tmp_path, gate, name, old):
    where, (reached, opened) = tmp_path / name, gate
    if old:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calls, "fsync", os.fsync)
            save(where, 1, MANY)
    with nothing_left():
        with sync.Saver() as saver:
            pending = saver.save(tensors_of(2), where, **({} if where.suffix else MANY))
            assert reached.wait(20)
            save(where, 3, MANY)
            opened.set()
            with pytest.raises(ConcurrentSaveError) as caught:
                pending.result()
        assert caught.value.path == str(where)
    require_stands(where, 3)


@pytest.mark.slow
def test_c114_two_processes_and_one_directory(where, zygote):
    """Each save wins whole or raises `ConcurrentSaveError`; one at least wins; nothing is left."""
    racer = """
        calls.fsync = plain
        first, won = int(sys.argv[2]), 0
        print("up", flush=True)
        assert eventually((where.parent / "go").exists, 20)
        for generation in range(first, 60, 2):
            try:
                save(where, generation, MANY)
                won += 1
            except stio.ConcurrentSaveError:
                pass
        print(won)
    """
    racers = [zygote.start(script(racer), where, first) for first in (2, 3)]
    assert eventually(lambda: all(racer.stdout() for racer in racers))
    go = where.parent / "go"
    go.touch()
    ended = [racer.wait() for racer in racers]
    assert [one.returncode for one in ended] == [0, 0], ended
    go.unlink()
    won = [int(one.stdout.split()[-1]) for one in ended]
    assert sum(won) >= 29
    assert look(where) in range(2, 60)
    collect_garbage(where)
    require_stands(where, look(where))


# 116: targets.


def refused(where, number, **keywords):
    with nothing_left(), pytest.raises(StorageError) as caught:
        sync.save(tensors_of(2), where, **keywords)
    assert caught.value.errno == number, caught.value
    assert str(where) in str(caught.value)
    return caught.value


def test_c116_a_file_where_a_directory_shall_be(tmp_path):
    (tmp_path / "model").write_text("mine")
    refused(tmp_path / "model", errno.ENOTDIR)
    refused(tmp_path / "model" / "below", errno.ENOTDIR)
    assert (tmp_path / "model").read_text() == "mine"
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["~/model", "~/model.safetensors", "~"])
def test_c116_a_path_below_a_home_directory(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"os\.path\.expanduser"):
        save(Path(name), 1, ONE)
    assert not os.listdir()
    os.mkdir("~")  # it is the name of a directory like any other
    save(Path(name), 1, ONE)
    require_stands(tmp_path / name, 1)


def test_c116_a_directory_where_a_file_shall_be(tmp_path):
    (tmp_path / "model.safetensors").mkdir()
    refused(tmp_path / "model.safetensors", errno.EISDIR)
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", NAMES)
def test_c116_what_is_neither(tmp_path, name):
    os.mkfifo(tmp_path / name)
    refused(tmp_path / name, errno.EINVAL)
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize(("keywords", "taken"), [({}, "model"), ({"max_shard_size": 8}, "model-00002-of-00002")])
def test_c116_what_is_no_file_under_a_name_that_is_needed(tmp_path, make, keywords, taken):
    """Neither destroyed nor called a concurrent save."""
    make(tmp_path / f"{taken}.safetensors")
    with pytest.raises(StorageError, match="what has it is not a file"):
        stio.sync.save({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path, **keywords)
    assert not (tmp_path / f"{taken}.safetensors").is_file()
    assert os.listdir(tmp_path) == [f"{taken}.safetensors"]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_c116_a_link_is_followed_and_stays(tmp_path, name, there):
    real, link = tmp_path / "disk" / name, tmp_path / name
    real.parent.mkdir()
    if there:
        save(real, 1, MANY)
    link.symlink_to(real)
    save(link, 2, MANY)
    assert link.is_symlink()
    assert not real.is_symlink()
    require_stands(real, 2)
    assert os.listdir(tmp_path) == sorted({"disk", name}, key=os.listdir(tmp_path).index)


def test_c116_a_link_that_leads_to_itself(tmp_path):
    (tmp_path / "model").symlink_to(tmp_path / "model")
    with pytest.raises(StorageError):
        sync.save(tensors_of(2), tmp_path / "model")


@pytest.mark.root
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("name", NAMES)
def test_c116_a_filesystem_that_is_read_only(tmp_path, name):
    disk = tmp_path / "disk"
    where = disk / name
    disk.mkdir()
    save(where, 1, MANY)
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        error = refused(where, errno.EROFS)
        assert "writable" in str(error)
        refused(disk / "fresh", errno.EROFS)
        assert look(where) == look_by_stio(where) == 1
        with contextlib.suppress(StorageError):
            collect_garbage(where)
    finally:
        subprocess.run(["umount", disk], check=True)
    require_stands(where, 1)


@pytest.mark.matrix
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
@pytest.mark.parametrize("name", NAMES)
def test_c116_a_directory_of_another_user(tmp_path, zygote, name):
    """Its user may read and not write: the save is refused, and nothing is changed."""
    parent = fast_directory()
    if parent is None:
        pytest.skip("needs a directory that all may read")
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        where = directory / name
        save(where, 1, MANY)
        for path in [directory, *directory.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        found = zygote.run(
            script(
                """
                calls.fsync = plain
                os.setresuid(65534, 65534, 65534)
                try:
                    save(where, 2, MANY)
                except stio.StorageError as error:
                    print(error.errno, "writable" in str(error))
                """
            ),
            where,
        )
        assert (found.returncode, found.stdout) == (0, f"{errno.EACCES} True\n"), found.stderr
        require_stands(where, 1)
    finally:
        shutil.rmtree(directory)


# 118: umask and modes.


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_c118_new_files_go_by_the_umask(tmp_path, umask):
    save(tmp_path / "deep" / "model", 1, HASHED)
    save(tmp_path / "one.safetensors", 1, {"hash": "sha256"})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5 + 2
    assert {mode_of(path) for path in files} == {0o640}
    assert {mode_of(path) for path in (tmp_path / "deep", tmp_path / "deep" / "model")} == {0o750}


@pytest.mark.matrix
@pytest.mark.parametrize("keywords", [MANY, ONE, HASHED], ids=["many", "one", "hashed"])
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o444, 0o666])
def test_c118_a_replaced_checkpoint_keeps_its_modes(tmp_path, umask, keywords, mode):
    where = tmp_path / "model"
    save(where, 1, keywords)
    where.chmod(0o2775)
    for path in where.iterdir():
        path.chmod(mode)
    for generation in (2, 3):
        save(where, generation, keywords)
        assert {mode_of(path) for path in where.iterdir()} == {mode}
        assert mode_of(where) == 0o2775
    require_stands(where, 3)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o444])
def test_c118_a_replaced_file_keeps_its_mode(tmp_path, umask, mode):
    where = tmp_path / "model.safetensors"
    save(where, 1, {"hash": "sha256"})
    for path in tmp_path.iterdir():
        path.chmod(mode)
    save(where, 2, {"hash": "sha256"})
    assert {mode_of(path) for path in tmp_path.iterdir()} == {mode}
    require_stands(where, 2)


def test_other_files_are_not_touched(tmp_path):
    where = tmp_path / "model"
    save(where, 1, MANY)
    others = {"config.json": "{}", "notes.txt": "mine", "adapter.safetensors.bak": "x", "sub/deep.bin": "y"}
    for name, text in others.items():
        (where / name).parent.mkdir(exist_ok=True)
        (where / name).write_text(text)
    for generation, keywords in enumerate([ONE, MANY, HASHED, ONE], 2):
        save(where, generation, keywords)
    assert {name: (where / name).read_text() for name in others} == others
    require_stands(where, 5)


def test_c108_a_lockless_staging_directory_is_reclaimed_later(tmp_path):
    """Its owner died before it took the lock; for a minute it might be about to."""
    where = tmp_path / "model"
    save(where, 1, MANY)
    (where / ".stio-0123456789").mkdir()
    save(where, 2, MANY)
    assert (where / ".stio-0123456789").exists()
    grow_old(where)
    save(where, 3, MANY)
    require_stands(where, 3)
    assert eventually(lambda: not list(Path(where).glob(".stio-*")))
    assert not torch.equal(sync.load(where)["layer.0"], tensors_of(2)["layer.0"])
    assert stio.ConcurrentSaveError is ConcurrentSaveError
