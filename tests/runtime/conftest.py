"""Tests of what waits for threads, and wakes tasks, run on all event loops."""

from __future__ import annotations

from typing import Any

import loops
import pytest


@pytest.fixture(params=loops.ALL)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param
