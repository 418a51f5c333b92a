"""The oldest and the newest versions that stio works with, each tested in a fresh environment: `make floors`.

    python tests/floors.py            # all environments, then the table in docs/versions.md
    python tests/floors.py oldest     # one of them; the other rows of the table stay
    python tests/floors.py newest     # those whose names begin so

Each environment is made in build/floors, and removed after its tests unless `--keep` is given. `oldest` has the
lowest version of each required dependency in pyproject.toml, on the lowest Python. `newest-torch` has the newest torch
and numpy on the newest Python but one, and `newest-python` the newest Python, with the minor version of torch before the
newest. All other packages are those of constraints.txt. Each takes 20
minutes on two cores, and 9 GB: builds of torch on the package index bring the libraries of CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
BUILD = ROOT / "build" / "floors"
BEGIN, END = "<!-- Written by make floors: begin -->", "<!-- end -->"
MAX_REASONS = 20

EXTRAS = "cli,dev,hash,hub,otel,plot"
LEFT_OUT = {
    "tests/integrations": "each framework requires versions of torch of its own",
    "tests/crash": "kills and full disks: they depend on the kernel, not on these versions",
    "tests/nightly": "run by `make nightly`",
    "tests/test_docs.py": "pages show the output of the development environment",
}
"""Tests that are not run, and why. Nor are those with the marks `gpu` and `slow`."""

NOT_CONSTRAINED = (
    "filelock fsspec jinja2 markupsafe mpmath networkx nvidia-cufile setuptools sympy torch typing-extensions"
)
"""torch and what it requires itself."""


@dataclass(frozen=True)
class Environment:
    """A Python and the packages that are not those of constraints.txt."""

    name: str
    python: str
    """Path of the interpreter."""
    pins: Mapping[str, str]
    """Exact versions by package."""


def main() -> int:
    """Test the environments; return 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="environments, or how their names begin: oldest, newest; default: all")
    parser.add_argument("--keep", action="store_true", help="do not remove the environments")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="only these; the page is not written then")
    arguments = parser.parse_args()
    rows = []
    for environment in environments(arguments.names):
        rows.append(row := tested(environment, arguments.tests, keep=arguments.keep))
        print(row["line"], flush=True)
        if arguments.tests == ["tests"]:
            write_page(row)
    return int(any(row["failed"] for row in rows))


def environments(names: list[str]) -> Iterator[Environment]:
    """Yield the environments with these names, all without names."""
    pythons = interpreters()
    lowest = requirements(ROOT / "pyproject.toml")
    minor = int(re.findall(r"\d+", lowest.pop("python"))[1])
    if minor not in pythons:
        sys.exit(f"there is no Python 3.{minor}, the oldest that stio works with")
    others = {name: version for name, version in lowest.items() if name != "torch"}
    oldest, (previous, newest) = pythons[minor], [pythons[number] for number in sorted(pythons)[-2:]]
    for name, python, age in (("oldest", oldest, None), ("newest-torch", previous, 0), ("newest-python", newest, 1)):
        if names and not name.startswith(tuple(names)):
            continue
        pins = lowest
        if age is not None:
            pins = constrained(others) | {
                "numpy": releases(python, "numpy")[0],
                "torch": releases(python, "torch")[age],
            }
        yield Environment(name, python, pins)


def requirements(path: Path) -> dict[str, str]:
    """Return the lowest version of each required dependency, and of "python"."""
    project = tomllib.loads(path.read_text())["project"]
    found = {"python": project["requires-python"].removeprefix(">=")}
    for line in project["dependencies"]:
        name, _, version = line.partition(">=")
        found[name] = version
    return found


def constrained(names: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of packages in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    return {name: versions[name] for name in names}


def interpreters() -> dict[int, str]:
    """Return an interpreter for each minor version of Python 3 that is installed, pyenv's included."""
    folders = [*map(Path, os.environ.get("PATH", "").split(os.pathsep)), *Path.home().glob(".pyenv/versions/*/bin")]
    found: dict[int, str] = {}
    for folder in folders:
        for path in sorted(folder.glob("python3.*")):
            named = re.fullmatch(r"python3\.(\d+)", path.name)
            if named and int(named[1]) not in found and is_final(path):
                found[int(named[1])] = str(path)
    return found


def is_final(python: Path) -> bool:
    """Return whether an interpreter runs, and is no pre-release."""
    code = "import sys, venv; sys.exit(sys.version_info.releaselevel != 'final')"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def releases(python: str, package: str) -> list[str]:
    """Return the last release of each minor version that the package index has for an interpreter, the newest first."""
    done = subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "index", "versions", package],
        capture_output=True,
        text=True,
        check=True,
    )
    listed = re.search(r"^Available versions: (.+)$", done.stdout, re.MULTILINE)
    assert listed is not None, done.stdout
    last: dict[str, str] = {}
    for version in listed[1].split(", "):
        last.setdefault(version.rpartition(".")[0], version)
    return list(last.values())


def tested(environment: Environment, tests: list[str], *, keep: bool) -> dict[str, object]:
    """Make an environment, run the tests in it, and return its row of the table."""
    folder = BUILD / environment.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        python = installed(environment, folder)
        versions = json.loads(output([python, "-c", VERSIONS]))
        began = time.monotonic()
        report = folder / "report.xml"
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-m", "not gpu and not slow"]
        command += [f"--ignore={path}" for path in LEFT_OUT] + [f"--junitxml={report}", f"--basetemp={folder / 'tmp'}"]
        with (BUILD / f"{environment.name}.log").open("w") as log:
            subprocess.run([*command, *tests], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        minutes = (time.monotonic() - began) / 60
        return row(environment.name, versions, counted(report), minutes)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


VERSIONS = """
import importlib.metadata, json, platform
names = ("torch", "numpy", "anyio", "aiofiles", "msgspec")
print(json.dumps({"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}))
"""


def installed(environment: Environment, folder: Path) -> str:
    """Install the packages of an environment; return its interpreter."""
    output([environment.python, "-m", "venv", folder / "venv"])
    python = str(folder / "venv" / "bin" / "python")
    constraints = folder / "constraints.txt"
    free = {canonical(name) for name in [*NOT_CONSTRAINED.split(), *environment.pins]}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if "==" in line and canonical(line.partition("==")[0]) not in free]
    kept += [f"{name}=={version}" for name, version in environment.pins.items()]
    constraints.write_text("\n".join(kept) + "\n")
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--constraint", constraints]
    print(f"{environment.name}: installing torch {environment.pins['torch']}", flush=True)
    output([*install, *environment.pins])
    output([*install, "hatchling", "--editable", f"{ROOT}[{EXTRAS}]"])
    return python


def canonical(name: str) -> str:
    """Return the name of a package as the package index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def output(command: list[object]) -> str:
    """Run a command; return its output, or end with it if the command fails."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def counted(report: Path) -> tuple[Counter[str], list[str], Counter[str]]:
    """Return the number of tests by result, the names of those that failed, and the reasons of those that were skipped."""
    results: Counter[str] = Counter()
    failed: list[str] = []
    reasons: Counter[str] = Counter()
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else iter(())
    for case in cases:
        kinds = {part.tag: part for part in case}
        if "failure" in kinds or "error" in kinds:
            results["failed"] += 1
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds and kinds["skipped"].get("type") != "pytest.xfail":
            results["skipped"] += 1
            reasons[str(kinds["skipped"].get("message")).partition("\n")[0]] += 1
        else:
            results["xfailed" if "skipped" in kinds else "passed"] += 1
    if not results["passed"]:
        failed.append("no test ran")
    return results, failed, reasons


def row(
    name: str, versions: dict[str, str], counts: tuple[Counter[str], list[str], Counter[str]], minutes: float
) -> dict[str, object]:
    """Return a row of the table, and what else is printed."""
    results, failed, reasons = counts
    cells = [name, time.strftime("%Y-%m-%d"), *versions.values()]
    cells += [f"{results[kind]:,}" for kind in ("passed", "failed", "skipped", "xfailed")]
    for test in failed:
        print(f"  failed: {test}")
    for reason, count in reasons.most_common(MAX_REASONS):
        print(f"  skipped {count}: {reason}")
    print(f"  {minutes:.0f} minutes")
    return {"name": name, "line": f"| {' | '.join(cells)} |", "failed": failed}


def write_page(row: Mapping[str, object]) -> None:
    """Replace the row of an environment in the page, or add it."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    table, end, after = rest.partition(END)
    assert begin, f"{PAGE} has no line {BEGIN}"
    assert end, f"{PAGE} has no line {END}"
    head = [
        "| Environment | Date | Python | torch | numpy | anyio | aiofiles | msgspec | passed | failed | skipped | known faults |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    rows[str(row["name"])] = str(row["line"])
    lines = [rows[name] for name in ("oldest", "newest-torch", "newest-python") if name in rows]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join([*head, *lines]) + f"\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
