"""Saves on a small filesystem of their own, cut off after each system call; what is left must be a whole checkpoint.

    python -m crash.cuts FILESYSTEM DIRECTORY --rounds 3 --seed 1 --keep DIRECTORY [--scenario NAME]

A round is each scenario, written past the page cache and through it, with sizes of shards that are chosen at random. At
the end the same saves run without their syncs (negative controls): there losses must be found, or nothing is proved.
The image of each cut that was not as promised is kept. `--image FILE --scenario NAME` looks at such an image again.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.generations import SCENARIOS, Scenario, Torn, grow_old, leftovers, save, scenario
from crash.powercut import FILESYSTEMS, Camera, Cut, make_image, mounted, pieces_of, why_not

from stio.storage.commit import syscalls as calls
from stio.storage.commit.recovery import collect_garbage

SKIPPED = 77
"""Exit status where no filesystem can be mounted."""
_MAX_KEPT = 10
"""Images of one save that are kept."""
LIES = (("fsync",), ("sync_directory",), ("fsync", "sync_directory"))
WAYS = ("direct", "buffered")


def refuse_direct(patch: pytest.MonkeyPatch) -> None:
    """Let all writes go through the page cache, where data stay dirty for long."""
    plain = calls.open_file

    def open_file(name: str, flags: int, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused by the test")
        return plain(name, flags, **keywords)

    patch.setattr(calls, "open_file", open_file)


def copy_image(image: Path, target: Path) -> Path:
    """Copy a sparse file."""
    with open(target, "wb") as file:
        for offset, piece in pieces_of(image):
            file.seek(offset)
            file.write(piece)
        file.truncate(image.stat().st_size)
    return target


def cuts_of(
    image: Path,
    directory: Path,
    patch: pytest.MonkeyPatch,
    one: Scenario,
    *,
    filesystem: str = "ext4",
    lie: tuple[str, ...] = (),
    losses: random.Random | None = None,
) -> Camera:
    """Save over an old checkpoint, and return what each power cut would have left."""
    with mounted(image, directory / "disk", filesystem) as disk:
        one.prepare(disk)
        camera = Camera(image, directory, lie=lie, losses=losses)
        with patch.context() as inner:
            camera.watch(inner)
            save(disk / one.destination, 2, one.after)
        camera.take("the save returned", acknowledged=True)
    return camera


def require_whole(cut: Cut, directory: Path, one: Scenario, filesystem: str = "ext4") -> None:
    """Mount what was left and look; then let recovery run, and look again."""
    problem = None
    with mounted(cut.image, directory / "after", filesystem) as disk:
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
            problem = str(error)  # not the error: its frames hold open files, which keep the filesystem mounted
    if problem is not None:
        raise Torn(f"power cut after {cut.after}: {problem}")
    cut.image.unlink()


class Cutting:
    """Power cuts on one filesystem.

    Args:
        filesystem: Its name.
        directory: An empty directory for images.
        keep: Where images that are findings go.
    """

    def __init__(self, filesystem: str, directory: Path, keep: Path | None) -> None:
        self.filesystem, self.directory, self.keep = filesystem, directory, keep
        self.empty = make_image(directory / "empty", FILESYSTEMS[filesystem].image_bytes, filesystem)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []

    def play(self, one: Scenario, way: str, losses: random.Random | None, lie: tuple[str, ...] = ()) -> list[str]:
        """Save once, look at each cut; return what was not as promised."""
        place = self.directory / "place"
        place.mkdir()
        image = copy_image(self.empty, place / "image")
        found = []
        with pytest.MonkeyPatch.context() as patch:
            if way == "buffered":
                refuse_direct(patch)
            camera = cuts_of(image, place, patch, one, filesystem=self.filesystem, lie=lie, losses=losses)
        for cut in camera.cuts:
            before = None if lie or self.keep is None else copy_image(cut.image, place / "before")
            try:
                require_whole(cut, place, one, self.filesystem)
            except Exception as error:  # noqa: BLE001 - a mount that fails is one, too
                found.append(f"{self.filesystem}, {one.name}, {way}, {one.after}: {error}")
                if before is not None and self.keep is not None and len(found) <= _MAX_KEPT:
                    kept = self.keep / f"{self.filesystem}-{len(self.problems) + len(found)}.image"
                    copy_image(before, kept)
                    found[-1] += (
                        f"\n    to repeat: python -m crash.cuts {self.filesystem} DIRECTORY --image {kept} "
                        f"--scenario '{one.name}'{' --acknowledged' if cut.acknowledged else ''}"
                    )
        self.counts["controls" if lie else "cuts"] += len(camera.cuts)
        shutil.rmtree(place)
        return found

    def round(self, numbers: random.Random, scenarios: list[Scenario]) -> None:
        """Play each scenario in each way."""
        for one in scenarios:
            if "max_shard_size" in one.after and one.after["max_shard_size"] != "5GB" and not one.mixes:
                # Other shards, other names, and other blocks of the filesystem.
                one = replace(one, after={**one.after, "max_shard_size": numbers.randrange(20_500, 130_000)})
            for way in WAYS:
                self.problems += self.play(one, way, random.Random(numbers.random()))
                self.counts["saves"] += 1

    def control(self, numbers: random.Random) -> None:
        """Leave syncs out: losses must be found."""
        for lie in LIES:
            found = self.play(scenario("many to many"), "buffered", random.Random(numbers.random()), lie)
            self.counts["controls lost"] += len(found)
            if not found:
                self.problems.append(f"{self.filesystem}: nothing was lost without {' and '.join(lie)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("filesystem", choices=FILESYSTEMS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append", help="name of a scenario; all of them if there is none")
    parser.add_argument("--keep", type=Path, help="where images that are findings go")
    parser.add_argument("--image", type=Path, help="look at an image again")
    parser.add_argument("--acknowledged", action="store_true", help="of which the save had returned")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if reason := why_not(options.filesystem):
        print(f"{options.filesystem} is not tested: {reason}")
        return SKIPPED
    scenarios = [one for one in SCENARIOS if not options.scenario or one.name in options.scenario]
    if options.image:
        image = copy_image(options.image, options.directory / "image")
        require_whole(
            Cut(image, "the kept image", options.acknowledged), options.directory, scenarios[0], options.filesystem
        )
        print("the image is as promised")
        return 0
    numbers = random.Random(options.seed)
    cutting = Cutting(options.filesystem, options.directory, options.keep)
    for _ in range(options.rounds):
        cutting.round(numbers, scenarios)
        cutting.control(numbers)
    print(*(problem[:1000] for problem in cutting.problems), sep="\n")
    counts = cutting.counts
    print(
        f"{options.filesystem}: {counts['cuts']:,} power cuts in {counts['saves']} saves, {len(cutting.problems)} problems; "
        f"without syncs {counts['controls lost']} of {counts['controls']} cuts lost data"
    )
    return 1 if cutting.problems else 0


if __name__ == "__main__":
    sys.exit(main())
