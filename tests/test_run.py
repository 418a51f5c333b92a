"""What `make test` runs: an eighth of each matrix, files divided by what they take, a reason for each test that is costly."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import costs
import pytest
import run
from counts import PART, eighth, part_of
from run import STAMPED, Lane

REPOSITORY = Path(__file__).parents[1]


# A part of a matrix.


@pytest.mark.parametrize("sizes", [(16, 16), (8, 8, 8), (2, 100), (3, 5, 7), (120, 2, 2)])
def test_a_part_is_an_eighth_and_has_each_value(sizes: tuple[int, ...]) -> None:
    names = "abc"[: len(sizes)]
    cases = [dict(zip(names, values, strict=True)) for values in itertools.product(*map(range, sizes))]
    chosen = [cases[k] for k in part_of(cases)]
    assert len(chosen) <= max(len(cases) / PART + sum(sizes), max(sizes))
    for name, size in zip(names, sizes, strict=True):
        assert {case[name] for case in chosen} == set(range(size))
    assert part_of(cases) == part_of(cases)


def test_parameters_that_come_in_pairs_are_told_apart() -> None:
    cases = [{"call": call, "way": way} for call in "abcd" for way in "xyz"]
    chosen = [cases[k] for k in part_of(cases)]
    assert len(chosen) <= 4
    assert {case["call"] for case in chosen} == set("abcd") and {case["way"] for case in chosen} == set("xyz")


@pytest.mark.parametrize(("num_cases", "num_chosen"), [(1, 1), (2, 1), (9, 2), (16, 4)])
def test_of_cases_that_share_no_value_an_eighth_is_enough(num_cases: int, num_chosen: int) -> None:
    cases = [{"file": str(k), "anyio_backend": loop} for k in range(num_cases) for loop in ("asyncio", "trio")]
    chosen = [cases[k] for k in part_of(cases)]
    assert len(chosen) == num_chosen
    assert num_chosen == 1 or {case["anyio_backend"] for case in chosen} == {"asyncio", "trio"}


def test_a_row_has_an_eighth_of_the_columns_and_eight_rows_have_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counts.LONG", False)
    columns = list(range(21))
    rows = [eighth(columns, row) for row in range(PART)]
    assert max(map(len, rows)) == 3
    assert sorted(itertools.chain(*rows)) == columns
    monkeypatch.setattr("counts.LONG", True)
    assert eighth(columns, 3) == columns


# What tests cost.


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Path]:
    """Give a directory with tests of their own, run with the plugin."""
    (tmp_path / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\n"
        f"sys.path.insert(0, {str(REPOSITORY / 'tests')!r})\n"
        "import costs, counts\n"
        "costs.MAX_CPU_SECONDS, costs.BUSY_FACTOR = 0.1, 1.0\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(costs.Recorder(Path(__file__).parent))\n"
        "def pytest_collection_modifyitems(items):\n"
        "    counts.mark_slow(items)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = costly\n  matrix\n  slow\n")
    yield tmp_path


def run_pytest(folder: Path, source: str, *options: str) -> str:
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-r", "f", *options, "test_it.py"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    # a real interpreter without torch: pytest, without the plugins of other packages
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout


COSTS = """
import subprocess, sys, time
import pytest

BUSY = "import time\\nwhile time.process_time() < 0.3: pass"

def work():
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass

@pytest.fixture(scope="module")
def shared():
    work()

@pytest.fixture
def own():
    work()

def test_cheap(): pass
def test_working(): work()
def test_of_a_fixture(own): pass
def test_of_a_shared_fixture(shared): pass
def test_of_a_child(): subprocess.run([sys.executable, "-I", "-c", BUSY])
@pytest.mark.costly("it is a test of costs")
def test_with_a_reason(): work()
def test_waiting(): time.sleep(0.2)  # waits: for the difference between processor and clock
"""


@pytest.mark.costly("pytest in a process of its own, with tests that work")
def test_a_costly_test_needs_a_reason(other: Path) -> None:
    said = run_pytest(other, COSTS)
    failed = {line.partition("::")[2] for line in said.splitlines() if line.startswith("FAILED")}
    assert {name.split()[0] for name in failed} == {"test_working", "test_of_a_fixture", "test_of_a_child"}, said
    assert "need a reason, in @pytest.mark.costly(REASON)" in said
    found = {cost.test.rpartition("::")[2]: cost for cost in costs.read(other)}
    assert len(found) == 7
    assert found["test_with_a_reason"].cpu_seconds > 0.15
    assert found["test_of_a_shared_fixture"].cpu_seconds < 0.1
    assert found["test_waiting"].seconds > 0.2 > found["test_waiting"].cpu_seconds


def test_a_matrix_is_run_in_part(other: Path) -> None:
    source = """
import pytest

@pytest.mark.matrix
@pytest.mark.parametrize("row", range(16))
@pytest.mark.parametrize("column", range(16))
def test_all(row, column): pass
"""
    cases = [{"row": row, "column": column} for row in range(16) for column in range(16)]
    num_chosen = len(part_of(cases))
    assert f"{num_chosen} passed, {256 - num_chosen} deselected" in run_pytest(other, source, "-m", "not slow")


# Lanes.


def test_every_file_is_in_one_lane() -> None:
    lanes = [Lane(), Lane(expected_seconds=100.0), Lane()]
    durations = {file: float(k % 7) for k, file in enumerate(run.test_files())}
    run.divide(run.test_files(), durations, lanes)
    assert sorted(itertools.chain(*(lane.files for lane in lanes))) == run.test_files()
    seconds = [lane.expected_seconds for lane in lanes]
    assert max(seconds) - min(seconds) < 0.2 * max(seconds)


@pytest.mark.matrix
@pytest.mark.parametrize("name", run.TOGETHER)
def test_files_that_share_something_are_in_one_lane(name: str) -> None:
    lanes = [Lane() for _ in range(4)]
    run.divide(run.test_files(), {}, lanes)
    with_it = [[f for f in lane.files if run.group_of(f) == name] for lane in lanes]
    assert len(list(filter(None, with_it))) == 1


def test_a_failure_of_any_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        [sys.executable, "-I", "-S", "-c", code] for code in ("print('why'); raise SystemExit(3)", "print('next')")
    )
    monkeypatch.setattr(Lane, "commands", lambda self: {"one": (first, {}), "two": (second, {})})
    passed, output, seconds = run.run(Lane(), tmp_path, {})
    assert (passed, output) == (False, "one: 0 s\nwhy\ntwo: 0 s\nnext\n")
    assert seconds.keys() == {"one", "two"}


def test_recorded_durations_are_those_of_files_that_exist() -> None:
    recorded = json.loads(run.DURATIONS.read_text())
    assert recorded.keys() >= {run.TYPES, run.DEVICE}
    missing = set(run.test_files()) - recorded.keys()
    assert len(missing) < 20, f"run `make durations`: {sorted(missing)}"


# Stamps.


@pytest.mark.parametrize("name", STAMPED)
def test_tests_with_a_stamp_exist_and_what_they_read_too(name: str) -> None:
    assert set(STAMPED[name].tests) <= set(run.test_files())
    assert [pattern for pattern in STAMPED[name].reads if not list(REPOSITORY.glob(pattern))] == []


def test_a_change_makes_the_stamp_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "REPOSITORY", tmp_path)
    monkeypatch.setattr(run, "GREEN", tmp_path / "build")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("one")
    (tmp_path / "build").mkdir()
    assert not run.is_green("pages")
    (tmp_path / "build" / "pages").write_text(run.digest("pages"))
    assert run.is_green("pages")
    (tmp_path / "other.txt").write_text("not read")
    assert run.is_green("pages")
    page.write_text("two")
    assert not run.is_green("pages")
    page.write_text("one")
    assert run.is_green("pages")
    page.rename(page.with_name("other.md"))
    assert not run.is_green("pages")


# Environments.


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("owner", [None, "/another/checkout"])
def test_c466_make_changes_no_environment_of_others(owner: str | None, tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho changed > $0\n")
    python.chmod(0o755)
    if owner is not None:
        (tmp_path / ".stio-owner").write_text(owner)

    def written() -> dict[Path, tuple[int, int, int]]:  # a read changes the time of the last access
        return {path: ((found := path.stat()).st_mtime_ns, found.st_ino, found.st_size) for path in tmp_path.rglob("*")}

    before = written()
    done = subprocess.run(["make", "fmt", f"VENV={tmp_path}"], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path} was not made by make in this directory" in done.stderr
    assert written() == before


def test_help_lists_each_target_that_is_for_people() -> None:
    text = (REPOSITORY / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    described = re.findall(r"^([a-z-]+):.*  ## ", text, re.MULTILINE)
    assert set(phony.split()) - set(described) <= {"own-environment", "fmt", "fuzz", "clean"}
