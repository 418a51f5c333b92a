"""Each number of part E of the list of faults: its tests, and whether they pass. `make faults` prints it as Markdown."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NUMBER = re.compile(r"_c(2\d\d)")


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
        numbers = NUMBER.findall(report.nodeid.rpartition("::")[2]) or ["other"]
        for number in numbers:
            self.found[number][name].append(outcome)


def table(outcomes: Outcomes) -> str:
    """Return the numbers in order, a line for each test."""
    lines = ["| Number | Test | Today |", "|---|---|---|"]
    for number in sorted(outcomes.found):
        for name, ends in sorted(outcomes.found[number].items()):
            said = ", ".join(f"{ends.count(end)} x {end}" if len(ends) > 1 else end for end in sorted(set(ends)))
            lines.append(f"| {number} | `{name}` | {said} |")
    return "\n".join(lines)


def main() -> int:
    """Run the tests and print the table."""
    outcomes = Outcomes()
    folders = [str(FOLDER), *sys.argv[1:]]
    status = pytest.main(["-q", "--no-header", "--no-summary", *folders], plugins=[outcomes])
    print(table(outcomes))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
