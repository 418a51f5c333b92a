"""The fuzzer in the gate, and proof that it would find something."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from counts import count

from stio.format.json_scanner import Scanner

PROGRAM = Path(__file__).resolve().parents[1] / "fuzz_header.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_header", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz_header = _load()


@pytest.mark.costly("random cases")
@pytest.mark.timeout(240)
def test_fuzz_headers() -> None:
    """2,000 headers here, 100,000 in `make nightly`, which also has a stage that fuzzes for minutes."""
    num_thousands = count(1, 50)
    # A real interpreter without torch: two, one for each processor.
    command = [sys.executable, str(PROGRAM), "--seconds", "0", "--min-cases", f"{num_thousands}000", "--seed"]
    halves = [
        subprocess.Popen([*command, seed], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for seed in ("1", "2")
    ]
    said = [half.communicate()[0] for half in halves]
    assert [half.returncode for half in halves] == [0, 0], "\n".join(said)
    assert all(re.match(f"{num_thousands}[0-9]{{3}} headers", text) for text in said), said


def test_corpus_is_good() -> None:
    for case in fuzz_header.corpus():
        header = fuzz_header.stio_header(fuzz_header.file_of(case))
        assert fuzz_header.check(case, header) == ("accepted", None), case


@pytest.mark.timeout(240)
def test_the_fuzzer_finds_a_seeded_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(decode: object, text: bytes, num_quotes: int) -> object:
        try:
            return decode(text)  # type: ignore[operator]
        except (ValueError, RecursionError):
            return None

    monkeypatch.setattr(Scanner, "decode_members", staticmethod(lenient))
    said: list[str] = []
    assert fuzz_header.run(seconds=0, min_cases=50_000, seed=1, report=said.append) == 1
    assert "hex:" in said[0]
