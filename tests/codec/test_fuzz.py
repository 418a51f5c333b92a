"""The fuzzer in the gate, and proof that it would find something."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from stio.codec import _decode


def _load() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "fuzz_header.py"
    spec = importlib.util.spec_from_file_location("fuzz_header", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


fuzz_header = _load()


@pytest.mark.timeout(240)  # 20 s on a quiet core
def test_fuzz_100_000_headers() -> None:
    said: list[str] = []
    assert fuzz_header.run(seconds=0, min_cases=100_000, seed=1, report=said.append) == 0, "\n".join(said)


def test_corpus_is_good() -> None:
    for raw, size in fuzz_header.corpus():
        kind, problem = fuzz_header.check((raw, size))
        assert (kind, problem) == ("accepted", None), raw


@pytest.mark.timeout(240)
def test_the_fuzzer_finds_a_seeded_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    def lenient(decode: object, piece: bytes, quotes_each: int) -> object:
        try:
            return decode(b"{" + piece + b"}")  # type: ignore[operator]
        except (ValueError, RecursionError):
            return None

    monkeypatch.setattr(_decode, "_decoded", lenient)
    said: list[str] = []
    assert fuzz_header.run(seconds=0, min_cases=50_000, seed=1, report=said.append) == 1
    assert "hex:" in said[0]
