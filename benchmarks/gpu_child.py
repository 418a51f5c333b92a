"""One stage of the GPU benchmark, in a process of its own: rounds of cases, a budget of time, results as they come.

`python -m benchmarks.gpu_child MODULE OPTIONS STAGE` runs a stage of MODULE and appends its results to the file;
with a TURN behind it, it does that one turn and prints its record. MODULE names its `STAGES`, and by `WORK` the
module that has `prepare(options)` (chooses the device, describes it) and `turn(options, case, entry, number)`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_results, machine
from benchmarks.suite import Case, Entry, Record

NO_DEVICE_STATUS = 3
TIME_OVER = "the stage's time was over"
_ROOT = Path(__file__).resolve().parent.parent
_PR_SET_PDEATHSIG = 1
_FRESH_SECONDS = 40.0
"""What the process of a single turn may take beyond the budget."""


class NoDevice(RuntimeError):
    """The device is not here, so no stage can run."""


class Absent(RuntimeError):
    """A contestant cannot take part here: it is not installed, or only CUDA has what it needs. The message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides, for one stage."""

    out: str  # directory of the results
    directory: str  # directory of the checkpoints and saves, on a real disk
    device: str = ""
    """The device's name; the accelerator that torch sees where empty."""

    quick: bool = False  # one round of little data: does it run?
    size_bytes: int = 0  # of the model
    deadline: float = math.inf
    """When the stage's budget ends, by `time.monotonic`: no further round begins that would not end within it."""

    def encode(self) -> str:
        """Give them as an argument of this module."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the benchmark that one process runs."""

    name: str  # for `--stage`
    question: str  # what it answers
    seconds: float  # its budget
    cases: tuple[Case, ...] = ()  # what is compared, one case after the other
    is_fresh: bool = False  # each turn has a process of its own: what is measured happens once in a process
    run: Callable[[Bench], None] | None = None  # what is done where there are no cases


class Bench:
    """A stage that is being run.

    Args:
        module: The name of the module with the stages.
        options: The command line's.
        stage: The stage.
    """

    def __init__(self, module: str, options: Options, stage: Stage) -> None:
        self.options, self.stage = options, stage
        self.is_rehearsal = False
        """Whether the device is a simulated one."""
        self.errors: list[str] = []
        """Of runs that are not a peer's."""
        self._module = module
        self._stages: Any = importlib.import_module(module)
        self._work: Any = importlib.import_module(self._stages.WORK)

    @property
    def seconds_left(self) -> float:
        """What is left of the budget."""
        return self.options.deadline - time.monotonic()

    def emit(self, record: Record) -> None:
        """Write a result, now; say it in a line too."""
        record = {"kind": record["kind"], "stage": self.stage.name} | record
        gpu_results.append(Path(self.options.out) / gpu_results.FILE_NAME, record)
        print(_line(record), flush=True)

    def run(self) -> None:
        """Run all of it."""
        device: Record = self._work.prepare(self.options)
        self.is_rehearsal = device.get("is_rehearsal", False)
        self.emit({"kind": "device", **device})
        if self.stage.run is not None:
            self.stage.run(self)
        for case in self.stage.cases:
            self._compare(case)
        if self.errors:
            raise SystemExit(f"{len(self.errors)} runs failed, the first: {self.errors[0]}")

    def _compare(self, case: Case) -> None:
        """Run every entry once a round, in an order of the round's own, until all rounds or the time are over."""
        num_rounds = 1 if self.options.quick else case.rounds
        entries = [entry for entry in case.entries if not (self.options.quick and entry.name in case.not_quick)]
        if skipped := [entry.name for entry in case.entries if entry not in entries]:
            self._leave_out(f"{case.name}, {', '.join(skipped)}", "a quick run")
        shuffle, longest = random.Random(1), 0.0
        for number in range(num_rounds):
            if number and longest > self.seconds_left:
                self._leave_out(f"{case.name}, rounds {number + 1} to {num_rounds}", TIME_OVER)
                return
            order = [entry for entry in entries if number < (entry.rounds or num_rounds)]
            shuffle.shuffle(order)
            started = time.monotonic()
            for k, entry in enumerate(order):
                if self.seconds_left < 0 and (number or k):
                    rest = ", ".join(each.name for each in order[k:])
                    self._leave_out(f"{case.name}, round {number + 1}: {rest}", TIME_OVER)
                    break
                if not self._run_entry(case, entry, number):
                    entries.remove(entry)
            longest = max(longest, time.monotonic() - started)

    def _run_entry(self, case: Case, entry: Entry, number: int) -> bool:
        """Run one turn; False where the entry takes part no more."""
        record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        started, others = time.monotonic(), _other_cpu_seconds()
        try:
            turn = self._fresh_turn if self.stage.is_fresh else self._work.turn
            record |= turn(self.options, case, entry, number)
            record["other_cpus"] = max(0.0, (_other_cpu_seconds() - others) / (time.monotonic() - started))
        except Absent as reason:
            self.emit({"kind": "absent", "what": f"{case.name}, {entry.name}", "reason": str(reason)})
            return False
        except Exception as error:
            traceback.print_exc()
            record["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if entry.contestant not in self._stages.PEERS:
                self.errors.append(f"{case.name}, {entry.name}: {record['error']}")
        self.emit(record)
        return "error" not in record

    def _fresh_turn(self, options: Options, case: Case, entry: Entry, number: int) -> Record:
        turn = json.dumps([case.name, entry.name, number])
        command = [sys.executable, "-m", __spec__.name, self._module, options.encode(), self.stage.name, turn]
        limit = max(0.0, min(self.seconds_left, _FRESH_SECONDS)) + _FRESH_SECONDS
        environment = os.environ | entry.options.get("environment", {})
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=limit, cwd=_ROOT, env=environment, check=False
        )
        lines = done.stdout.splitlines()
        if done.returncode or not lines:
            raise RuntimeError(f"its process ended with status {done.returncode}")
        record: Record = json.loads(lines[-1])
        if "absent" in record:
            raise Absent(record["absent"])
        return record

    def do_turn(self, turn: str) -> Record:
        """Do one turn in this process, for a stage whose turns have processes of their own."""
        case_name, entry_name, number = json.loads(turn)
        case = next(case for case in self.stage.cases if case.name == case_name)
        entry = next(entry for entry in case.entries if entry.name == entry_name)
        self._work.prepare(self.options)
        try:
            record: Record = self._work.turn(self.options, case, entry, number)
        except Absent as reason:
            return {"absent": str(reason)}
        return record

    def _leave_out(self, what: str, reason: str) -> None:
        self.emit({"kind": "left-out", "what": what, "reason": reason})


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
        rate = f", {record['data_bytes'] / record['seconds'] / 1e9:.2f} GB/s" if record.get("data_bytes") else ""
        return head + f"{record['seconds']:.6f} s{rate}"
    return f"  {record['kind']}: " + " ".join(
        str(record[key]) for key in ("accelerator", "what", "reason", "text") if key in record
    )


def main(arguments: list[str]) -> int:
    """Run a stage or a turn; the last line on stderr says why it failed."""
    faulthandler.enable()  # by a signal too: SIGABRT is what a stage without an end is sent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no process outlives the command
    module, encoded, name, *turn = arguments
    try:
        stages: Any = importlib.import_module(module)
        stage = next(stage for stage in stages.STAGES if stage.name == name)
        bench = Bench(module, Options(**json.loads(encoded)), stage)
        if turn:
            print(json.dumps(bench.do_turn(turn[0])), flush=True)
        else:
            bench.run()
    except NoDevice as error:
        print(error, file=sys.stderr)
        return NO_DEVICE_STATUS
    except SystemExit as error:
        print(error, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    from benchmarks import gpu_child  # not this module a second time: `Absent` must be one class

    sys.exit(gpu_child.main(sys.argv[1:]))
