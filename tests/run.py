"""Runs the types and all tests of `make test`, in three lanes at a time, and says what took how long.

    python tests/run.py [pages | package] [--all] [--record]

The files of tests are divided among the lanes by how long each took when `--record` was last given (durations.json).
Files that share what is expensive to set up stay together (`TOGETHER`). Two lanes begin with something else: mypy, and
the tests of a device, for which torch must start with the simulated one.

Tests of the pages and of the packages run only if a file that decides about them has changed since they last passed
here: build/green/ has a digest of those files. In a fresh clone, and with `--all`, they always run.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import costs
from costs import Cost
from crash.zygote import WITH_TORCH, Zygote

REPOSITORY = Path(__file__).resolve().parents[1]
DURATIONS = REPOSITORY / "tests" / "durations.json"
GREEN = REPOSITORY / "build" / "green"
NUM_LANES = 3
"""On two cores: some tests wait for disks, servers and deadlines."""
NUM_SLOWEST = 10
TYPES, DEVICE, FILES = "types", "device", "files"
"""What lanes do. Two of them begin with the types and the device; durations.json has what these take."""

TOGETHER = {
    TYPES: re.compile(r"\"mypy\""),
    "ranks": re.compile(r"\brun_ranks\b"),
    "frameworks": re.compile(r"\b(?:transformers|lightning|diffusers|trainer_zygote)\b"),
}
"""Files with such a word run in one lane: the import of frameworks takes seconds, and so does the start of ranks. Tests of
types use what mypy has cached in their lane."""
MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 4 << 30
"""Directories of tests are in memory where so much is free there: on a disk, tests wait for it."""
ON_DEVICE = re.compile(r"^from accelerators import", re.MULTILINE)
"""Only these files are collected for a device: to collect all takes longer than their tests."""


@dataclass(frozen=True, slots=True)
class Stamped:
    """Tests that need not run again while certain files stay as they are."""

    tests: tuple[str, ...]
    reads: tuple[str, ...]
    """Patterns of those files."""


_CODE = ("stio/**/*.py", "stio/native/*.[ch]", "tests/**/*.py", "pyproject.toml", "constraints.txt", "hatch_build.py")
STAMPED = {
    "pages": Stamped(
        tuple(f"tests/test_{name}.py" for name in ("demo", "docs", "examples", "pool_server", "server", "site")),
        (*_CODE, "*.md", "docs/**/*", "examples/**/*", "benchmarks/**/*", "mkdocs.yml", "Makefile"),
    ),
    "package": Stamped(
        ("tests/test_package.py", "tests/test_package_workflows.py"),
        (*_CODE, "README.md", "LICENSE", "Makefile", ".github/**/*", "RELEASING.md", "CHANGELOG.md"),
    ),
}


@dataclass(slots=True)
class Lane:
    """Commands that run one after the other."""

    before: str = ""
    """`TYPES`, `DEVICE` or nothing: what runs before the files."""
    files: list[str] = field(default_factory=list)
    marks: str = "not gpu and not slow"
    """Which tests of the files."""
    expected_seconds: float = 0.0

    def commands(self) -> dict[str, tuple[list[str], dict[str, str]]]:
        """Return what to run, by name, each with its environment."""
        found: dict[str, tuple[list[str], dict[str, str]]] = {}
        if self.before == TYPES:
            found[TYPES] = [sys.executable, "-m", "mypy", "--strict", "stio"], {}
        if self.before == DEVICE:
            files = [file for file in test_files() if ON_DEVICE.search((REPOSITORY / file).read_text())]
            found[DEVICE] = pytest("gpu and not slow", files), {"STIO_TEST_DEVICE": "sim"}
        if self.files:
            found[FILES] = pytest(self.marks, self.files), {}
        return found


def test_files() -> list[str]:
    """Return all files of tests, as paths in the checkout."""
    return sorted(str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "tests").rglob("test_*.py"))


def pytest(marks: str, files: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-r", "fEs", "-m", marks, *files]


def group_of(file: str) -> str:
    """Return the group of a file: one of `TOGETHER`, or the file alone."""
    text = (REPOSITORY / file).read_text()
    return next((name for name, word in TOGETHER.items() if word.search(text)), file)


def divide(files: Iterable[str], durations: Mapping[str, float], lanes: Sequence[Lane]) -> None:
    """Give each group of files to the lane with the least to do, the longest group first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        groups[group_of(file)].append(file)
    seconds = {name: sum(durations.get(file, 1.0) for file in group) for name, group in groups.items()}
    for name in sorted(groups, key=lambda name: (-seconds[name], name)):
        lane = next((lane for lane in lanes if lane.before == name), min(lanes, key=lambda lane: lane.expected_seconds))
        lane.files += groups[name]
        lane.expected_seconds += seconds[name]


# Stamps.


def digest(name: str) -> str:
    """Return the digest of the files that decide whether these tests pass, and of the interpreter."""
    sums = hashlib.sha256(f"{sys.version}\0{sys.prefix}".encode())
    paths = {path for pattern in STAMPED[name].reads for path in REPOSITORY.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        sums.update(f"\0{path.relative_to(REPOSITORY)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return sums.hexdigest()


def is_green(name: str) -> bool:
    """Return whether these tests have passed here with the files as they are."""
    stamp = GREEN / name
    return stamp.exists() and stamp.read_text() == digest(name)


# Runs.


@contextlib.contextmanager
def place_for_tests() -> Iterator[dict[str, str]]:
    """Give the variable that tells pytest where to put directories of tests, none where the usual place is right."""
    if not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < MIN_FREE_BYTES:
        yield {}
        return
    with tempfile.TemporaryDirectory(dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield {"PYTEST_DEBUG_TEMPROOT": folder}


@contextlib.contextmanager
def python_with_torch(folder: Path) -> Iterator[dict[str, str]]:
    """Give the variable that names a process with torch imported: zygotes of all lanes are forked from it."""
    zygote = Zygote(folder, ["torch"])
    try:
        yield {WITH_TORCH: str(zygote.python)}
    finally:
        zygote.close()


def run(lane: Lane, folder: Path, variables: Mapping[str, str]) -> tuple[bool, str, dict[str, float]]:
    """Run a lane, with these variables in the environment; return whether all is well, what was printed, and what each command took."""
    passed, output, seconds = True, "", {}
    for name, (arguments, environment) in lane.commands().items():
        (folder / name).mkdir(exist_ok=True)
        begin = time.perf_counter()
        done = subprocess.run(
            arguments,
            cwd=REPOSITORY,
            env={**os.environ, "STIO_TEST_COSTS": str(folder / name), **variables, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        seconds[name] = round(time.perf_counter() - begin, 1)
        passed &= done.returncode == 0
        output += f"{name}: {seconds[name]:.0f} s\n{done.stdout}"
    return passed, output, seconds


def report(found: Sequence[Cost], seconds: float) -> str:
    """Return the totals, and the tests that took most processor time."""
    lines = [
        f"the {NUM_SLOWEST} tests that took most processor time (more than {costs.MAX_CPU_SECONDS:g} s need a reason):"
    ]
    for cost in sorted(found, key=lambda cost: -cost.cpu_seconds)[:NUM_SLOWEST]:
        lines.append(f"  {cost.cpu_seconds:5.1f} s ({cost.seconds:.1f} on the clock)  {cost.test}")
    for cost in found:
        if cost.cpu_seconds > costs.MAX_CPU_SECONDS and not cost.has_reason:
            lines.append(f"  {cost.cpu_seconds:5.1f} s without a reason  {cost.test}")
    minutes, rest = divmod(round(seconds), 60)
    lines.append(f"{len(found):,} tests in {minutes} min {rest} s")
    return "\n".join(lines)


def recorded(found: Sequence[Cost], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return how long each file takes, and what comes before the files."""
    durations = dict.fromkeys(test_files(), 0.0)
    for cost in found:
        durations[cost.file] += cost.seconds
    durations |= {name: seconds[name] for name in (TYPES, DEVICE)}
    return {name: round(value, 1) for name, value in sorted(durations.items())}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "only", nargs="?", choices=sorted(STAMPED), help="run the tests of this, slow ones too, and nothing else"
    )
    parser.add_argument("--all", action="store_true", help="run the tests of pages and packages in any case")
    parser.add_argument("--record", action="store_true", help="write what each file took into durations.json")
    options = parser.parse_args()
    begin = time.perf_counter()
    if options.only:
        chosen = list(STAMPED[options.only].tests)
        lanes = [Lane(marks="not gpu")]
        ran = [options.only]
    else:
        ran = [name for name in STAMPED if options.all or not is_green(name)]
        left_out = {test for name in STAMPED if name not in ran for test in STAMPED[name].tests}
        chosen = [file for file in test_files() if file not in left_out]
        lanes = [Lane(TYPES), Lane(DEVICE), *(Lane() for _ in range(NUM_LANES - 2))]
        for name in STAMPED.keys() - ran:
            print(f"tests of {name}: not run, nothing that they read has changed since they passed (--all runs them)")
    stamps = {name: digest(name) for name in ran}  # before they run: what changes meanwhile is not proved
    durations: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    for lane in lanes:
        lane.expected_seconds = durations.get(lane.before, 0.0)
    divide(chosen, durations, lanes)
    all_passed, seconds = True, dict[str, float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        place_for_tests() as place,
        python_with_torch(Path(folder)) as python,
        ThreadPoolExecutor(len(lanes)) as pool,
    ):
        running = [pool.submit(run, lane, Path(folder), place | python) for lane in lanes]
        for future in as_completed(running):
            passed, output, of_lane = future.result()
            all_passed &= passed
            seconds |= of_lane
            print(output, flush=True)
        of_files, on_device = (costs.read(Path(folder, name)) for name in (FILES, DEVICE))
    print(report([*of_files, *on_device], time.perf_counter() - begin))
    if not all_passed:
        print("FAILED")
        return 1
    GREEN.mkdir(parents=True, exist_ok=True)
    for name, value in stamps.items():
        (GREEN / name).write_text(value)
    if options.record:
        DURATIONS.write_text(json.dumps(recorded(of_files, seconds), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
