"""Coverage-guided fuzzing of everything that parses untrusted text: headers, indexes, manifests, state trees, pickles.

    python -m nightly.fuzz --seconds 60 --seed 1 --keep DIRECTORY [--target NAME] [--python PYTHON]
    python -m nightly.fuzz --target NAME --again FILE

The first form starts a process for each target; it needs a Python with atheris. Each input must be accepted, or refused
with the error that the parser documents. What is accepted must equal what an independent parser makes of it, where there
is one. An input that takes 20 s or 1 GiB is a finding too. An input that is a finding is stored in `--keep`. The second
form runs a stored input again; it does not need atheris.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_SECONDS = 20
"""For one input. The parsers take milliseconds; the rest is room for a busy machine."""
MAX_MEGABYTES = 1024
MAX_INPUT_BYTES = 4096
NAMES = ("header", "index", "manifest", "tree", "pickle")
NO_ATHERIS = 77
"""Exit status where nothing was fuzzed."""


# One process of the fuzzer.


def fuzz_one(name: str, seconds: int, seed: int, keep: Path) -> None:
    """Fuzz a target in this process, which ends here."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["stio.format"]):
        target = importlib.import_module("nightly.parsers").TARGETS[name]
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))
    for k, text in enumerate(target.seeds()):
        target.run(text)
        (corpus / f"seed-{k}").write_bytes(text)
    options = {
        "max_total_time": seconds,
        "seed": seed,
        "timeout": MAX_SECONDS,
        "rss_limit_mb": MAX_MEGABYTES,
        "max_len": MAX_INPUT_BYTES,
        "artifact_prefix": f"{keep}/{name}-",
        "print_final_stats": 1,
    }
    atheris.Setup([sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)], target.run)
    atheris.Fuzz()


# All of them.


def fuzz_in_child(python: str, name: str, seconds: int, seed: int, keep: Path) -> tuple[int, bool]:
    """Fuzz a target in a process; return how many inputs were tried, and whether all were as they must be."""
    command = [python, "-m", "nightly.fuzz", "--child", "--target", name]
    command += ["--seconds", str(seconds), "--seed", str(seed), "--keep", str(keep)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    counted = re.search(r"number_of_executed_units: *(\d+)", found.stdout) or re.search(r"Done (\d+)", found.stdout)
    covered = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", found.stdout)
    number = int(counted[1]) if counted else 0
    last = covered[-1] if covered else ("?", "?", "?")
    good = found.returncode == 0 and number > 0
    print(
        f"{name}: {number} inputs, {last[0]} edges, {last[2]} inputs that reach something new, seed {seed}", flush=True
    )
    if not good:
        print(f"{name}: status {found.returncode}\n{found.stdout[-6000:]}", flush=True)
        for path in sorted(keep.glob(f"{name}-*")):
            print(f"to repeat: python -m nightly.fuzz --target {name} --again {path}")
    return number, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=NAMES, help="all of them if there is none")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where inputs that are findings go")
    parser.add_argument("--python", default=sys.executable, help="a Python with atheris")
    parser.add_argument("--again", type=Path, nargs="+", help="run stored inputs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    targets = options.target or list(NAMES)
    if options.again:
        target = importlib.import_module("nightly.parsers").TARGETS[targets[0]]
        for path in options.again:
            target.run(path.read_bytes())
        print(f"{len(options.again)} inputs are as they must be")
        return 0
    options.keep.mkdir(parents=True, exist_ok=True)
    if options.child:
        fuzz_one(targets[0], options.seconds, options.seed, options.keep.resolve())
    if subprocess.run([options.python, "-c", "import atheris"], capture_output=True).returncode:
        print(f"atheris is not installed for {options.python}: it has wheels for some versions of Python only")
        return NO_ATHERIS
    results = [fuzz_in_child(options.python, name, options.seconds, options.seed, options.keep) for name in targets]
    bad = [name for name, (_, good) in zip(targets, results, strict=True) if not good]
    print(
        f"{sum(number for number, _ in results):,} inputs for {len(targets)} parsers, findings in: {', '.join(bad) or 'none'}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
