"""The event loops that tests run on. A test with the mark `anyio` runs on all of them, in `make nightly` at the latest.

uvloop is driven by the same code of anyio and of stio as asyncio. In `make test` it runs what waits, wakes and cancels
(tests/runtime, tests/loading/test_cancel.py), and each public function once (`on_all`); the others run in `make nightly`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


def _backend(loop: str, name: str, *marks: pytest.MarkDecorator, **options: Any) -> Any:
    """Return a loop to run on; a machine with a GPU and no network may lack all but asyncio."""
    missing = pytest.mark.skipif(find_spec(loop) is None, reason=f"{loop} is not installed")
    return pytest.param((name, options), id=loop, marks=[missing, *marks])


def _backends(*slow: str) -> list[Any]:
    """Return all loops, some of which are slow tests."""
    loops = {
        "asyncio": ("asyncio", {"use_uvloop": False}),
        "uvloop": ("asyncio", {"use_uvloop": True}),
        "trio": ("trio", {}),
    }
    return [
        _backend(loop, name, *([pytest.mark.slow] if loop in slow else []), **options)
        for loop, (name, options) in loops.items()
    ]


BACKENDS = _backends("uvloop")
ALL = _backends()

on_all = pytest.mark.parametrize("anyio_backend", ALL)
"""For a test that runs on all loops in `make test` too."""

others_are_slow = pytest.mark.parametrize("anyio_backend", _backends("uvloop", "trio"))
"""For a test of a large number of things: it takes seconds on a loop, and what a loop does is tested with a few of them."""
