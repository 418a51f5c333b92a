"""What each test costs: seconds of processor time, those of its child processes included, and seconds on the clock.

`tests/run.py` sets STIO_TEST_COSTS to a directory, in which each process of pytest writes a line for each test. A test
that takes far more processor time than `MAX_CPU_SECONDS` fails, unless `@pytest.mark.costly(REASON)` says why it must.
Fixtures that tests share, and imports, do not count for that: the first test that needs one is not to blame.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

MAX_CPU_SECONDS = 2.0
BUSY_FACTOR = 3.0
"""A test without a reason is listed at the end of the run from `MAX_CPU_SECONDS` on, and fails above so many times that.
The margin is wide, so that no test fails because other processes use the same cores."""
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Cost:
    """What one test took."""

    test: str
    """Its node id."""
    cpu_seconds: float
    """Processor time without that of imports, and of fixtures that it shares with other tests."""
    seconds: float
    """Time on the clock, with all that was set up and torn down for it."""
    has_reason: bool
    """Whether it has the mark `costly`."""

    @property
    def file(self) -> str:
        """The path of its file."""
        return self.test.partition("::")[0]


def read(folder: Path) -> list[Cost]:
    """Return what the tests of a run took."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return [Cost(**json.loads(line)) for line in lines]


class Recorder:
    """The plugin of pytest.

    Args:
        folder: Where to write.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{os.getpid()}.jsonl"
        self._began = self._cpu_began = self._shared = self._cpu_seconds = 0.0
        self._has_reason = False
        self._is_apart = False
        """Whether a fixture or an import is under way whose time is noted when it ends, with all that it needs."""
        find_and_load = importlib._bootstrap._find_and_load  # type: ignore[attr-defined]  # called for what is not there yet

        def noted(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                return find_and_load(*arguments)
            with self._apart():
                return find_and_load(*arguments)

        importlib._bootstrap._find_and_load = noted  # type: ignore[attr-defined]

    @contextmanager
    def _apart(self) -> Iterator[None]:
        if self._is_apart:
            yield
            return
        self._is_apart, began = True, cpu_seconds()
        try:
            yield
        finally:
            self._is_apart = False
            self._shared += cpu_seconds() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        with nullcontext() if fixturedef.scope == "function" else self._apart():
            return (yield)

    def pytest_runtest_logstart(self) -> None:
        self._began, self._cpu_began, self._shared = time.perf_counter(), cpu_seconds(), 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail if it took too long."""
        try:
            yield
        finally:
            self._cpu_seconds = cpu_seconds() - self._cpu_began - self._shared
        self._has_reason = item.get_closest_marker("costly") is not None
        if self._cpu_seconds > MAX_CPU_SECONDS * BUSY_FACTOR and not self._has_reason:
            pytest.fail(
                f"it took {self._cpu_seconds:.1f} s of processor time: more than {MAX_CPU_SECONDS:g} s need a reason, in "
                "@pytest.mark.costly(REASON)",
                pytrace=False,
            )

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        with open(self._path, "a") as file:
            seconds = time.perf_counter() - self._began
            cost = Cost(nodeid, round(self._cpu_seconds, 3), round(seconds, 3), self._has_reason)
            print(json.dumps(asdict(cost)), file=file)
        self._cpu_seconds = 0.0


def cpu_seconds() -> float:
    """Return the processor time of this process, and of all that it has started and that these have started."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system + _seconds_of_children(os.getpid())


def _seconds_of_children(pid: int) -> float:
    """Return the processor time of the processes that the main thread of a process has started and that have not ended."""
    seconds = 0.0
    with suppress(OSError):  # it has ended
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            # Of itself, and of its children that have ended; proc_pid_stat(5)
            seconds += sum(map(int, fields[11:15])) / _TICKS_PER_SECOND + _seconds_of_children(int(child))
    return seconds
