"""The runner that the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.child import Spec
from benchmarks.runner import run_cases, run_child
from benchmarks.runs import Record
from benchmarks.suite import Case, Columns, Entry, Settings, Suite

SETTINGS = Settings(directory=Path(), size_bytes=1, prime_bytes=1, rounds=3, quick=False)


def records_of(results: dict[str, Record]) -> list[Record]:
    """Run three rounds of entries whose runs give these results."""

    @contextmanager
    def prepared(case: Case, settings: Settings) -> Iterator[object]:
        yield lambda entry, number, verify: results[entry.name]

    case = Case("case", "A case", tuple(Entry(name, name) for name in results), rounds=3)
    suite = Suite("x", (case,), (), {}, prepared, lambda _: Columns((), lambda *_: []))  # type: ignore[arg-type]
    records: list[Record] = []
    run_cases(suite, [case], SETTINGS, records.append)
    return [record for record in records if record["kind"] == "run"]


def test_an_entry_that_takes_too_long_is_not_run_again() -> None:
    records = records_of({"slow": {"error": "no result after 1 s", "timed_out": True}, "quick": {"seconds": 1.0}})
    assert sorted((record["entry"], record["round"]) for record in records) == [
        ("quick", 0),
        ("quick", 1),
        ("quick", 2),
        ("slow", 0),
    ]


def test_an_entry_that_fails_is_run_in_each_round() -> None:
    assert len(records_of({"broken": {"error": "exit status 1"}})) == 3


def test_a_process_that_takes_too_long_is_a_record() -> None:
    record = run_child("benchmarks.load", Spec("stio", "/nowhere"), 0.01)
    assert record == {"error": "no result after 0 s", "timed_out": True}
