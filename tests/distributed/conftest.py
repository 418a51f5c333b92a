"""Processes that are the ranks of a group (gloo), for the tests of `stio.distributed`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "remote"))
