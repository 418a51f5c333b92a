"""Answer what a first GPU has to answer, then compare stio there with its peers and with the machine's limits.

`python -m benchmarks.gpu --out DIR`; see README.md. It goes through stages, each a process of its own with a budget of
seconds. Results are in DIR/results.jsonl as soon as they exist, so what dies leaves the others' there; a second
command with the same DIR goes on where the first one was cut off. The status is 1 where a stage failed, 2 without a
device, and 3 where all went through in full and a bound was missed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import gpu_results, machine, report
from benchmarks.gpu_child import NO_DEVICE_STATUS, TIME_OVER, NoDevice, Options, Stage
from benchmarks.suite import Record

HERE = Path(__file__).resolve().parent
MOST_SECONDS = 480.0
"""No stage takes longer: it is killed."""
FEWEST_SECONDS = 30.0
"""With less left of the command's time no stage begins."""
SIZE_BYTES, QUICK_SIZE_BYTES, SIMULATED_SIZE_BYTES = 16_000_000_000, 2_000_000_000, 40_000_000
_END_SECONDS = 60.0
"""What a stage may take beyond its budget, for a round that began within it."""
_CHECKPOINTS = "stio-gpu-checkpoints"
_LOG_NAME, REPORT_NAME = "log.txt", "report.md"
_DUMP_SECONDS = 10.0


class Command:
    """One call of the command.

    Args:
        module: The name of the module with the stages.
        asked: Its arguments.
    """

    def __init__(self, module: str, asked: argparse.Namespace) -> None:
        self._module, self._asked = module, asked
        self._stages: Any = importlib.import_module(module)
        self._out: Path = asked.out.resolve()
        self._results = self._out / gpu_results.FILE_NAME
        self._started = time.monotonic()
        simulated = SIMULATED_SIZE_BYTES if asked.device == "sim" else 0
        self._size_bytes = asked.size_bytes or simulated or (QUICK_SIZE_BYTES if asked.quick else SIZE_BYTES)

    def run(self) -> int:
        """Run the stages that were asked for and are not complete; return the status."""
        chosen = [stage for stage in self._stages.STAGES if not self._asked.stage or stage.name in self._asked.stage]
        self._out.mkdir(parents=True, exist_ok=True)
        directory: Path = self._asked.dir.resolve() / _CHECKPOINTS
        directory.mkdir(parents=True, exist_ok=True)
        self._emit(machine.record(directory, self._size_bytes, min(self._size_bytes, self._stages.PRIME_BYTES)))
        try:
            ends = [self._run_stage(stage, directory) for stage in chosen]
        except NoDevice as error:
            print(f"{error}: nothing was measured", file=sys.stderr)
            return 2
        finally:
            if not self._asked.keep:
                shutil.rmtree(directory, ignore_errors=True)
        num_missed = self.report()
        if "failed" in ends:
            return 1
        return 3 if num_missed and not self._asked.quick and not self._asked.stage else 0

    def report(self) -> int:
        """Print how the stages ended and the bounds, write all tables; return how many bounds were missed."""
        records, suite = gpu_results.read(self._results), self._stages.SUITE
        text = gpu_results.markdown(records, suite)
        if self._asked.report:
            print(text)
        else:
            (self._out / REPORT_NAME).write_text(text)
            print(f"{gpu_results.summary(text)}\n\nAll tables: {self._out / REPORT_NAME}")
        if self._asked.publish:
            report.publish(suite, gpu_results.counted(records), text, self._out / "gpu.svg", HERE / "README.md")
        return report.num_missed(gpu_results.counted(records), suite)

    def _run_stage(self, stage: Stage, directory: Path) -> str:
        """Run a stage in a process of its own, unless it is complete; return how it ended.

        Raises:
            NoDevice: There is no such device.
        """
        settings = {"device": self._asked.device, "quick": self._asked.quick, "size_bytes": self._size_bytes}
        attempt = gpu_results.attempts(gpu_results.read(self._results)).get(stage.name)
        if attempt and attempt.is_complete and attempt.begin["settings"] == settings and not self._asked.again:
            print(f"{stage.name}: complete already", flush=True)
            return "complete"
        wanted = min(self._asked.seconds or stage.seconds, MOST_SECONDS)
        left = self._asked.total_seconds - (time.monotonic() - self._started)
        if left < min(FEWEST_SECONDS, wanted):
            reason = "the command's time was over"
            self._emit({"kind": "left-out", "stage": stage.name, "what": "all of it", "reason": reason})
            print(f"{stage.name}: left out, {reason}", flush=True)
            return "left out"
        seconds = min(wanted, left)
        self._emit({"kind": "begin", "stage": stage.name, "settings": settings})
        print(f"{stage.name}: {stage.question}; {seconds:.0f} s", flush=True)
        started = time.monotonic()
        options = Options(
            out=str(self._out),
            directory=str(directory),
            device=self._asked.device,
            quick=self._asked.quick,
            size_bytes=self._size_bytes,
            deadline=started + seconds,
        )
        how = self._child(stage, options, min(seconds + _END_SECONDS, MOST_SECONDS))
        lines = gpu_results.attempts(gpu_results.read(self._results))[stage.name].records
        is_cut = seconds < wanted and any(line.get("reason") == TIME_OVER for line in lines)
        status = "failed" if how else "cut short" if is_cut else "complete"
        return self._end(stage, status, how, time.monotonic() - started)

    def _child(self, stage: Stage, options: Options, limit: float) -> str:
        """Run a stage's process, for `limit` seconds at most; return how it died, or nothing."""
        command = [sys.executable, "-m", "benchmarks.gpu_child", self._module, options.encode(), stage.name]
        with open(self._out / _LOG_NAME, "a+") as log:
            print(f"--- {stage.name}", file=log, flush=True)
            begin = log.seek(0, os.SEEK_END)
            child = subprocess.Popen(command, stderr=log, cwd=HERE.parent)
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGABRT)  # faulthandler writes where it was
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_DUMP_SECONDS)
                return f"killed: no end after {limit:.0f} s, see {_LOG_NAME}"
            finally:
                child.kill()
                child.wait()
            log.seek(begin)
            last = ([line.strip() for line in log if line.strip()] or ["no message"])[-1][:300]
        if status == NO_DEVICE_STATUS:
            self._end(stage, "failed", last, 0.0)
            raise NoDevice(last)
        if status < 0:
            return f"killed by {signal.Signals(-status).name}, see {_LOG_NAME}"
        return last if status else ""

    def _end(self, stage: Stage, status: str, how: str, seconds: float) -> str:
        self._emit({"kind": "end", "stage": stage.name, "status": status, "how": how, "seconds": seconds})
        print(f"{stage.name}: {status} {how}", flush=True)
        return status

    def _emit(self, record: Record) -> None:
        gpu_results.append(self._results, record)


def main(arguments: list[str] | None = None, module: str = "benchmarks.gpu_stages") -> int:
    """Run or report stages of a module."""
    stages: Any = importlib.import_module(module)
    asked = _parser([stage.name for stage in stages.STAGES]).parse_args(arguments)
    if asked.list:
        for stage in stages.STAGES:
            print(f"{stage.name:14} {stage.seconds:4.0f} s  {stage.question}")
        return 0
    if asked.report:
        asked.out = asked.report
        Command(module, asked).report()
        return 0
    if asked.out is None:
        print("--out says where the results go", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stage's process and the files go
    return Command(module, asked).run()


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="a directory for the results; what is complete there is not run again")
    parser.add_argument("--stage", nargs="+", choices=names, metavar="STAGE", help=f"of: {', '.join(names)}")
    parser.add_argument("--list", action="store_true", help="list the stages and their budgets")
    parser.add_argument("--report", type=Path, metavar="DIR", help="report the results in DIR, run nothing")
    parser.add_argument("--quick", action="store_true", help="little data, one round: does it run")
    parser.add_argument("--device", default="", help="cuda, xpu, sim (simulated: a rehearsal); torch's own by default")
    parser.add_argument("--seconds", type=float, help="a stage's budget, in place of its own")
    parser.add_argument("--total-seconds", type=float, default=math.inf, help="the whole command's budget")
    parser.add_argument("--again", action="store_true", help="run complete stages too")
    parser.add_argument("--size-bytes", type=int, help=f"size of the model, {SIZE_BYTES} by default")
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent.parent, help="a directory on a real disk for checkpoints"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints for the next command")
    parser.add_argument("--publish", action="store_true", help="write the tables to README.md too, and draw the chart")
    return parser


if __name__ == "__main__":
    sys.exit(main())
