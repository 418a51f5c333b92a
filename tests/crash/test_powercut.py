"""Fault 109: a power cut after every system call of a save."""

from __future__ import annotations

import os
import random

import pytest
from crash import powercut
from crash.cuts import LIES, copy_image, cuts_of, refuse_direct, require_whole
from crash.generations import MANY, ONE, SCENARIOS, Torn, look, save, scenario, tensors_of
from crash.powercut import FILESYSTEMS, Camera, make_image, mounted

import stio
from stio.runtime.memory import allocate
from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage

FILESYSTEM = os.environ.get("STIO_CRASH_FILESYSTEM", "ext4")
"""`make nightly` runs the tests on others, too."""

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(powercut.why_not(FILESYSTEM) is not None, reason=str(powercut.why_not(FILESYSTEM))),
]


@pytest.fixture(scope="module")
def empty_image(tmp_path_factory):
    nbytes = FILESYSTEMS[FILESYSTEM].image_bytes
    return make_image(tmp_path_factory.mktemp("image") / "empty", nbytes, FILESYSTEM)


@pytest.fixture
def image(empty_image, tmp_path):
    return copy_image(empty_image, tmp_path / "image")


@pytest.fixture(params=["direct", "buffered"])
def way(request, monkeypatch):
    """Write past the page cache, or through it: there the data are dirty for long."""
    if request.param == "buffered":
        refuse_direct(monkeypatch)
    return request.param


@pytest.mark.matrix
@pytest.mark.parametrize("one", SCENARIOS, ids=lambda one: one.name)
def test_c109_power_cut_after_every_call(image, tmp_path, monkeypatch, way, one):
    if way == "buffered" and not one.distinct and "STIO_CRASH_KILLS" not in os.environ:
        pytest.skip("`make crash` does this one, too")
    camera = cuts_of(image, tmp_path, monkeypatch, one, filesystem=FILESYSTEM)
    assert camera.num_calls > 20
    assert len(camera.cuts) >= 4
    for cut in camera.cuts:
        require_whole(cut, tmp_path, one, FILESYSTEM)


@pytest.mark.matrix
@pytest.mark.parametrize("lie", LIES, ids=["of files", "of directories", "of both"])
def test_c109_negative_control(image, tmp_path, monkeypatch, lie):
    """Without its fsyncs the same save is torn or lost, and the check finds that."""
    refuse_direct(monkeypatch)
    one = scenario("many to many")
    found = []
    for cut in cuts_of(image, tmp_path, monkeypatch, one, filesystem=FILESYSTEM, lie=lie).cuts:
        try:
            require_whole(cut, tmp_path, one, FILESYSTEM)
        except Torn as error:
            found.append(str(error))
    assert found, "nothing was lost, so the check proves nothing"


@pytest.mark.slow
def test_c109_a_device_with_a_cache_of_its_own(image, tmp_path, monkeypatch):
    """What was written since the last flush may be lost in part, also of what was written past the page cache."""
    one = scenario("many to many")
    camera = cuts_of(image, tmp_path, monkeypatch, one, filesystem=FILESYSTEM, losses=random.Random(1))
    assert any("blocks are lost" in cut.after for cut in camera.cuts)
    for cut in camera.cuts:
        require_whole(cut, tmp_path, one, FILESYSTEM)


def test_c109_negative_control_of_a_device_with_a_cache(image, tmp_path, monkeypatch):
    """What was written past the page cache is lost there until the file is synced, and the copies show that."""
    region = allocate(1 << 20)
    with mounted(image, tmp_path / "disk", FILESYSTEM) as disk:
        fd = os.open(disk / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        for letter in (b"o", b"n"):
            region.write(0, letter * (1 << 20))
            if letter == b"n":
                camera = Camera(image, tmp_path, losses=random.Random(1))
                camera.watch(monkeypatch)
            assert calls.write(fd, region.address, 1 << 20, 0) == 1 << 20
            calls.fsync(fd)
        os.close(fd)
        camera.take("the file is synced", acknowledged=True)
    found = []
    for cut in camera.cuts:
        with mounted(cut.image, tmp_path / "after", FILESYSTEM) as disk:
            found.append((cut.after, set((disk / "file").read_bytes())))
    assert any("write" in after and ord("o") in letters for after, letters in found)
    assert found[-1] == ("the file is synced", {ord("n")})


@pytest.mark.slow
def test_c122_rotation_deletes_only_what_a_durable_one_replaces(image, tmp_path, monkeypatch):
    """At every power cut the newest acknowledged checkpoint, or a newer one, is there."""
    with mounted(image, tmp_path / "disk", FILESYSTEM) as disk:
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
        with mounted(cut.image, tmp_path / "after", FILESYSTEM) as disk:
            found = [look(path) for path in sorted(disk.glob("step-*"))]
            assert max((step for step in found if step), default=0) >= at_least, cut.after
        cut.image.unlink()


def test_c109_two_saves_one_after_the_other(image, tmp_path, monkeypatch):
    """What the first one left to be cleaned does not harm what the second one commits."""
    with mounted(image, tmp_path / "disk", FILESYSTEM) as disk:
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
        with mounted(cut.image, tmp_path / "after", FILESYSTEM) as disk:
            assert look(disk / "model") in allowed, cut.after
            collect_garbage(disk / "model")
            assert look(disk / "model") in allowed, cut.after
        cut.image.unlink()
