"""How often tests with random or repeated work do it: `make nightly` sets STIO_TEST_LONG, and has more than `make test`."""

from __future__ import annotations

import os

LONG = os.environ.get("STIO_TEST_LONG") == "1"


def count(quick: int, long: int) -> int:
    """Return the first number in `make test`, the second in the stage `long-counts` of `make nightly`."""
    return long if LONG else quick
