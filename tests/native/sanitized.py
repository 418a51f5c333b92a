"""Compiles the engine with strict warnings and an analysis, and runs its stress and the fuzz of deltas with sanitizers.

    python tests/native/sanitized.py [--seconds 10] [--seed N] [--keep DIRECTORY]

Both run as they are, with AddressSanitizer and UndefinedBehaviorSanitizer, and with ThreadSanitizer, each for so many
seconds; the fuzz also as on processors without SSE2. Needs no package, and gcc or clang as `cc`; status 77 without.
`--keep` gets the programs of runs that failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = sorted((HERE.parents[1] / "stio" / "native").glob("*.c"))
SKIPPED = 77
STANDARD = ("-std=c11", "-pthread")
WARNINGS = ("-O2", "-fPIC", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
# What it says of buffers that a loop fills and another one reads is wrong (gcc 12).
ANALYSIS = ("-O1", "-fanalyzer", "-Wno-analyzer-use-of-uninitialized-value", "-Werror")
SANITIZERS = {
    "plain": ("-O2",),
    "address": ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-O1", "-fsanitize=thread"),
}
RUNS = [
    *((source, name, flags) for source in ("stress", "delta") for name, flags in SANITIZERS.items()),
    ("delta", "portable", (*SANITIZERS["address"], "-U__SSE2__")),
]
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:halt_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
MARGIN_SECONDS = 200
"""A run that takes so much longer than it was told does not end."""


def compiled(*arguments: str) -> bool:
    command = ["cc", *STANDARD, *arguments]
    print("$", *command, flush=True)
    return subprocess.run(command, check=False).returncode == 0


def warnings(folder: Path) -> list[str]:
    """Return what the compiler says about which sources."""
    failed = []
    for source in ENGINE:
        target = str(folder / f"{source.stem}.o")
        if not compiled(*WARNINGS, "-c", str(source), "-o", target):
            failed.append(f"warnings in {source.name}")
        if not compiled(*ANALYSIS, "-c", str(source), "-o", target):
            failed.append(f"the analysis of {source.name}")
    return failed


def run(source: str, flags: tuple[str, ...], program: Path, seconds: float, seed: int) -> str:
    """Run a program of this directory with a sanitizer; return what failed."""
    flags = ("-g", "-fno-omit-frame-pointer", *flags)
    if not compiled(*flags, str(HERE / source), *map(str, ENGINE), "-o", str(program), "-ldl"):
        return f"the compilation of {program.name}"
    command = [str(program), str(seconds), str(seed)]
    print("$", *command, flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=program.parent,
            env={**os.environ, **ENVIRONMENT},
            timeout=seconds + MARGIN_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{program.name} does not end"
    return "" if done.returncode == 0 else f"{program.name} from seed {seed}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        print("the engine is for Linux, and needs a C compiler here")
        return SKIPPED
    with tempfile.TemporaryDirectory(prefix="stio-native-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        failed = warnings(folder)
        for source, name, flags in RUNS:
            program = folder / f"{source}-{name}"
            if found := run(f"{source}.c", flags, program, arguments.seconds, arguments.seed):
                failed.append(found)
                if arguments.keep is not None and program.exists():
                    shutil.copy(program, arguments.keep)
    print("failed: " + ", ".join(failed) if failed else f"native-check: nothing found, seed {arguments.seed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
