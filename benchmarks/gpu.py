"""Answer what a reader asks of stio on a GPU, beside its peers and the machine's limits, within eight minutes.

`python -m benchmarks.gpu`; see tables.md. It goes through stages, each with a budget of seconds; a stage may also use
what those before it have left. Results are in `results.jsonl` as soon as they exist; a second command with the same
directory goes on where the first one was cut off. The status is 1 where a stage failed, 2 without a device, and 3
where the whole plan went through and a bound was missed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import math
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import gpu_results, gpu_run, machine, report
from benchmarks.gpu_child import SAFETENSORS, NoDevice, Options, Stage
from benchmarks.runs import Record

HERE = Path(__file__).resolve().parent
FEWEST_SECONDS = 30.0
"""With less left of the command's time no stage begins."""
PREPARE_SECONDS = 18.0
"""Of the plan, until the first stage: 4 s of imports, 6 GB written at 0.6 GB/s, and read again for the digests."""
SIZE_BYTES, QUICK_SIZE_BYTES, SIMULATED_SIZE_BYTES = 6_000_000_000, 2_000_000_000, 40_000_000
REPORT_NAME = "report.md"
_CHECKPOINTS = "stio-gpu-checkpoints"


def planned_seconds(stages: Any) -> float:
    """Return what the whole plan may take."""
    return PREPARE_SECONDS + sum(stage.seconds for stage in stages.PLAN)


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
        is_simulated = _is_simulated(asked.device)
        usual_bytes = SIMULATED_SIZE_BYTES if is_simulated else QUICK_SIZE_BYTES if asked.quick else SIZE_BYTES
        self._options = Options(
            out=str(self._out),
            directory=str(asked.dir.resolve() / _CHECKPOINTS),
            device=asked.device,
            quick=asked.quick or is_simulated,
            size_bytes=asked.size_bytes or usual_bytes,
        )

    def run(self) -> int:
        """Run the stages that were asked for and are not complete; return the status."""
        chosen = self._stages.STAGES if self._asked.all else self._stages.PLAN
        if self._asked.stage:
            chosen = [stage for stage in self._stages.STAGES if stage.name in self._asked.stage]
        missing = [stage for stage in chosen if not self._is_complete(stage)]
        self._out.mkdir(parents=True, exist_ok=True)
        directory = Path(self._options.directory)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            ends = self._run_stages(missing) if missing else []
        except NoDevice as error:
            print(f"{error}: nothing was measured", file=sys.stderr)
            return 2
        finally:
            if not self._asked.keep:
                shutil.rmtree(directory, ignore_errors=True)
        num_missed = self.report()
        if "failed" in ends:
            return 1
        return 3 if num_missed and not self._options.quick and not self._asked.stage else 0

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
            report.publish(suite, gpu_results.counted(records), text, self._out / "gpu.svg", HERE / "tables.md")
        return report.num_missed(gpu_results.counted(records), suite)

    @property
    def _settings(self) -> Record:
        options = self._options
        return {"device": options.device, "quick": options.quick, "size_bytes": options.size_bytes}

    def _is_complete(self, stage: Stage) -> bool:
        """Tell, aloud, whether a stage was completed with the same settings."""
        attempt = gpu_results.attempts(gpu_results.read(self._results)).get(stage.name)
        if self._asked.again or not attempt or not attempt.is_complete:
            return False
        is_same: bool = attempt.begin["settings"] == self._settings
        if is_same:
            print(f"{stage.name}: complete already", flush=True)
        return is_same

    def _run_stages(self, stages: list[Stage]) -> list[str]:
        """Run stages in their order, each until its budget and those before it are used up; return how they ended.

        Raises:
            NoDevice: There is no such device.
        """
        size_bytes = self._options.size_bytes
        prime_bytes = min(size_bytes, self._stages.PRIME_BYTES)
        record: Record = machine.record(Path(self._options.directory), size_bytes, prime_bytes)
        self._emit(record | {"packages": record["packages"] | _second_safetensors()})
        device = gpu_run.prepare(self._module, self._options)
        planned, ends = PREPARE_SECONDS, []
        for stage in stages:
            planned += stage.seconds
            seconds = min(planned, self._asked.total_seconds) - (time.monotonic() - self._started)
            ends.append(self._run_stage(stage, device, seconds, is_cut=planned > self._asked.total_seconds))
        return ends

    def _run_stage(self, stage: Stage, device: Record, seconds: float, *, is_cut: bool) -> str:
        """Run a stage for so many seconds at most; return how it ended."""
        if seconds < min(FEWEST_SECONDS, stage.seconds):
            reason = "the command's time was over"
            self._emit({"kind": "left-out", "stage": stage.name, "what": "all of it", "reason": reason})
            print(f"{stage.name}: left out, {reason}", flush=True)
            return "left out"
        self._emit({"kind": "begin", "stage": stage.name, "settings": self._settings})
        print(f"{stage.name}: {stage.question}; {seconds:.0f} s", flush=True)
        started = time.monotonic()
        running = gpu_run.StageRun(self._module, self._options, stage, device, started + seconds)
        try:
            running.run()
        except Exception as error:  # the other stages have results all the same
            traceback.print_exc()
            running.errors.append(f"{type(error).__name__}: {error}")
        how = f"{len(running.errors)} failed, the first: {running.errors[0]}" if running.errors else ""
        lines = gpu_results.attempts(gpu_results.read(self._results))[stage.name].records
        is_cut = is_cut and any(line.get("reason") == gpu_run.TIME_OVER for line in lines)
        status = "failed" if how else "cut short" if is_cut else "complete"
        taken = time.monotonic() - started
        self._emit({"kind": "end", "stage": stage.name, "status": status, "how": how, "seconds": taken})
        print(f"{stage.name}: {status} {how} after {taken:.0f} s", flush=True)
        return status

    def _emit(self, record: Record) -> None:
        gpu_results.append(self._results, record)


def _is_simulated(device: str) -> bool:
    return device.partition(":")[0] == "sim"


def _second_safetensors() -> dict[str, str | None]:
    """Return the version of the safetensors that has `prefetch`."""
    folder = os.environ.get(SAFETENSORS)
    found = importlib.metadata.distributions(name="safetensors", path=[folder]) if folder else ()
    return {f"safetensors in {SAFETENSORS}": next((each.version for each in found), None)}


def main(arguments: list[str] | None = None, module: str = "benchmarks.gpu_stages") -> int:
    """Run or report stages of a module."""
    stages: Any = importlib.import_module(module)
    asked = _parser([stage.name for stage in stages.STAGES]).parse_args(arguments)
    if asked.list:
        for stage in stages.STAGES:
            where = "in the plan" if stage in stages.PLAN else "by --stage"
            print(f"{stage.name:14} {stage.seconds:4.0f} s  {where:12} {stage.question}")
        print(f"the plan, with {PREPARE_SECONDS:.0f} s before its first stage: {planned_seconds(stages):.0f} s")
        return 0
    usual = HERE.parent / "build" / ("gpu-rehearsal" if _is_simulated(asked.device) else "gpu")
    asked.out = asked.report or asked.out or usual
    if asked.report:
        Command(module, asked).report()
        return 0
    if folder := os.environ.get(SAFETENSORS):
        os.environ[SAFETENSORS] = str(Path(folder).resolve())  # the processes have another working directory
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the turn's process and the files go
    return Command(module, asked).run()


def _parser(names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        help="a directory for the results (build/gpu); what is complete there is not run again",
    )
    parser.add_argument("--stage", nargs="+", choices=names, metavar="STAGE", help=f"of: {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="run all stages, also those that are not in the plan")
    parser.add_argument("--list", action="store_true", help="list the stages and their budgets")
    parser.add_argument("--report", type=Path, metavar="DIR", help="report the results in DIR, run nothing")
    parser.add_argument("--quick", action="store_true", help="little data, one round: does it run")
    parser.add_argument(
        "--device", default="", help="cuda, xpu, sim (simulated: a rehearsal, one round); torch's own by default"
    )
    parser.add_argument("--total-seconds", type=float, default=math.inf, help="the whole command's budget")
    parser.add_argument("--again", action="store_true", help="run complete stages too")
    parser.add_argument("--size-bytes", type=int, help=f"size of the model, {SIZE_BYTES} by default")
    parser.add_argument(
        "--dir", type=Path, default=HERE.parent.parent, help="a directory on a real disk for checkpoints"
    )
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints for the next command")
    parser.add_argument("--publish", action="store_true", help="write the tables to tables.md too, and draw the chart")
    return parser


if __name__ == "__main__":
    sys.exit(main())
