"""Faults 99, 103 and 104: filesystems that are really full, and limits of the process."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess

import pytest
import torch
from crash import powercut
from crash.generations import HASHED, MANY, ONE, leftovers, look, look_by_stio, save
from crash.powercut import make_image, mounted
from support import hook_writes, nothing_left

from stio import sync
from stio.errors import NoSpaceError
from stio.storage.commit.recovery import collect_garbage

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(powercut.why_not() is not None, reason=str(powercut.why_not())),
]

TOO_MUCH = {"w": torch.ones(3 << 20, dtype=torch.uint8), "x": torch.ones(3 << 20, dtype=torch.uint8)}


@contextlib.contextmanager
def tmpfs(where, options):
    where.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", where], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


@pytest.fixture(params=[pytest.param("tmpfs", marks=needs_root), pytest.param("ext4", marks=needs_root)])
def small(request, tmp_path):
    """A filesystem with 2 MB of room."""
    if request.param == "tmpfs":
        with tmpfs(tmp_path / "disk", "size=2m") as disk:
            yield disk
        return
    with mounted(make_image(tmp_path / "image", 16 << 20), tmp_path / "disk") as disk:
        (disk / "lost+found").rmdir()
        found = os.statvfs(disk)
        filler = found.f_bavail * found.f_frsize - (2 << 20)
        with open(disk / "filler", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, filler)
        yield disk


@pytest.fixture
def written(monkeypatch):
    """Writes that were begun."""
    seen = []
    hook_writes(lambda: seen.append(True), monkeypatch.setattr)
    return seen


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["model", "model.safetensors"])
@pytest.mark.parametrize("old", [None, 1])
def test_c103_a_full_disk(small, written, name, old):
    """Known before the first byte: how much is needed, how much there is; the old checkpoint stands."""
    where = small / name
    if old:
        save(where, 1, MANY)
    before = sorted(path for path in small.rglob("*") if path.is_file())
    written.clear()
    with nothing_left(), pytest.raises(NoSpaceError) as caught:
        sync.save(TOO_MUCH, where)
    error = caught.value
    assert written == []
    assert error.errno == errno.ENOSPC
    assert error.needed_bytes > 6 << 20
    assert 0 < error.free_bytes < 3 << 20
    assert f"{error.needed_bytes:,}" in str(error)
    assert sorted(path for path in small.rglob("*") if path.is_file()) == before
    assert look(where) == look_by_stio(where) == old
    save(where, 2, MANY)  # what fits is saved
    assert look(where) == 2


def test_c103_room_for_the_new_beside_the_old_is_needed(small, written):
    """An overwrite needs room for both; where there is none, the old one stays."""
    where = small / "model"
    old = {"w": torch.zeros(1_200_000, dtype=torch.uint8)}
    sync.save(old, where)
    written.clear()
    with pytest.raises(NoSpaceError):
        sync.save({"w": torch.ones(1_200_000, dtype=torch.uint8)}, where)
    assert written == []
    assert not sync.load(where, memory="copy")["w"].any()
    assert leftovers(where) == []


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_c103_ever_less_room(small, name):
    """The disk is filled up to k KiB, for every k around what the save takes: whole old or whole new, nothing left."""
    where = small / name
    keywords = MANY if name == "model" else ONE
    save(where, 1, keywords)
    generation, outcomes = 1, set()
    for free in range(0, 240 << 10, 8 << 10):
        filler = small / "more"
        with open(filler, "wb") as file:
            found = os.statvfs(small)
            with contextlib.suppress(OSError):
                os.posix_fallocate(file.fileno(), 0, max(found.f_bavail * found.f_frsize - free, 1))
        try:
            save(where, generation + 1, keywords)
            generation += 1
            outcomes.add("saved")
        except NoSpaceError:
            outcomes.add("refused")
        filler.unlink()
        assert look(where) == generation, free
        collect_garbage(where)
        assert leftovers(where) == []
    assert outcomes == {"saved", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("resource", ["inodes"])
@pytest.mark.root
@pytest.mark.skipif(powercut.why_not() is not None, reason=str(powercut.why_not()))
def test_c103_no_inodes(tmp_path, resource):
    """Room for bytes, and none for files: for every number of them."""
    with tmpfs(tmp_path / "disk", "size=8m,nr_inodes=40") as disk:
        where = disk / "model"
        save(where, 1, HASHED)
        generation, outcomes = 1, set()
        fillers = []
        with contextlib.suppress(OSError):
            for k in range(100):
                (disk / f"filler-{k}").touch()
                fillers.append(disk / f"filler-{k}")
        while fillers:
            fillers.pop().unlink()
            try:
                save(where, generation + 1, HASHED)
                generation += 1
                outcomes.add("saved")
            except NoSpaceError as error:
                assert error.errno == errno.ENOSPC
                outcomes.add("refused")
            assert look(where) == look_by_stio(where, verify=True) == generation
            assert leftovers(where) == []
        assert outcomes == {"saved", "refused"}


PRELUDE = """
import errno, os, resource, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import stio
from stio import sync
from crash.generations import MANY, grow_old, leftovers, look, save
from stio.storage.commit.recovery import collect_garbage
from support import descriptors
where = Path(sys.argv[1]) / "model"
save(where, 1, MANY)
"""


def run(zygote, code, *arguments):
    found = zygote.run(PRELUDE + code, *arguments)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("nbytes", [1, 4096, 30_000, 39_999])
def test_c103_rlimit_fsize(tmp_path, zygote, nbytes):
    """A file larger than the process may write: refused when its space is reserved, no signal, no byte."""
    run(
        zygote,
        f"""
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, ({nbytes}, hard))
before = descriptors()
try:
    save(where, 2, MANY)
except stio.NoSpaceError as error:
    assert error.errno == errno.EFBIG, error
    assert error.needed_bytes > 120_000, error
    assert "ulimit -f" in str(error), error
else:
    raise AssertionError
assert descriptors() == before
assert look(where) == 1 and leftovers(where) == []
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print("done")
""",
        tmp_path,
    )


@pytest.mark.slow
def test_c99_c103_rlimit_nofile(tmp_path, zygote):
    """However few descriptors there are: saved, or a clear error; nothing is lost, and none stays open."""
    run(
        zygote,
        """
highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
before, generation, outcomes = descriptors(), 1, set()
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
for spare in range(0, 40):
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, hard))
    try:
        save(where, generation + 1, {"max_shard_size": 21_000})
        generation += 1
        outcomes.add("saved")
    except stio.StorageError as error:
        assert error.errno == errno.EMFILE, error
        outcomes.add("refused")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert descriptors() == before, spare
    assert look(where) == generation, spare
    grow_old(where)
    collect_garbage(where)
    assert leftovers(where) == [], spare
assert outcomes == {"saved", "refused"}, outcomes
print("done")
""",
        tmp_path,
    )


@pytest.mark.slow
def test_c99_hundreds_of_shards_need_no_hundreds_of_descriptors(tmp_path, zygote):
    run(
        zygote,
        """
highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 40, hard))
many = {f"{k:03d}": torch.full((300,), k, dtype=torch.int32) for k in range(300)}
result = sync.save(many, where, max_shard_size=1200)
assert len(result.files) == 300
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
assert all(torch.equal(many[name], tensor) for name, tensor in sync.load(where).items())
print("done")
""",
        tmp_path,
    )
