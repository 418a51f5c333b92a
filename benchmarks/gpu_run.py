"""Run a stage of the GPU benchmark: rounds of turns, each turn a process of its own with a limit of time.

What is measured may happen once in a process, and a contestant may fail in any way: it costs its own turn. A process
that does not end within its limit is killed. Each result is in the file as soon as it exists.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import gpu_results, machine
from benchmarks.gpu_child import NO_DEVICE_STATUS, NoDevice, Options, Stage
from benchmarks.runs import Record
from benchmarks.suite import Case, Entry

LOG_NAME = "log.txt"
TIME_OVER = "the stage's time was over"
TURN_SECONDS = 60.0
"""A turn's process is killed after so long, if its entry has no limit of its own."""
TMPFS = Path("/dev/shm")
_PREPARE_SECONDS = 150.0
"""A limit, also for a slow disk and for the compilation of the simulated device."""
_DUMP_SECONDS, _END_SECONDS = 1.0, 10.0
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that ended."""

    status: int | None  # None if it was killed at its limit
    output: list[str]  # lines of its stdout
    error: str  # the last line of its stderr

    @property
    def how(self) -> str:
        """Say how it failed."""
        assert self.status
        name = signal.Signals(-self.status).name if self.status < 0 else ""
        return f"its process was killed by {name}" if name else f"its process ended with {self.status}: {self.error}"


def prepare(module: str, options: Options) -> Record:
    """Choose the device, and make the files, in a process of its own; return what is known of both.

    Raises:
        NoDevice: There is no such device.
        SystemExit: It failed otherwise.
    """
    ended = _run(_child(module, options), Path(options.out), _PREPARE_SECONDS)
    if ended.status == NO_DEVICE_STATUS:
        raise NoDevice(ended.error)
    if ended.status != 0:
        raise SystemExit(f"preparing failed: {ended.how if ended.status else 'no end'}, see {LOG_NAME}")
    found: Record = json.loads(ended.output[-1])
    return found


class StageRun:
    """One run of a stage.

    Args:
        module: The name of the module with the stages.
        options: What the command line decides.
        stage: The stage.
        device: What `prepare` returned.
        deadline: When its time is over, by `time.monotonic`: nothing runs longer.
    """

    def __init__(self, module: str, options: Options, stage: Stage, device: Record, deadline: float) -> None:
        self._module, self._options, self._stage = module, options, stage
        self._device, self._deadline = device, deadline
        self._peers: frozenset[str] = importlib.import_module(module).PEERS
        self._out = Path(options.out)
        self.errors: list[str] = []
        """Of runs that are not a peer's."""

    def run(self) -> None:
        """Run all of it."""
        self._emit({"kind": "device", **self._device})
        if self._stage.tests:
            self._test()
        for case in self._stage.cases:
            with self._placed(case) as options:
                if options is not None:
                    self._compare(case, options)

    @property
    def _seconds_left(self) -> float:
        return self._deadline - time.monotonic()

    @contextmanager
    def _placed(self, case: Case) -> Iterator[Options | None]:
        """Copy the checkpoint to where the case needs it; give the options with that place, None if it has no room."""
        if case.place != "tmpfs":
            yield self._options
            return
        source = Path(self._device["checkpoint"])
        size_bytes = sum(path.stat().st_size for path in source.iterdir())
        if not TMPFS.is_dir() or shutil.disk_usage(TMPFS).free < size_bytes * 1.05:
            self._leave_out(case.name, f"{TMPFS} has too little room for {size_bytes / 1e9:.1f} GB")
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="stio-gpu-", dir=TMPFS) as directory:
            shutil.copytree(source, Path(directory) / source.name)
            yield replace(self._options, directory=directory)

    def _compare(self, case: Case, options: Options) -> None:
        """Run every entry once a round, in an order of the round's own, until all rounds or the time are over."""
        num_rounds = 1 if options.quick else case.rounds
        entries = [entry for entry in case.entries if not (options.quick and entry.name in case.not_quick)]
        if skipped := [entry.name for entry in case.entries if entry not in entries]:
            self._leave_out(f"{case.name}, {', '.join(skipped)}", "a quick run")
        shuffle, longest = random.Random(1), 0.0
        for number in range(num_rounds):
            if number and longest > self._seconds_left:
                self._leave_out(f"{case.name}, rounds {number + 1} to {num_rounds}", TIME_OVER)
                return
            there = [entry for entry in entries if number < (entry.rounds or num_rounds)]
            turns = [[entry, *(each for each in there if each.behind == entry.name)] for entry in there]
            turns = [turn for turn in turns if not turn[0].behind]
            shuffle.shuffle(turns)
            started = time.monotonic()
            for k, turn in enumerate(turns):
                if self._seconds_left <= 0:
                    rest = ", ".join(entry.name for each in turns[k:] for entry in each)
                    self._leave_out(f"{case.name}, round {number + 1}: {rest}", TIME_OVER)
                    break
                failed = self._run_turn(case, turn, number, options)
                entries = [entry for entry in entries if entry.name not in failed and entry.behind not in failed]
            longest = max(longest, time.monotonic() - started)

    def _run_turn(self, case: Case, turn: list[Entry], number: int, options: Options) -> set[str]:
        """Run entries in one process; return the names of those that take part no more."""
        first = turn[0]
        own_limit = first.limit_seconds or TURN_SECONDS
        limit = min(own_limit, self._seconds_left)
        arguments = json.dumps([case.name, number, [entry.name for entry in turn]])
        environment = os.environ | first.options.get("environment", {})
        started, others = time.monotonic(), _other_cpu_seconds()
        ended = _run(_child(self._module, options, arguments), self._out, limit, environment)
        other_cpus = max(0.0, (_other_cpu_seconds() - others) / (time.monotonic() - started))
        if ended.status is None and limit < own_limit:
            names = ", ".join(entry.name for entry in turn)
            self._leave_out(f"{case.name}, round {number + 1}: {names}", TIME_OVER)
            return set()
        records: dict[str, Record] = {}
        if ended.status == 0:
            records = json.loads(ended.output[-1])
        else:
            how = f"no end within {own_limit:.0f} s" if ended.status is None else ended.how
            records = {first.name: {"error": how}}
        return {
            entry.name
            for entry in turn
            if entry.name in records and not self._note(case, entry, number, records[entry.name], other_cpus)
        }

    def _note(self, case: Case, entry: Entry, number: int, record: Record, other_cpus: float) -> bool:
        """Write an entry's result; False where it takes part no more."""
        if "absent" in record:
            self._emit({"kind": "absent", "what": f"{case.name}, {entry.name}", "reason": record["absent"]})
            return False
        if "error" in record and entry.contestant not in self._peers:
            self.errors.append(f"{case.name}, {entry.name}: {record['error']}")
        head = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        self._emit(head | record | ({} if "error" in record else {"other_cpus": other_cpus}))
        return "error" not in record

    def _test(self) -> None:
        """Run the stage's tests; where all were skipped nothing has been shown.

        Settings of plugins that are missing are let pass, and what other versions of packages announce for the future.
        """
        command = [
            *(sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-v", "--color=no", "--tb=short"),
            *self._stage.tests,
            *("-o", "addopts=--import-mode=importlib --strict-markers -r fE", "-o", "minversion=7.4"),
            *("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestConfigWarning"),
            *("-W", "default::DeprecationWarning", "-W", "default::FutureWarning"),
        ]
        environment = os.environ | ({"STIO_TEST_DEVICE": "sim"} if self._device.get("is_rehearsal") else {})
        ended = _run(command, self._out, self._seconds_left, environment)
        with open(self._out / LOG_NAME, "a") as log:
            log.writelines(f"{line}\n" for line in ended.output)
        counts: dict[str, int] = {}
        for line in ended.output:
            if found := re.match(r"(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", line):
                counts[found[2]] = counts.get(found[2], 0) + 1
                if found[2] in ("FAILED", "ERROR"):
                    self._emit({"kind": "note", "text": f"{found[2]}: {found[1]}"})
        self._emit({"kind": "note", "text": ", ".join(f"{number} {name.lower()}" for name, number in counts.items())})
        if ended.status is None:
            self.errors.append("the tests were killed when the stage's time was over")
        elif ended.status or not counts.get("PASSED"):
            self.errors.append(f"pytest ended with status {ended.status}, {counts.get('PASSED', 0)} tests passed")

    def _leave_out(self, what: str, reason: str) -> None:
        self._emit({"kind": "left-out", "what": what, "reason": reason})

    def _emit(self, record: Record) -> None:
        """Write a result, now; say it in a line too."""
        record = {"kind": record["kind"], "stage": self._stage.name} | record
        gpu_results.append(self._out / gpu_results.FILE_NAME, record)
        print(_line(record), flush=True)


def _child(module: str, options: Options, *turn: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_child", module, options.encode(), *turn]


def _run(command: list[str], out: Path, limit: float, environment: dict[str, str] | None = None) -> Ended:
    """Run a process; after `limit` seconds kill it, and all that it has started. Its stderr goes to the log."""
    with tempfile.TemporaryFile("w+") as output, open(out / LOG_NAME, "a+") as log:
        print(f"--- {' '.join(command[1:])}", file=log, flush=True)
        begin = log.seek(0, os.SEEK_END)
        child = subprocess.Popen(command, stdout=output, stderr=log, cwd=_ROOT, env=environment, start_new_session=True)
        status: int | None = None
        try:
            status = child.wait(max(0.0, limit))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGABRT)  # faulthandler writes where it is
            time.sleep(_DUMP_SECONDS)
        finally:
            if child.returncode is None:
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait(_END_SECONDS)
        output.seek(0)
        log.seek(begin)
        error = ([line.strip() for line in log if line.strip()] or ["no message"])[-1][:300]
        return Ended(status, output.read().splitlines(), error)


def _other_cpu_seconds() -> float:
    """Give the seconds that processors were busy for others than this process and its children."""
    own = os.times()
    return machine.busy_cpu_seconds() - own.user - own.system - own.children_user - own.children_system


def _line(record: Record) -> str:
    """Say a result in one line."""
    if record["kind"] == "run":
        head = f"  {record['case']} #{record['round']} {record['entry']}: "
        if "error" in record:
            return head + f"FAILED: {record['error']}"
        first = f"first {record['first_seconds']:.6f} s, " if "first_seconds" in record else ""
        rate = f", {record['data_bytes'] / record['seconds'] / 1e9:.2f} GB/s" if record.get("data_bytes") else ""
        return head + f"{first}{record['seconds']:.6f} s{rate}"
    return f"  {record['kind']}: " + " ".join(
        str(record[key]) for key in ("accelerator", "what", "reason", "text") if key in record
    )
