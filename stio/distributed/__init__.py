"""Loads of many ranks: each reads only the bytes that it holds.

It is built on torch.distributed, which the caller has initialised, and on its `DTensor`s; start ranks by torchrun.
`parts.py` says which part of the checkpoint each `DTensor` of a module is, by `stio.format.placements`. The engine
below gets slices, and knows nothing of ranks: a load into a sharded module or state (`load.py`) is one load for each
rank, of its own parts into its own memory. A load without a module (`placed.py`) makes `DTensor`s. No rank talks to
another one.
"""

from __future__ import annotations

from stio.distributed.load import load_into
from stio.distributed.placed import Placements

__all__ = ["Placements", "load_into"]
