"""No test sleeps for long: it waits for a condition, or the time is that of the test (`clocks.py`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_SLEEP_SECONDS = 0.2

_SLEEP = re.compile(r"\b(u?)sleep[ (]([\d_.]*\d)")
"""A constant time: of Python, also in the code of another process, of C, or of a shell."""

WITH_OTHER_TIME = {
    "native/__init__.py": "it imports nothing of stio",
    "clock.py": "it is the time of all others",
    "runtime/notifier.py": "a wait for a lock lasts as long as the system says",
}
"""Files of `stio/` that call the functions of `time` which `stio.clock` stands for, with the reason."""


def long_sleeps(text: str) -> list[str]:
    """Return the lines that sleep for longer than `MAX_SLEEP_SECONDS`, and do not say `waits: ` and why."""
    return [
        line.strip()
        for line in text.splitlines()
        if "waits: " not in line
        and any(float(number) / (1e6 if micro else 1) > MAX_SLEEP_SECONDS for micro, number in _SLEEP.findall(line))
    ]


def test_no_test_sleeps_for_long() -> None:
    files = [path for path in (ROOT / "tests").rglob("*.*") if path.suffix in (".py", ".c", ".cpp", ".h")]
    assert len(files) > 200
    found = {str(path): lines for path in files if path != Path(__file__) and (lines := long_sleeps(path.read_text()))}
    assert found == {}, "wait for a condition, or say why it has to sleep: `# waits: REASON`"


@pytest.mark.parametrize(
    ("line", "is_long"),
    [
        ("time.sleep(0.2)", False),
        ("time.sleep(0.25)", True),
        ("await anyio.sleep(1)", True),
        ("await asyncio.sleep(60)  # waits: until it is cancelled", False),
        ('code = "import time; time.sleep(3)"', True),
        ("usleep(200000);", False),
        ("usleep(200_001);", True),
        ('run("bash", "-c", "sleep 5 && kill $PPID")', True),
        ("time.sleep(seconds)", False),
        ("module()._sleep(400_000_000)", False),  # cycles of a device
        ("assert event.wait(30)", False),
    ],
)
def test_long_sleeps_are_found(line: str, is_long: bool) -> None:
    assert bool(long_sleeps(f"before()\n    {line}\nafter()")) == is_long


def test_stio_has_its_time_from_one_place() -> None:
    own = re.compile(r"\btime\.(monotonic|sleep|time)\b|^from time import .*\b(monotonic|sleep|time)\b", re.MULTILINE)
    files = {
        str(path.relative_to(ROOT / "stio")) for path in (ROOT / "stio").rglob("*.py") if own.search(path.read_text())
    }
    assert files == WITH_OTHER_TIME.keys()
