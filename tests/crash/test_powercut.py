"""Fault 109: a power cut after every system call of a save."""

from __future__ import annotations

import errno
import os

import pytest
from crash import powercut
from crash.generations import MANY, ONE, SCENARIOS, Torn, grow_old, leftovers, look, save, scenario, tensors_of
from crash.powercut import Camera, make_image, mounted

import stio
from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(powercut.why_not() is not None, reason=str(powercut.why_not())),
]


@pytest.fixture(scope="module")
def empty_image(tmp_path_factory):
    return make_image(tmp_path_factory.mktemp("image") / "empty")


@pytest.fixture
def image(empty_image, tmp_path):
    copy = tmp_path / "image"
    with open(copy, "wb") as file:
        for offset, piece in powercut.pieces_of(empty_image):
            file.seek(offset)
            file.write(piece)
        file.truncate(powercut.IMAGE_BYTES)
    return copy


@pytest.fixture(params=["direct", "buffered"])
def way(request, monkeypatch):
    """Write past the page cache, or through it: there the data are dirty for long."""
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    return request.param


def refuse_direct(monkeypatch):
    plain = calls.open_file

    def open_file(name, flags, **keywords):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused by the test")
        return plain(name, flags, **keywords)

    monkeypatch.setattr(calls, "open_file", open_file)


def cuts_of(image, tmp_path, monkeypatch, one, *, lie=()):
    """Save over an old checkpoint, and return what each power cut would have left."""
    with mounted(image, tmp_path / "disk") as disk:
        one.prepare(disk)
        camera = Camera(image, tmp_path, lie=lie)
        with monkeypatch.context() as patch:
            camera.watch(patch)
            save(disk / one.destination, 2, one.after)
        camera.take("the save returned", acknowledged=True)
    return camera


def require_whole(cut, tmp_path, one):
    """Mount what was left and look; then let recovery run, and look again."""
    with mounted(cut.image, tmp_path / "after") as disk:
        where = disk / one.destination
        allowed = (2,) if cut.acknowledged else (one.old, 2)
        try:
            found = None if one.mixes else one.look(where)
            assert one.mixes or found in allowed, f"{found} stands"
            grow_old(where)
            collect_garbage(where)
            cleaned = one.look(where)
            assert cleaned in allowed, f"{cleaned} stands after cleaning"
            assert one.mixes or cleaned == found
            assert leftovers(where) == []
        except (AssertionError, OSError) as error:
            raise Torn(f"power cut after {cut.after}: {error}") from error
    cut.image.unlink()


@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_c109_power_cut_after_every_call(image, tmp_path, monkeypatch, way, one):
    if way == "buffered" and not one.distinct and "STIO_CRASH_KILLS" not in os.environ:
        pytest.skip("`make crash` does this one, too")
    camera = cuts_of(image, tmp_path, monkeypatch, one)
    assert camera.num_calls > 20
    assert len(camera.cuts) >= 4
    for cut in camera.cuts:
        require_whole(cut, tmp_path, one)


@pytest.mark.parametrize(
    "lie", [("fsync",), ("sync_directory",), ("fsync", "sync_directory")], ids=["of files", "of directories", "of both"]
)
def test_c109_negative_control(image, tmp_path, monkeypatch, lie):
    """Without its fsyncs the same save is torn or lost, and the check finds that."""
    refuse_direct(monkeypatch)
    one = scenario("many to many")
    found = []
    for cut in cuts_of(image, tmp_path, monkeypatch, one, lie=lie).cuts:
        try:
            require_whole(cut, tmp_path, one)
        except Torn as error:
            found.append(str(error))
    assert found, "nothing was lost, so the check proves nothing"


def test_c122_rotation_deletes_only_what_a_durable_one_replaces(image, tmp_path, monkeypatch):
    """At every power cut the newest acknowledged checkpoint, or a newer one, is there."""
    with mounted(image, tmp_path / "disk") as disk:
        cuts = []
        with monkeypatch.context() as patch:
            camera = Camera(image, tmp_path)
            with stio.sync.Saver(keep_last=1, **MANY) as saver:
                for step in (1, 2, 3):
                    from_here = len(camera.cuts)
                    if step == 2:
                        camera.watch(patch)
                    saver.save(tensors_of(step), disk / f"step-{step}").result()
                    cuts += [(cut, step - 1) for cut in camera.cuts[from_here:]]
                    if step > 1:
                        camera.take(f"step {step}", acknowledged=True)
                        cuts.append((camera.cuts[-1], step))
    assert len(cuts) > 8
    for cut, at_least in cuts:
        with mounted(cut.image, tmp_path / "after") as disk:
            found = [look(path) for path in sorted(disk.glob("step-*"))]
            assert max((step for step in found if step), default=0) >= at_least, cut.after
        cut.image.unlink()


def test_c109_two_saves_one_after_the_other(image, tmp_path, monkeypatch):
    """What the first one left to be cleaned does not harm what the second one commits."""
    with mounted(image, tmp_path / "disk") as disk:
        where = disk / "model"
        save(where, 1, ONE)
        camera = Camera(image, tmp_path)
        with monkeypatch.context() as patch:
            camera.watch(patch)
            save(where, 2, MANY)
            first = len(camera.cuts)
            camera.take("the first save returned", acknowledged=True)
            save(where, 3, ONE)
        camera.take("the second save returned", acknowledged=True)
    for k, cut in enumerate(camera.cuts):
        allowed = {1, 2} if k < first else {2, 3} if k < len(camera.cuts) - 1 else {3}
        with mounted(cut.image, tmp_path / "after") as disk:
            assert look(disk / "model") in allowed, cut.after
            collect_garbage(disk / "model")
            assert look(disk / "model") in allowed, cut.after
        cut.image.unlink()
