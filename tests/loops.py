"""The event loops that tests run on. A test with the mark `anyio` runs on all of them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


def _backend(loop: str, name: str, *marks: pytest.MarkDecorator, **options: Any) -> Any:
    """Return a loop to run on; a machine with a GPU and no network may lack all but asyncio."""
    missing = pytest.mark.skipif(find_spec(loop) is None, reason=f"{loop} is not installed")
    return pytest.param((name, options), id=loop, marks=[missing, *marks])


def _backends(*marks: pytest.MarkDecorator) -> list[Any]:
    return [
        _backend("asyncio", "asyncio", use_uvloop=False),
        _backend("uvloop", "asyncio", *marks, use_uvloop=True),
        _backend("trio", "trio", *marks),
    ]


BACKENDS = _backends()

others_are_slow = pytest.mark.parametrize("anyio_backend", _backends(pytest.mark.slow))
"""For a test of a large number of things: it takes seconds on a loop, and what a loop does is tested with a few of them."""
