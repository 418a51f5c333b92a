"""All that takes too long for `make test`, in stages, two at a time; it says what it did and what it found.

    python -m nightly.run [--stage NAME ...] [--scale 0.05] [--seed N] [--out build/nightly] [--list]

`summary.md` in the output directory has a line for each stage: what was done, how often, what was found, the seconds.
Each stage's output is stored beside it. A stage that fails leaves `failures/STAGE/`: the command that repeats it with
its seed, its output, and what it was working on (an input, an image of a filesystem, a directory). The exit status is 1
if a stage has failed. A stage that is not possible here is skipped with its reason, which is no failure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from crash import shim
from crash.generations import fast_directory
from faults import guarded_memory

REPOSITORY = Path(__file__).resolve().parents[2]
SKIPPED = 77
"""Exit status of a program that cannot run here; its last line says why."""
LONGEST = 4.0
MIN_SECONDS = 300.0
"""A program that takes `LONGEST` times the seconds of its stage's row and `MIN_SECONDS` is stopped: a failure."""
ABORT_SECONDS = 15.0
"""Between the signal at which Python prints the stacks of its threads, and the one that ends the process."""
PACKAGES = ("torch", "safetensors", "anyio", "trio", "uvloop", "msgspec")


@dataclass(frozen=True, slots=True)
class Run:
    """What the stages of one run share."""

    seed: int
    scale: float
    """Factor of all counts and times."""
    out: Path
    fuzz_python: str
    """A Python with atheris."""

    def times(self, number: float) -> str:
        """Return a count at this scale."""
        return str(max(1, round(number * self.scale)))


@dataclass(frozen=True, slots=True)
class Command:
    """One program."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    result: str = ""
    """Part of the line of its output that has the result: the last one with it."""

    def __str__(self) -> str:
        """Return it as a line for a shell."""
        names = ["PYTHONPATH", *self.environment]
        values = {"PYTHONPATH": python_path(), **self.environment}
        return shlex.join(["env", *(f"{name}={values[name]}" for name in names), *self.arguments])


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run."""

    name: str
    about: str
    """What it does, for the summary."""
    seconds: float
    """How long it takes at scale 1 on two cores, beside another stage."""
    commands: Callable[[Run, Path, Path], list[Command]]
    """Returns its programs, from the run, an empty directory, and a directory for what is to be kept."""
    on_disk: bool = False
    """Whether its directory must be on a disk and not in memory: its tests empty the page cache."""
    alone: bool = False
    """Whether it uses all cores."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a stage."""

    stage: Stage
    status: str
    """`passed`, `FAILED` or `skipped`."""
    lines: list[str]
    """The last line of each program: what it counted and found."""
    seconds: float


def module(name: str, *arguments: object, **environment: str) -> Command:
    return Command([sys.executable, "-m", name, *map(str, arguments)], environment)


def tests(place: Path, *arguments: str, **environment: str) -> Command:
    """Return pytest; its directories lie in the stage's own, so that what failed is kept."""
    options = ["-q", "-p", "no:cacheprovider", f"--basetemp={place}/pytest"]
    return Command([sys.executable, "-m", "pytest", *options, *arguments], environment)


def kills(run: Run, place: Path, keep: Path) -> list[Command]:
    return [
        module("crash.kills", place / "kills", "--rounds", run.times(10_000), "--seed", run.seed, "--keep", keep),
        tests(place, "tests/crash/test_kills.py", "-k", "negative_control"),
    ]


def faults(run: Run, place: Path, keep: Path) -> list[Command]:
    if reason := shim.why_not():
        return [Command(["sh", "-c", f"echo {shlex.quote(reason)}; exit {SKIPPED}"])]
    preload = {"LD_PRELOAD": str(shim.build(run.out))}
    some = [] if run.scale >= 0.5 else ["--scenario", "hashed file"]
    return [module("crash.faults", place / "faults", "--long", *some, **preload)]


def lightning_files(run: Run, place: Path, keep: Path) -> list[Command]:
    if importlib.util.find_spec("lightning") is None:
        return [Command(["sh", "-c", f"echo there is no lightning; exit {SKIPPED}"])]
    return [module("integrations.lightning_files", "--count", run.times(40), "--seed", run.seed)]


def cuts(filesystem: str, rounds: int) -> Callable[[Run, Path, Path], list[Command]]:
    def commands(run: Run, place: Path, keep: Path) -> list[Command]:
        options = ["--rounds", run.times(rounds), "--seed", str(run.seed), "--keep", str(keep)]
        some = [] if run.scale >= 0.5 else ["--scenario", "hashed"]
        return [
            module("crash.cuts", filesystem, place / "cuts", *options, *some),
            tests(place, "tests/crash/test_powercut.py", "-k", "not every_call", STIO_CRASH_FILESYSTEM=filesystem),
        ]

    return commands


def cancels(loop: str) -> Callable[[Run, Path, Path], list[Command]]:
    return lambda run, place, keep: [
        module("nightly.cancels", loop, place, "--count", run.times(5000), "--seed", run.seed, "--keep", keep)
    ]


def fuzz(run: Run, place: Path, keep: Path) -> list[Command]:
    options = ["--seconds", run.times(150), "--seed", str(run.seed), "--keep", str(keep)]
    return [module("nightly.fuzz", "--python", run.fuzz_python, *options, TMPDIR=str(place))]


def headers(run: Run, place: Path, keep: Path) -> list[Command]:
    options = ["--seconds", run.times(120), "--min-cases", "1000", "--seed", str(run.seed)]
    return [Command([sys.executable, "tests/fuzz_header.py", *options], result="seed")]


def memory(run: Run, place: Path, keep: Path) -> list[Command]:
    if reason := guarded_memory.why_not():
        return [Command(["sh", "-c", f"echo {shlex.quote(reason)}; exit {SKIPPED}"])]
    preload = {"LD_PRELOAD": str(guarded_memory.build(run.out))}
    return [module("faults.memory_fuzz", place / "memory", "--seed", run.seed, "--seconds", run.times(120), **preload)]


def shared_directory(run: Run, place: Path, keep: Path) -> list[Command]:
    options = ["--seconds", run.times(60), "--seed", str(run.seed), "--keep", str(keep)]
    return [module("nightly.shared_directory", place, *options)]


def leaks(run: Run, place: Path, keep: Path) -> list[Command]:
    return [module("nightly.leaks", place, "--cycles", run.times(1000))]


def engine(run: Run, place: Path, keep: Path) -> list[Command]:
    options = ["--seconds", run.times(60), "--seed", str(run.seed), "--keep", str(keep)]
    return [Command([sys.executable, "tests/native/sanitized.py", *options], {"TMPDIR": str(place)})]


def device(delay: str) -> Callable[[Run, Path, Path], list[Command]]:
    def commands(run: Run, place: Path, keep: Path) -> list[Command]:
        some = [] if run.scale >= 0.5 else ["tests/gpu/test_orders.py"]
        return [tests(place, "-m", "gpu", *some, STIO_TEST_DEVICE="sim", STIO_TEST_DEVICE_DELAY=delay)]

    return commands


def plain(run: Run, place: Path, keep: Path) -> list[Command]:
    some = ["tests/loading/test_scheduler.py"] if run.scale < 0.5 else ["tests/loading", "tests/faults/test_loads.py"]
    return [
        tests(place, "-m", "not gpu and not slow", *some, STIO_NATIVE="0"),
        tests(place, "-m", "gpu and not slow", "tests/gpu/test_orders.py", STIO_NATIVE="0", STIO_TEST_DEVICE="sim"),
    ]


def slow(run: Run, place: Path, keep: Path) -> list[Command]:
    return [tests(place, "-m", "slow and not gpu", STIO_TEST_FOLLOW_SECONDS=run.times(600))]


def long_counts(run: Run, place: Path, keep: Path) -> list[Command]:
    paths = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    files = [path for path in paths if re.search("from counts import|cancelled_after_every_round", path.read_text())]
    return [tests(place, "-m", "not gpu and not slow", *map(str, files), STIO_TEST_LONG="1")]


def mutants(run: Run, place: Path, keep: Path) -> list[Command]:
    some = [] if run.scale >= 0.5 else ["--times", "1", "--only", "a save on the stream of loads"]
    return [Command([sys.executable, "tests/mutants.py", *some])]


def suites(run: Run, place: Path, keep: Path) -> list[Command]:
    """STIO_SUITES names the directory with the checkouts."""
    return [Command([sys.executable, "tests/suites.py", os.environ.get("STIO_SUITES", os.devnull)])]


def rehearse(run: Run, place: Path, keep: Path) -> list[Command]:
    out = run.out / "gpu-rehearsal"
    return [module("benchmarks.gpu", "--device", "sim", "--quick", "--again", "--out", out)]


STAGES = (
    # The long ones first, so that none of them is left alone at the end.
    Stage("device-20ms", "tests on the simulated device, copies delayed by 20 ms", 600, device("0.02"), on_disk=True),
    Stage("fuzz", "coverage-guided fuzzing of the five parsers of untrusted text", 780, fuzz),
    Stage("kills", "kills of savers at random moments", 600, kills),
    Stage("cuts-xfs", "power cuts on xfs, controls without syncs", 500, cuts("xfs", 12)),
    Stage("cuts-btrfs", "power cuts on btrfs, controls without syncs", 400, cuts("btrfs", 16)),
    Stage("cuts-ext4", "power cuts on ext4, controls without syncs", 400, cuts("ext4", 20)),
    Stage("faults", "each error at each system call of a save, each kill", 350, faults),
    Stage("leaks", "cycles of each call: nothing grows", 250, leaks),
    Stage(
        "device-1.5ms", "tests on the simulated device, copies delayed by 1.5 ms", 150, device("0.0015"), on_disk=True
    ),
    Stage("long-counts", "tests with random or repeated work, more of it", 300, long_counts, on_disk=True),
    Stage("plain", "loads, faults and the simulated device without the engine", 300, plain, on_disk=True),
    Stage("slow", "tests with the mark slow, and the rest of each matrix", 1500, slow, on_disk=True),
    Stage("lightning", "files of trainings of Lightning, compared with those without stio", 60, lightning_files),
    Stage("cancels-asyncio", "random cancels on asyncio", 120, cancels("asyncio")),
    Stage("cancels-uvloop", "random cancels on uvloop", 120, cancels("uvloop")),
    Stage("cancels-trio", "random cancels on trio", 120, cancels("trio")),
    Stage("headers", "mutated headers, compared with the official reader", 125, headers),
    Stage("memory", "targets without memory, between pages without access: all that fills and saves", 125, memory),
    Stage("engine", "the stress of the engine in C, with sanitizers", 260, engine, on_disk=True),
    Stage("rehearse-gpu", "the stages of the GPU's benchmark on the simulated device", 130, rehearse),
    Stage("suites", "the suites of safetensors and huggingface_hub over the drop-in modules (STIO_SUITES)", 60, suites),
    Stage("shared-directory", "four savers and four readers on one directory", 65, shared_directory),
    Stage("mutants", "each mutant of the device path must be caught in each run", 1700, mutants, alone=True),
)


# Running.


def python_path() -> str:
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests"), *inherited])


class Runner:
    """Runs stages.

    Args:
        run: What they share.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._going: set[int] = set()
        self._changed = threading.Lock()
        self._stopped = False

    def all(self, stages: Iterable[Stage]) -> Iterable[Result]:
        """Run stages, two at a time, then those that use all cores; give each result when it is there."""
        stages = list(stages)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(self.stage, one) for one in stages if not one.alone]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                self.stop()
                pool.shutdown(cancel_futures=True)
                raise
        for one in stages:
            if one.alone:
                yield self.stage(one)

    def stage(self, stage: Stage) -> Result:
        """Run one stage, and keep what repeats it if it fails."""
        keep = self.run.out / "failures" / stage.name
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
        place = Path(tempfile.mkdtemp(prefix=f"nightly-{stage.name}-", dir=None if stage.on_disk else fast_directory()))
        start, statuses, lines = time.perf_counter(), [], []
        log = self.run.out / f"{stage.name}.log"
        log.write_text("")
        limit = MIN_SECONDS + LONGEST * stage.seconds * max(self.run.scale, 0.2)
        commands: list[Command] = []
        try:
            commands = stage.commands(self.run, place, keep)
            for name in ("kills", "faults", "cuts"):
                (place / name).mkdir()
            for command in commands:
                status, line = self._command(command, log, limit)
                statuses.append(status)
                lines.append(line)
        except Exception as error:  # noqa: BLE001 - the other stages go on
            statuses.append(1)
            lines.append(f"{type(error).__name__}: {error}")
        failed = any(status not in (0, SKIPPED) for status in statuses)
        if failed:
            self._keep(stage, commands, statuses, place, keep, log)
        else:
            shutil.rmtree(keep)
        clean(place)
        status = "FAILED" if failed else "skipped" if SKIPPED in statuses else "passed"
        return Result(stage, status, lines, time.perf_counter() - start)

    def _command(self, command: Command, log: Path, limit: float) -> tuple[int, str]:
        """Run a program; return its status and the last line of its output."""
        environment = {**os.environ, "PYTHONPATH": python_path(), "PYTHONFAULTHANDLER": "1", **command.environment}
        with open(log, "a") as file:
            print(f"$ {command}", file=file, flush=True)
            process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=environment,
                start_new_session=True,
            )
            with self._changed:
                self._going.add(process.pid)
                if self._stopped:
                    kill_group(process.pid, signal.SIGKILL)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                print(f"stopped after {limit:.0f} s", file=file, flush=True)
                kill_group(process.pid, signal.SIGABRT)  # at which each of its processes prints its stacks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ABORT_SECONDS)
                kill_group(process.pid, signal.SIGKILL)
                process.wait()
                return 124, f"stopped after {limit:.0f} s: {log.name} ends with the stacks of its threads"
            finally:
                with self._changed:
                    self._going.discard(process.pid)
        kill_group(process.pid, signal.SIGKILL)  # what it may have left behind
        return status, last_line(log, command.result)

    def _keep(
        self, stage: Stage, commands: list[Command], statuses: list[int], place: Path, keep: Path, log: Path
    ) -> None:
        """Store what is needed to repeat a failure."""
        shutil.copyfile(log, keep / "output.txt")
        lines = [f"# seed {self.run.seed}, scale {self.run.scale}, in {REPOSITORY}; {place} must be an empty directory"]
        lines += [f"make nightly NIGHTLY_ARGS='--stage {stage.name} --seed {self.run.seed} --scale {self.run.scale}'"]
        lines += [f"# status {status}\n{command}" for command, status in zip(commands, statuses, strict=False)]
        (keep / "command.txt").write_text("\n".join(lines) + "\n")
        if (place / "pytest").is_dir():
            unmount(place)
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(place / "pytest", keep / "pytest", symlinks=True, ignore_dangling_symlinks=True)

    def stop(self) -> None:
        """End all programs."""
        with self._changed:
            self._stopped = True
            for pid in self._going:
                kill_group(pid, signal.SIGKILL)


def kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def last_line(log: Path, part: str = "") -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() and part in line]
    return lines[-1].strip("= ")[:400] if lines else ""


def unmount(place: Path) -> None:
    """Unmount what a killed stage has left mounted below a directory."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in reversed(mounts):
        if mount.startswith(f"{place}/"):
            subprocess.run(["umount", "-l", mount], check=False)


def clean(place: Path) -> None:
    unmount(place)
    shutil.rmtree(place, ignore_errors=True)


# The summary.


def machine() -> list[str]:
    """Return what the results depend on."""
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = []
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return [
        f"- revision {revision or 'unknown'}, Python {platform.python_version()}, {', '.join(versions)}",
        f"- kernel {platform.release()}, {platform.machine()}, {os.cpu_count()} cores",
    ]


def summary(run: Run, results: list[Result], seconds: float, begun: str, missing: list[str]) -> str:
    """Return the summary as Markdown."""
    number = {status: sum(one.status == status for one in results) for status in ("passed", "FAILED", "skipped")}
    lines = [
        "# make nightly",
        "",
        f"- begun {begun}, {seconds / 60:.0f} minutes, seed {run.seed}, scale {run.scale}",
        *machine(),
        f"- {number['passed']} stages passed, {number['FAILED']} failed, {number['skipped']} skipped"
        + (f"; not run: {', '.join(missing)}" if missing else ""),
        "",
        "| stage | what | result | counted and found | seconds |",
        "|---|---|---|---|---:|",
    ]
    order = [stage.name for stage in STAGES]
    for one in sorted(results, key=lambda one: order.index(one.stage.name) if one.stage.name in order else -1):
        said = "<br>".join(line.replace("|", "\\|") for line in one.lines)
        lines.append(f"| {one.stage.name} | {one.stage.about} | {one.status} | {said} | {one.seconds:.0f} |")
    lines += [
        f"\n{one.stage.name} failed: `failures/{one.stage.name}/` has the command, the output and what it worked on."
        for one in results
        if one.status == "FAILED"
    ]
    return "\n".join(lines) + "\n"


def carry_out(run: Run, stages: list[Stage]) -> int:
    """Run stages, say what each did, write the summary; return the exit status."""
    run.out.mkdir(parents=True, exist_ok=True)
    begun, start = time.strftime("%Y-%m-%d %H:%M:%S %z"), time.perf_counter()
    results: list[Result] = []
    print(f"{len(stages)} stages, seed {run.seed}, scale {run.scale}, output in {run.out}", flush=True)
    try:
        for result in Runner(run).all(stages):
            results.append(result)
            print(f"{result.status}: {result.stage.name}, {result.seconds:.0f} s", flush=True)
            print(*(f"    {line}" for line in result.lines), sep="\n", flush=True)
    finally:
        done = {one.stage.name for one in results}
        missing = [one.name for one in stages if one.name not in done]
        text = summary(run, results, time.perf_counter() - start, begun, missing)
        (run.out / "summary.md").write_text(text)
    failed = [one.stage.name for one in results if one.status == "FAILED"]
    minutes = (time.perf_counter() - start) / 60
    print(
        f"{len(results)} stages in {minutes:.0f} minutes, failed: {', '.join(failed) or 'none'}; see {run.out}/summary.md"
    )
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", action="append", metavar="NAME", help="a name or its begin; all if there is none")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all counts and times; 0.05 is a short form")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "nightly")
    parser.add_argument("--fuzz-python", default=sys.executable, help="a Python with atheris")
    parser.add_argument("--list", action="store_true", help="show the stages and run nothing")
    options = parser.parse_args()
    chosen = [one for one in STAGES if not options.stage or any(one.name.startswith(name) for name in options.stage)]
    if not chosen:
        parser.error(f"no stage has such a name; there are {', '.join(names)}")
    if options.list:
        for one in chosen:
            print(f"{one.name:18} {one.seconds * options.scale:6.0f} s  {one.about}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # programs are ended on the way out
    return carry_out(Run(options.seed, options.scale, options.out.resolve(), options.fuzz_python), chosen)


if __name__ == "__main__":
    sys.exit(main())
