"""Which records recovery trusts, where every user may leave a staging directory."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from stio.storage.commit.files import Stamp, stamp_of
from stio.storage.commit.journal import JournalRecord
from stio.storage.commit.recovery import collect_garbage

pytestmark = pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs another user to be")

NOBODY = 65534


def forged(place: Path) -> Path:
    """Leave the record of a save that has committed and was to delete `victim`; return its staging directory."""
    (place / "victim").write_bytes(b"somebody's")
    (place / "bait").write_bytes(b"new")
    fd = os.open(place, os.O_RDONLY)
    stamps = {name: stamp_of(fd, name) for name in ("bait", "victim")}
    os.close(fd)
    staging = place / ".stio-0123456789"
    staging.mkdir()
    (staging / "lock").touch()
    intent = JournalRecord(
        version=1,
        save_id="0123456789",
        commit="file",
        last="bait",
        last_stamp=stamps["bait"] or Stamp(0, 0),
        last_sha256=None,
        old_sha256=None,
        moves={},
        unlink={"victim": stamps["victim"] or Stamp(0, 0)},
        notes=(),
    )
    (staging / "intent.json").write_bytes(msgspec.json.encode(intent))
    return staging


@pytest.mark.parametrize(
    ("mode", "owner", "obeyed"), [(0o1777, NOBODY, False), (0o1777, 0, True), (0o777, NOBODY, True)]
)
def test_a_record_of_another_user_in_a_directory_such_as_tmp(tmp_path, mode, owner, obeyed):
    place = tmp_path / "shared"
    place.mkdir()
    staging = forged(place)
    place.chmod(mode)
    for path in (*staging.iterdir(), staging):
        os.chown(path, owner, owner)
    report = collect_garbage(place)
    assert (place / "victim").exists() is not obeyed
    assert bool(report.finished) is obeyed
    assert bool(report.kept) is not obeyed


@pytest.mark.parametrize(
    ("mode", "owner", "obeyed"), [(0o1777, NOBODY, False), (0o1777, 0, True), (0o777, NOBODY, True)]
)
def test_names_that_another_user_plants_in_a_directory_such_as_tmp(tmp_path, mode, owner, obeyed):
    place = tmp_path / "shared"
    planted = place / ".stio-trash-photos"
    (planted / "a").mkdir(parents=True)
    (planted / "a" / "f").write_text("somebody's")
    place.chmod(mode)
    for path in (planted / "a" / "f", planted / "a", planted):
        os.chown(path, owner, owner)
    assert bool(collect_garbage(place, dry_run=True).kept) is not obeyed
    report = collect_garbage(place)
    assert planted.exists() is not obeyed
    assert bool(report.kept) is not obeyed
    assert bool(report.removed) is obeyed


def test_the_owner_of_the_directory_may_speak(tmp_path):
    place = tmp_path / "shared"
    place.mkdir()
    staging = forged(place)
    place.chmod(0o1777)
    for path in (*staging.iterdir(), staging, place):
        os.chown(path, NOBODY, NOBODY)
    assert collect_garbage(place).finished
    assert not (place / "victim").exists()
