"""Where the checkout is, for processes that tests start. Without torch."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def python_path(*paths: Path) -> str:
    """Return the PYTHONPATH of a process that finds the checkout, and packages that this process finds by its own."""
    first = paths or (REPOSITORY, REPOSITORY / "tests")
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])
