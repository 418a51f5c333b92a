"""One process of the GPU benchmark, and the values that the command and its processes share.

`python -m benchmarks.gpu_child MODULE OPTIONS [TURN]`. MODULE has the stages, and names by `WORK` the module that has
`prepare(options)` (chooses the device, makes the files, returns what a reader must know of both) and
`turn(options, case, entry, number)`. TURN is JSON: a case, the number of the round, and the entries that run in this
process, one after the other. The last line of the output is JSON: the record of each entry, or without a TURN what
`prepare` returned.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.runs import Record
from benchmarks.suite import Case

NO_DEVICE_STATUS = 3
SAFETENSORS = "STIO_BENCH_SAFETENSORS"
"""Names the folder of a second safetensors, which has `prefetch`."""
_PR_SET_PDEATHSIG = 1


class NoDevice(RuntimeError):
    """The device is not here, so no stage can run."""


class Absent(RuntimeError):
    """A contestant cannot take part here: it is not installed, or only CUDA has what it needs. The message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line decides."""

    out: str  # directory of the results
    directory: str  # directory of the checkpoints and saves
    device: str = ""
    """The device's name; the accelerator that torch sees where empty."""

    quick: bool = False  # one round of little data: does it run?
    size_bytes: int = 0  # of the model

    def encode(self) -> str:
        """Give them as an argument of this module."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the benchmark: cases, or files of tests."""

    name: str  # for `--stage`
    question: str  # what it answers
    seconds: float  # its budget, starts of processes included
    cases: tuple[Case, ...] = ()  # what is compared, one case after the other
    tests: tuple[str, ...] = ()  # what pytest runs


def do_turn(stages: Any, options: Options, case_name: str, number: int, names: list[str]) -> dict[str, Record]:
    """Run entries of a case; what one of them raises is its record."""
    work = importlib.import_module(stages.WORK)
    case = next(case for case in stages.SUITE.cases if case.name == case_name)
    entries = {entry.name: entry for entry in case.entries}
    records: dict[str, Record] = {}
    for name in names:
        try:
            records[name] = work.turn(options, case, entries[name], number)
        except Absent as reason:
            records[name] = {"absent": str(reason)}
        except Exception as error:  # noqa: BLE001 - a contestant's failure is a result
            traceback.print_exc()
            records[name] = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return records


def main(arguments: list[str]) -> int:
    """Prepare, or do a turn; the last line on stderr says why it failed."""
    faulthandler.enable()  # by a signal too: a process that does not end is sent SIGABRT
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no process outlives the command
    module, encoded, *turn = arguments
    options = Options(**json.loads(encoded))
    try:
        stages: Any = importlib.import_module(module)
        found = importlib.import_module(stages.WORK).prepare(options)
        if turn:
            found = do_turn(stages, options, *json.loads(turn[0]))
    except NoDevice as error:
        print(error, file=sys.stderr)
        return NO_DEVICE_STATUS
    except BaseException as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1
    print("\n" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    from benchmarks import gpu_child  # not this module a second time: `Absent` must be one class

    status = gpu_child.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # without the teardown of the interpreter and of the peers, which may hang
