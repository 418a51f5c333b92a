"""Every call that a save makes fails once, in every way; or is the last one that the process makes.

Run in a process that was started with the shim: `python -m crash.faults DIRECTORY`. It prints what it tried, a line
for each scenario, and everything that was not as promised.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import shutil
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from crash.generations import SCENARIOS, Scenario, Torn, grow_old, leftovers, save
from crash.shim import (
    ALL,
    FAIL_AFTER,
    KILL,
    KILL_AFTER,
    KINDS,
    MKDIR,
    OPEN,
    RENAME,
    RESERVE,
    SHORT,
    SYNC,
    UNLINK,
    WRITE,
    Fault,
    Shim,
)
from support import descriptors, eventually, num_threads

from stio.errors import CommitUncertainError, NoSpaceError, StorageError
from stio.storage.commit.recovery import collect_garbage

NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
HARMLESS = {errno.EINTR, errno.EOPNOTSUPP}
"""What a save gets over."""

SHORT_LIST = [
    *(Fault(WRITE, number) for number in (errno.EIO, errno.ENOSPC, errno.EINTR)),
    Fault(WRITE, how=SHORT),
    *(Fault(SYNC, number) for number in (errno.EIO, errno.EDQUOT)),
    Fault(SYNC, errno.EIO, FAIL_AFTER),
    Fault(RENAME, errno.EIO),
    Fault(RENAME, errno.EIO, FAIL_AFTER),
    *(Fault(RESERVE, number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EINTR, errno.EOPNOTSUPP)),
    Fault(UNLINK, errno.EIO),
    Fault(OPEN, errno.EMFILE),
    Fault(MKDIR, errno.ENOSPC),
    Fault(ALL, errno.EIO, lasting=True),
]
"""For every run of the tests."""

LONG_LIST = [
    *SHORT_LIST,
    *(Fault(WRITE, number) for number in (errno.EDQUOT, errno.EFBIG)),
    Fault(WRITE, how=SHORT, lasting=True),
    *(Fault(SYNC, number) for number in (errno.ENOSPC, errno.EINTR)),
    *(Fault(RENAME, number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES)),
    Fault(RENAME, errno.ENOSPC, FAIL_AFTER),
    Fault(RESERVE, errno.EIO),
    *(Fault(UNLINK, number) for number in (errno.EPERM, errno.EBUSY)),
    Fault(UNLINK, errno.EIO, FAIL_AFTER),
    Fault(UNLINK, errno.EIO, lasting=True),
    *(Fault(OPEN, number) for number in (errno.EIO, errno.ENOSPC, errno.ENFILE, errno.EACCES)),
    *(Fault(MKDIR, number) for number in (errno.EIO, errno.EDQUOT, errno.EROFS)),
    *(
        Fault(kinds, number, lasting=True)
        for kinds in (ALL, WRITE | SYNC | RENAME)
        for number in (errno.ENOSPC, errno.EROFS)
    ),
    *(Fault(SYNC | RENAME, errno.EIO, FAIL_AFTER, lasting=True),),
]
"""For `make crash`."""


class Broken(AssertionError):
    """A promise was not kept."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Broken(message)


class Bench:
    """One directory in which one scenario is played again and again.

    Args:
        directory: Empty.
        scenario: What is played.
    """

    def __init__(self, directory: Path, scenario: Scenario) -> None:
        self.directory, self.scenario = directory, scenario
        self.shim = Shim()
        self.outcomes: Counter[str] = Counter()
        self._template = directory / "template"
        self._stage = directory / "stage"
        self._template.mkdir()
        self._where = scenario.prepare(self._template)

    def prepare(self) -> Path:
        """Put the old checkpoint back; return the destination."""
        shutil.rmtree(self._stage, ignore_errors=True)
        shutil.copytree(self._template, self._stage)
        return self._stage / self.scenario.destination

    def play(self, fault: Fault, nth: int) -> bool:
        """Let the n-th call go wrong; return whether there was one."""
        where = self.prepare()
        before = descriptors(), num_threads()
        error: Exception | None = None
        self.shim.arm(self._stage, fault, nth)
        try:
            save(where, 2, self.scenario.after)
        except Exception as caught:
            error = caught.with_traceback(None)
        num_seen = self.shim.disarm()
        if num_seen < nth:
            require(error is None, f"untouched, but {error!r}")
            return False
        after = descriptors()
        require(after == before[0], f"descriptors: {sorted(set(after) - set(before[0]))}")
        require(eventually(lambda: num_threads() <= before[1]), "threads are left")
        self.outcomes[type(error).__name__ if error else "passed"] += 1
        self.require_recovery(where, *self.judge(error, fault))
        if nth % 3 == 0:  # what it meets after recovery was here is much the same each time
            self.require_save(where)
        return True

    def judge(self, error: Exception | None, fault: Fault) -> tuple[int | None, ...]:
        """Return the generations of which one has to stand, by what the save said."""
        if error is None:
            return (2,)
        require(isinstance(error, StorageError), f"{type(error).__name__}: {error}")
        assert isinstance(error, StorageError)
        require(fault.number not in HARMLESS and fault.how != SHORT, f"not got over: {error}")
        if isinstance(error, CommitUncertainError):
            # File by file the record commits, and it is not known whether it was written. If reads fail too, it is not
            # known whether the index was renamed.
            is_unknown = self.scenario.mixes or "it cannot be read whether" in str(error)
            return (self.scenario.old, 2) if is_unknown else (2,)
        require(error.errno == fault.number, f"errno {error.errno}: {error}")
        # To open a file that is there takes no room, so nobody asks whether that failed for room.
        if not fault.kinds & OPEN:
            require(isinstance(error, NoSpaceError) == (fault.number in NO_SPACE), f"{type(error).__name__}: {error}")
        if isinstance(error, NoSpaceError) and fault.kinds == RESERVE:
            require((error.needed_bytes or 0) > 100_000 and (error.free_bytes or 0) > 0, f"how much? {error}")
        return (self.scenario.old,)

    def require_recovery(self, where: Path, *expected: int | None) -> None:
        """Look, clean up, look again."""
        scenario = self.scenario
        first: int | None = -1
        if not scenario.mixes:
            first = scenario.look(where)
            require(first in expected, f"generation {first} stands, {expected} expected")
        self.clean(where)
        found = scenario.look(where)
        require(found in expected, f"generation {found} stands after cleaning, {expected} expected")
        require(scenario.mixes or found == first, f"generation {first} stood, after cleaning {found} does")

    def clean(self, where: Path) -> None:
        """Let recovery run, a while later."""
        grow_old(where)
        report = collect_garbage(where)
        require(not report.kept, f"kept: {report.kept}")
        require(not leftovers(where), f"left after cleaning: {leftovers(where)}")

    def require_save(self, where: Path) -> None:
        """Save once more."""
        save(where, 3, self.scenario.after)
        require(self.scenario.look(where) == 3, "the next save is not what stands")
        require(not leftovers(where), f"left after the next save: {leftovers(where)}")

    def kill(self, fault: Fault, nth: int, *, by_save: bool) -> bool:
        """Let a child die at its n-th call; return whether it did.

        Args:
            fault: When it dies.
            nth: Of its calls.
            by_save: Whether the next save cleans up, and not `collect_garbage`.
        """
        where = self.prepare()
        child = os.fork()
        if not child:
            try:
                self.shim.arm(self._stage, fault, nth)
                save(where, 2, self.scenario.after)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return False
        require(status == -9, f"the child ended with {status}")
        self.outcomes["killed"] += 1
        if by_save and not self.scenario.mixes:
            require(self.scenario.look(where) in (self.scenario.old, 2), "neither old nor new")
            grow_old(where)
            if where.exists() and self.scenario.old is None:
                self.clean(where)  # it was staged beside the destination, where the next save does not work
            self.require_save(where)
        else:
            self.require_recovery(where, self.scenario.old, 2)
        return True


def play_all(
    bench: Bench,
    faults: list[Fault],
    *,
    every_kill: bool,
    only: str | None = None,
    call: int | None = None,
    every: int = 1,
) -> Iterator[str]:
    """Try every fault at every call; give what was not as promised.

    Args:
        bench: Where.
        faults: What fails.
        every_kill: Whether the process is also killed after each call.
        only: Description of the one fault to try.
        call: Number of the one call to try.
        every: Of the calls from the third on, each fault hits only each n-th, different ones for different faults and
            scenarios. The process is killed four times as often.
    """
    kills = [Fault(ALL & ~OPEN, how=how) for how in ((KILL, KILL_AFTER) if every_kill else (KILL,))]
    for number, fault in enumerate([*faults, *kills]):
        if only not in (None, describe(fault)):
            continue
        step = -(-every // 4) if fault in kills else every

        def play(nth: int, fault: Fault = fault, step: int = step) -> bool:
            return bench.kill(fault, nth, by_save=bool(nth // step % 2)) if fault in kills else bench.play(fault, nth)

        shift = number + SCENARIOS.index(bench.scenario)
        numbers = [call] if call else [nth for nth in range(1, 400) if nth < 3 or (nth + shift) % step == 0]
        for problem in until_untouched(play, numbers):
            yield (
                f"{bench.scenario.name}, {describe(fault)}, {problem}\n    to repeat, with the shim: python -m crash.faults "
                f"DIRECTORY --long --scenario '{bench.scenario.name}' --fault '{describe(fault)}'"
            )


def until_untouched(play: Callable[[int], bool], numbers: Sequence[int]) -> Iterator[str]:
    for nth in numbers:
        try:
            if not play(nth):
                return
        except (Broken, Torn, OSError) as error:
            yield f"call {nth}: {type(error).__name__}: {error}"
    if len(numbers) > 1:
        yield "no end"


def describe(fault: Fault) -> str:
    if fault.how in (KILL, KILL_AFTER):
        return f"killed {'after' if fault.how == KILL_AFTER else 'at'}"
    names = [name for name, kind in KINDS.items() if fault.kinds & kind]
    what = "all calls" if fault.kinds == ALL else "/".join(names)
    way = {SHORT: "falls short", FAIL_AFTER: "is done and fails"}.get(fault.how, "fails")
    number = f" {errno.errorcode[fault.number]}" if fault.number else ""
    return f"{what} {way}{number}{' from there on' if fault.lasting else ''}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--long", action="store_true", help="all faults, not those of every test run alone")
    parser.add_argument("--scenario", action="append", help="name of a scenario; all of them if there is none")
    parser.add_argument("--fault", help="description of the one fault to try, as a finding names it")
    parser.add_argument("--call", type=int, help="number of the one call to try")
    parser.add_argument("--every", type=int, default=1, help="of the calls from the third on, hit each n-th only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
    logging.getLogger("stio").setLevel(logging.CRITICAL)
    gc.freeze()
    problems: list[str] = []
    outcomes: Counter[str] = Counter()
    for k, scenario in enumerate(SCENARIOS):
        if arguments.scenario and scenario.name not in arguments.scenario:
            continue
        directory = arguments.directory / str(k)
        directory.mkdir(parents=True)
        bench = Bench(directory, scenario)
        faults = LONG_LIST if arguments.long else SHORT_LIST
        chosen = {"only": arguments.fault, "call": arguments.call, "every": arguments.every}
        found = list(play_all(bench, faults, every_kill=arguments.long, **chosen))
        problems += found
        outcomes += bench.outcomes
        print(f"{scenario.name}: {dict(bench.outcomes)}, {len(found)} problems", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
    print(*(problem[:700] for problem in problems), sep="\n")
    killed = outcomes.pop("killed", 0)
    print(f"{outcomes.total():,} saves with a fault, {killed:,} killed at a call, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
