"""The numbers of known faults and their tests. `make faults` runs part E, and writes the tests' names into the page.

The page docs/faults.md has one row for each number. Its last column is made from the tests: a test names the numbers
that it covers in its own name (`test_c95_a_cancel_at_every_await`), or in the ids of its cases (`A04-length-2^64-1`).
All other text of the page is written by hand. `tests/test_safety_pages.py` compares the page with the tests.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent
PAGE = TESTS.parent / "docs" / "faults.md"
NUMBER = re.compile(r"_[abcd](\d{2,3})(?=_|$)")
CASE = re.compile(r"([A-Da-d](\d{2,3}))-")
ROW = re.compile(r"^\| (\d+) \| (.+) \| (.+) \| (.*) \|$", re.MULTILINE)
OPEN = "open: "
"""Begins the last column of a number without a test."""

Found = dict[int, dict[str, list[str]]]
"""By number, by file: names of tests, `test_x[A04]` where only the cases whose ids begin so belong to the number."""


@cache
def named_tests(root: Path = TESTS) -> Found:
    """Return the tests of each number; reads the source of all tests and imports none."""
    found: Found = defaultdict(lambda: defaultdict(list))
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        values = dict(_assigned(tree.body))
        name = path.relative_to(root).as_posix()
        for test in ast.walk(tree):
            if not isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) or not test.name.startswith("test_"):
                continue
            own = [int(number) for number in NUMBER.findall(test.name)]
            for number in own:
                found[number][name].append(test.name)
            cases = {case: int(number) for case, number in _cases(test.decorator_list, values)}
            for case, number in sorted(cases.items()):
                if number not in own:
                    found[number][name].append(f"{test.name}[{case}]")
    return found


def _assigned(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names of a module and their values."""
    for statement in body:
        if isinstance(statement, ast.Assign) and statement.value is not None:
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    yield target.id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value


def _cases(decorators: Iterable[ast.expr], values: dict[str, ast.expr]) -> Iterator[tuple[str, str]]:
    """Yield the beginnings of ids with their numbers: those in decorators, and in the values that they name."""
    seen: set[str] = set()
    pending: list[ast.AST] = list(decorators)
    while pending:
        for node in ast.walk(pending.pop()):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                if match := CASE.match(node.value):
                    yield match[1], match[2]
            elif isinstance(node, ast.Name) and node.id in values and node.id not in seen:
                seen.add(node.id)
                pending.append(values[node.id])


def with_tests(page: str, found: Found) -> str:
    """Return the page with the tests of each number in its last column; a number without tests keeps its text."""

    def row(match: re.Match[str]) -> str:
        number, fault, answer, before = match.groups()
        files = found.get(int(number), {})
        cell = "<br>".join(f"`{file}` {', '.join(f'`{test}`' for test in tests)}" for file, tests in files.items())
        return f"| {number} | {fault} | {answer} | {cell or before} |"

    return ROW.sub(row, page)


class Outcomes:
    """Collects how each test ended, for its number."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        """By number, by the test's name without its parameters: how it ended, and why it fails."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, or of a setup that ended it."""
        if report.when != "call" and report.passed:
            return
        why = getattr(report, "wasxfail", "")
        if report.skipped:
            outcome = f"fails: {why}" if why else f"skipped: {report.longrepr[2] if report.longrepr else ''}"  # type: ignore[index]
        else:
            outcome = report.outcome
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        numbers = NUMBER.findall(name) or ["other"]
        for number in numbers:
            self.found[number][name].append(outcome)


def table(outcomes: Outcomes) -> str:
    """Return the numbers in order, a line for each test."""
    lines = ["| Number | Test | Outcome |", "|---|---|---|"]
    for number in sorted(outcomes.found):
        for name, ends in sorted(outcomes.found[number].items()):
            said = ", ".join(f"{ends.count(end)} x {end}" if len(ends) > 1 else end for end in sorted(set(ends)))
            lines.append(f"| {number} | `{name}` | {said} |")
    return "\n".join(lines)


def main() -> int:
    """Write the tests into the page, run the tests of part E, and print how each ended."""
    PAGE.write_text(with_tests(PAGE.read_text(), named_tests()))
    if sys.argv[1:] == ["--page"]:
        return 0
    outcomes = Outcomes()
    folders = [str(FOLDER), *sys.argv[1:]]
    status = pytest.main(["-q", "--no-header", "--no-summary", *folders], plugins=[outcomes])
    print(table(outcomes))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
