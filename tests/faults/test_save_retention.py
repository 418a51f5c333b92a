"""Faults 223 to 226: what retention and cleanup delete, and where a save must not write.

`keep_last` counts steps. What was put there by others, or replaced since, is never deleted. A link in a sticky
directory is followed as far as the kernel's own rule allows. Filesystems in user space keep the names of open files.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.zygote import Zygote
from faults.save_helpers import (
    DAY_NS,
    INDEX,
    NOBODY,
    SHARDED,
    Tensors,
    generation,
    leftovers,
    mounted_in_memory,
    require_generation,
    script,
)
from support import nothing_left

import stio
from stio import sync
from stio.compat.safetensors import SafetensorError
from stio.compat.safetensors.torch import save_file

Snapshot = dict[str, bytes]


def snapshot(directory: Path) -> Snapshot:
    """Return all files below a directory with their bytes."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# 223: what `keep_last` counts.


def state_of(number: int) -> dict[str, Any]:
    """Return a nested state of a step."""
    return {"step": number, "moments": [torch.full((5,), float(number))]}


def require_state(path: Path, number: int) -> None:
    """Require that the state of a step stands at a path."""
    assert path.exists(), path
    found = sync.load_state(path)
    assert found["step"] == number
    assert torch.equal(found["moments"][0], state_of(number)["moments"][0])


LAYOUTS: dict[str, tuple[str, str, str]] = {
    "file in the directory": ("step-{}", "step-{}/optimizer.safetensors", "step-{}/model.safetensors"),
    "directory in the directory": ("step-{}", "step-{}/optimizer", "step-{}"),
    "two directories in one": ("step-{}/model", "step-{}/optimizer", "step-{}/model"),
    "two files in one": ("step-{}/w.safetensors", "step-{}/optimizer.safetensors", "step-{}/w.safetensors"),
    "files beside each other": ("step-{}.safetensors", "step-{}.optimizer.safetensors", "step-{}.safetensors"),
    "file beside the directory": ("step-{}", "step-{}.optimizer.safetensors", "step-{}"),
    "a folder for each part": ("model/step-{}", "optim/step-{}", "model/step-{}"),
    "a name for each part": ("model-{}.safetensors", "optim-{}.safetensors", "model-{}.safetensors"),
    "a name and a word for each part": ("model_step{}", "optim_step{}.safetensors", "model_step{}"),
    "files of two ranks": ("step-{}.0.safetensors", "step-{}.1.safetensors", "step-{}.0.safetensors"),
    "ranks in the names": ("w-{}_rank0.safetensors", "w-{}_rank1.safetensors", "w-{}_rank0.safetensors"),
    "a folder of other numbers": ("2024/run/model-{}", "2024/run/optim-{}", "2024/run/model-{}"),
    "a folder that is a number": ("{}/model", "{}/optim.safetensors", "{}/model"),
    "a folder with a loss": ("step-{}-loss-0.5/model_0", "step-{}-loss-0.5/model_1", "step-{}-loss-0.5/model_0"),
}
"""Where training programs save the weights of a step to, where its state, and where the weights are loaded from."""


@pytest.mark.matrix
@pytest.mark.parametrize("order", ["weights, state", "state, weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("keep_last", [1, 2])
def test_c223_a_step_of_weights_and_state_counts_once(tmp_path: Path, layout: str, order: str, keep_last: int) -> None:
    """Weights and state of the newest steps stand, and no file of an older one."""
    weights, state, weights_file = LAYOUTS[layout]
    with sync.Saver(keep_last=keep_last, durability="none") as saver:
        for step in range(4):
            for part in order.split(", "):
                if part == "weights":
                    saver.save(generation(step), tmp_path / weights.format(step))
                else:
                    saver.save_state(state_of(step), tmp_path / state.format(step))
    kept = range(4 - keep_last, 4)
    for step in kept:
        require_generation(tmp_path / weights_file.format(step), step)
        require_state(tmp_path / state.format(step), step)
    assert len(snapshot(tmp_path)) == 2 * keep_last


def test_c223_weights_alone_are_counted_as_ever(tmp_path: Path) -> None:
    with sync.Saver(keep_last=2) as saver:
        for step in range(4):
            saver.save(generation(step), tmp_path / f"step-{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.mark.parametrize("layout", ["2024/run/model-{}", "2024/run/b{}", "iter3-sweep/w{}", "exp-7/seed2/{}"])
def test_c223_numbers_of_folders_are_no_steps(tmp_path: Path, layout: str) -> None:
    with sync.Saver(keep_last=2, durability="none") as saver:
        for step in (100, 200, 300, 400):
            saver.save(generation(step), tmp_path / layout.format(step))
    left = sorted(path.name for path in (tmp_path / layout).parent.iterdir())
    assert left == [Path(layout.format(step)).name for step in (300, 400)]


def test_c223_a_step_that_is_saved_again_counts_once(tmp_path: Path) -> None:
    with sync.Saver(keep_last=2) as saver:
        for step in (0, 1, 1, 1):
            saver.save(generation(step), tmp_path / f"step-{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-0", "step-1"]


# 224: what is no longer the saver's.


def retire(directory: Path, between: Callable[[Path], object], destination: str = "step-1", **keywords: Any) -> Path:
    """Save to a destination, let something happen there, and save where retention deletes the first save.

    Returns:
        The first destination.
    """
    with nothing_left(), sync.Saver(keep_last=1, **keywords) as saver:
        saver.save(generation(1), directory / destination).result()
        between(directory / destination)
        saver.save(generation(2), directory / "step-2")
    require_generation(directory / "step-2", 2)
    assert leftovers(directory) == []
    return directory / destination


def test_c224_what_nobody_touched_goes(tmp_path: Path) -> None:
    """The other tests of 224 would pass if nothing was ever deleted."""
    for destination in ("step-1", "step-1.safetensors", "deep/step-1"):
        assert not retire(tmp_path, lambda path: None, destination).exists()
        assert not retire(tmp_path, lambda path: None, destination, hash="sha256").exists()


def test_c224_a_directory_that_was_there_before_loses_the_checkpoint_alone(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "tokenizer.json").write_text("{}")
    where = retire(tmp_path, lambda path: None, max_shard_size=SHARDED)
    assert snapshot(where) == {"tokenizer.json": b"{}"}


def files_of_theirs(path: Path) -> None:
    """Make a directory with files of another program."""
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    (path / "model.safetensors").write_bytes(b"written by another program")


def checkpoint_of_theirs(path: Path) -> None:
    """Make a directory with a checkpoint that another saver wrote."""
    sync.save(generation(7), path)


@pytest.mark.parametrize("make", [files_of_theirs, checkpoint_of_theirs, Path.mkdir])
def test_c224_a_directory_that_was_moved_away_and_made_anew(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """The best step is often moved to a place of its own. What takes its name is another directory."""
    after: Snapshot = {}

    def between(path: Path) -> None:
        path.rename(tmp_path / "best")
        make(path)
        after.update(snapshot(path))

    where = retire(tmp_path, between)
    assert where.is_dir()
    assert snapshot(where) == after
    require_generation(tmp_path / "best", 1)


def test_c224_the_parent_was_moved_away_and_made_anew(tmp_path: Path) -> None:
    def between(path: Path) -> None:
        path.parent.rename(tmp_path / "old-run")
        sync.save(generation(7), path)

    require_generation(retire(tmp_path, between, "run/step-1"), 7)
    require_generation(tmp_path / "old-run" / "step-1", 1)


def test_c224_files_were_added_to_the_directory(tmp_path: Path) -> None:
    """The checkpoint's own files go, what was added stays."""

    def between(path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")
        (path / "runs").mkdir()
        (path / "runs" / "events").write_text("mine")

    where = retire(tmp_path, between, max_shard_size=SHARDED)
    assert snapshot(where) == {"tokenizer.json": b"{}", "runs/events": b"mine"}


def test_c224_another_saver_saved_into_the_directory(tmp_path: Path) -> None:
    require_generation(retire(tmp_path, lambda path: sync.save(generation(7), path)), 7)


def test_c224_a_link_took_the_place_of_the_directory(tmp_path: Path) -> None:
    def between(path: Path) -> None:
        path.rename(tmp_path / "archive")
        path.symlink_to("archive")

    require_generation(retire(tmp_path, between), 1)


def test_c224_a_link_took_the_place_of_a_directory_that_was_there_before(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()

    def between(path: Path) -> None:
        path.rename(tmp_path / "archive")
        path.symlink_to("archive")

    retire(tmp_path, between, max_shard_size=SHARDED)
    require_generation(tmp_path / "archive", 1)


def write_in_place(path: Path) -> None:
    """Overwrite a file's bytes; its inode stays. The clock of a filesystem may not have ticked since the save."""
    before = path.stat()
    path.write_bytes(b"theirs")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))


def replace(path: Path) -> None:
    """Replace a file by another one, as careful programs do."""
    (path.parent / "new").write_bytes(b"theirs")
    (path.parent / "new").replace(path)


def save_again(path: Path) -> None:
    """Let another saver replace a file."""
    save_file(generation(7), path)


def replace_keeping_times(path: Path) -> None:
    """Replace a file by another one of its size and times; the inode alone differs."""
    before = path.stat()
    (path.parent / "new").write_bytes(b"t" * before.st_size)
    os.utime(path.parent / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    (path.parent / "new").replace(path)


CHANGES = [write_in_place, replace, save_again, replace_keeping_times]


@pytest.mark.parametrize("change", CHANGES)
def test_c224_a_file_of_this_name_that_others_wrote(tmp_path: Path, change: Callable[[Path], None]) -> None:
    after: Snapshot = {}

    def between(path: Path) -> None:
        change(path)
        after["step-1.safetensors"] = path.read_bytes()

    where = retire(tmp_path, between, "step-1.safetensors")
    assert where.is_file()
    assert where.read_bytes() == after["step-1.safetensors"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("fresh", [True, False], ids=["made by the save", "there before"])
def test_c224_a_file_in_the_directory_that_others_wrote(
    tmp_path: Path, change: Callable[[Path], None], fresh: bool
) -> None:
    after: Snapshot = {}
    if not fresh:
        (tmp_path / "step-1").mkdir()

    def between(path: Path) -> None:
        change(path / "model.safetensors")
        after.update(snapshot(path))

    assert snapshot(retire(tmp_path, between)) == after


def test_c224_shards_that_others_put_into_the_directory(tmp_path: Path) -> None:
    """Their names are a checkpoint's, and not this one's."""
    (tmp_path / "step-1").mkdir()
    theirs = "model-00007-of-00009.safetensors"
    where = retire(tmp_path, lambda path: (path / theirs).write_bytes(b"theirs"), max_shard_size=SHARDED)
    assert snapshot(where) == {theirs: b"theirs"}


def test_c224_an_index_that_others_wrote(tmp_path: Path) -> None:
    """Without its shards an index is worth nothing; still it is theirs."""
    (tmp_path / "step-1").mkdir()
    where = retire(tmp_path, lambda path: (path / INDEX).write_bytes(b"{}"), max_shard_size=SHARDED)
    assert snapshot(where).get(INDEX) == b"{}"


def test_c224_a_manifest_that_others_wrote(tmp_path: Path) -> None:
    """The save itself wrote none."""
    name = "step-1.safetensors.manifest.json"
    where = retire(tmp_path, lambda path: (tmp_path / name).write_bytes(b"theirs"), "step-1.safetensors")
    assert not where.exists()
    assert snapshot(tmp_path).get(name) == b"theirs"


# 225: links in sticky directories.
#
# proc(5), protected_symlinks: in a sticky directory that all may write, a link is followed only where its owner is the
# user who follows it, or the owner of the directory. The tests ask for this rule on every machine, also where the
# kernel's own setting is off: a save looks at links itself, so the rule is the save's to keep.

needs_another_user = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs another user's links")
"""Root alone gives a link to another user."""


@pytest.fixture
def sticky(tmp_path: Path) -> Path:
    """Return a directory such as /tmp."""
    directory = tmp_path / "sticky"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """Return a directory with a checkpoint, which no save through a planted link may change."""
    sync.save(generation(1), tmp_path / "victim")
    return tmp_path / "victim"


def plant(link: Path, target: Path, owner: int = NOBODY) -> Path:
    """Make a link that belongs to another user."""
    link.symlink_to(target)
    os.lchown(link, owner, owner)
    return link


def save(tensors: Tensors, where: Path) -> None:
    sync.save(tensors, where)


def save_hashed(tensors: Tensors, where: Path) -> None:
    sync.save(tensors, where, hash="sha256")


def save_by_drop_in(tensors: Tensors, where: Path) -> None:
    save_file(tensors, where)


def save_state(tensors: Tensors, where: Path) -> None:
    sync.save_state(tensors, where)


def save_by_saver(tensors: Tensors, where: Path) -> None:
    with sync.Saver() as saver:
        saver.save(tensors, where)


SAVES = [save, save_hashed, save_by_drop_in, save_state, save_by_saver]


def require_not_followed(write: Callable[[Tensors, Path], None], where: Path, link: Path, victim: Path) -> None:
    """Save; require that nothing behind a link changes, and a clear refusal or a checkpoint in the link's place."""
    before = snapshot(victim)
    error: Exception | None = None
    try:
        write(generation(2), where)
    except (stio.StioError, SafetensorError) as caught:
        error = caught
    assert snapshot(victim) == before
    if error is None:
        assert not stat.S_ISLNK(link.lstat().st_mode)
    else:
        assert isinstance(error, stio.StioError) != (write is save_by_drop_in)
        assert link.name in str(error) or where.name in str(error)
        assert link.is_symlink()
        assert [path.name for path in link.parent.iterdir()] == [link.name]


@needs_another_user
@pytest.mark.parametrize("write", SAVES)
def test_c225_a_planted_link_in_the_place_of_the_file(
    sticky: Path, victim: Path, write: Callable[[Tensors, Path], None]
) -> None:
    link = plant(sticky / "w.safetensors", victim / "model.safetensors")
    require_not_followed(write, link, link, victim)


@needs_another_user
def test_c225_a_planted_link_to_a_file_that_is_not_there(sticky: Path, victim: Path) -> None:
    link = plant(sticky / "w.safetensors", victim / "new.safetensors")
    require_not_followed(save, link, link, victim)


@needs_another_user
@pytest.mark.parametrize("write", [save, save_hashed, save_state, save_by_saver])
def test_c225_a_planted_link_in_the_place_of_the_directory(
    sticky: Path, victim: Path, write: Callable[[Tensors, Path], None]
) -> None:
    link = plant(sticky / "model", victim)
    require_not_followed(write, link, link, victim)


@needs_another_user
@pytest.mark.parametrize("below", ["model", "deep/er/model", "w.safetensors", "model/../w.safetensors"])
def test_c225_a_planted_link_on_the_way(sticky: Path, victim: Path, below: str) -> None:
    link = plant(sticky / "run", victim)
    require_not_followed(save, link / below, link, victim)


@needs_another_user
def test_c225_a_link_of_ones_own_that_leads_to_a_planted_one(tmp_path: Path, sticky: Path, victim: Path) -> None:
    link = plant(sticky / "w.safetensors", victim / "model.safetensors")
    (tmp_path / "own.safetensors").symlink_to(link)
    require_not_followed(save, tmp_path / "own.safetensors", link, victim)


@needs_another_user
def test_c225_retention_deletes_nothing_behind_a_planted_link(sticky: Path, victim: Path) -> None:
    """The link is planted in the place of a step that the saver wrote, so the name is the saver's own."""
    before = snapshot(victim)
    (sticky / "model").mkdir()
    with sync.Saver(keep_last=1) as saver:
        saver.save(generation(2), sticky / "model").result()
        shutil.rmtree(sticky / "model")
        plant(sticky / "model", victim)
        saver.save(generation(3), sticky / "step-3")
    assert snapshot(victim) == before


@pytest.mark.parametrize("name", ["w.safetensors", "model"])
def test_c225_a_link_of_ones_own_is_followed(tmp_path: Path, sticky: Path, name: str) -> None:
    (sticky / name).symlink_to(tmp_path / f"there-{name}")
    sync.save(generation(2), sticky / name)
    assert (sticky / name).is_symlink()
    require_generation(tmp_path / f"there-{name}", 2)


@needs_another_user
def test_c225_a_link_of_the_directorys_owner_is_followed(tmp_path: Path, sticky: Path) -> None:
    os.chown(sticky, NOBODY, NOBODY)
    link = plant(sticky / "w.safetensors", tmp_path / "there.safetensors")
    sync.save(generation(2), link)
    require_generation(tmp_path / "there.safetensors", 2)


@needs_another_user
@pytest.mark.parametrize("mode", [0o755, 0o1755, 0o777])
def test_c225_a_link_in_another_directory_is_followed(tmp_path: Path, sticky: Path, mode: int) -> None:
    """Sticky and open to all: it takes both."""
    sticky.chmod(mode)
    link = plant(sticky / "w.safetensors", tmp_path / "there.safetensors")
    sync.save(generation(2), link)
    require_generation(tmp_path / "there.safetensors", 2)


# 226: filesystems in user space.


@pytest.fixture(scope="module")
def in_user_space(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the root of a filesystem that keeps the names of open files, as those do that are made with libfuse."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("needs root and FUSE")
    with ExitStack() as stack:
        try:
            root = stack.enter_context(mounted_in_memory(zygote, tmp_path_factory.mktemp("user-space")))
        except OSError as error:
            pytest.skip(f"the system does not mount it: {error}")
        yield root


@pytest.fixture
def disk(in_user_space: Path, tmp_path: Path) -> Path:
    """Return a directory of a test's own there."""
    directory = in_user_space / tmp_path.name
    directory.mkdir()
    return directory


def hidden(directory: Path) -> list[str]:
    """Return what is left of a save, and the names that the filesystem keeps for open files."""
    return leftovers(directory) + [path.name for path in directory.rglob(".fuse_hidden*")]


@pytest.mark.matrix
@pytest.mark.root
@pytest.mark.parametrize("name", ["w.safetensors", "model"])
@pytest.mark.parametrize("keywords", [{}, {"hash": "sha256"}], ids=["plain", "hashed"])
def test_c226_no_staging_directory_stays(disk: Path, name: str, keywords: dict[str, Any]) -> None:
    for number in (1, 2):
        sync.save(generation(number), disk / name, **keywords)
        require_generation(disk / name, number)
        assert hidden(disk) == []


@pytest.mark.root
def test_c226_no_staging_directory_stays_of_shards(disk: Path) -> None:
    """The second generation is staged inside the directory, beside the first one."""
    for number in (1, 2):
        sync.save(generation(number), disk / "model", max_shard_size=SHARDED)
        require_generation(disk / "model", number)
        assert hidden(disk) == []


@pytest.mark.root
@pytest.mark.parametrize("name", ["w.safetensors", "model"])
def test_c226_no_staging_directory_stays_of_a_save_that_failed(disk: Path, name: str) -> None:
    with pytest.raises(ZeroDivisionError):
        sync.save({"a": stio.LazyTensor(torch.float32, (3,), lambda: 1 / 0)}, disk / name)
    assert hidden(disk) == []
    assert not (disk / name).exists()


@pytest.mark.root
def test_c226_no_directory_stays_of_what_retention_deletes(disk: Path) -> None:
    with sync.Saver(keep_last=1, durability="none") as saver:
        for step in range(3):
            saver.save(generation(step), disk / f"step-{step}")
    assert sorted(path.name for path in disk.iterdir()) == ["step-2"]


@pytest.mark.slow
@pytest.mark.root
def test_c226_two_savers_that_clean_up_at_once(zygote: Zygote, disk: Path) -> None:
    """What a dead saver left, and perhaps one that lives, is old enough to go, and vanishes while this one removes it."""
    where = disk / "w.safetensors"
    found = zygote.run(script("saver_that_gets(signal.SIGKILL, Path(sys.argv[1]))"), where)
    assert found.returncode == 0, found.stderr
    sync.save(generation(1), where)
    old = time.time_ns() - 2 * DAY_NS
    left = [disk / name for name in leftovers(disk)]
    assert left
    for path in [below for directory in left for below in (*directory.rglob("*"), directory)]:
        os.utime(path, ns=(old, old))
    sync.save(generation(2), where)
    require_generation(where, 2)
    assert [path for path in left if path.exists()] == []


@pytest.mark.parametrize("name", ["model", "w.safetensors"])
def test_c226_two_savers_that_make_the_parents_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On every filesystem. The other saver makes the directory right after this one has looked for it."""
    parent, plain = tmp_path / "run", os.path.isdir

    def isdir(path: Any) -> bool:
        found = plain(path)
        if os.fspath(path) == str(parent) and not found:
            parent.mkdir()
        return found

    monkeypatch.setattr(os.path, "isdir", isdir)
    sync.save(generation(1), parent / name)
    require_generation(parent / name, 1)
