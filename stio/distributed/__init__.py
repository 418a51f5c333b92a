"""Loads and saves of many ranks: each reads and writes only the bytes that it holds.

It is built on torch.distributed, which the caller has initialised, and on its `DTensor`s; start ranks by torchrun.
`parts.py` says which part of the checkpoint each `DTensor` is, by `stio.format.placements`. The engine below gets
slices, parts of files and ranges, and knows nothing of ranks. A load into a sharded module or state (`load.py`) is
one load for each rank, of its own parts into its own memory; before that, `broadcast.py` fills what several ranks
need: it is read once and sent. `same_checkpoint.py` compares what ranks have opened. A load without a module makes
`DTensor`s (`placed.py`). A save (`save.py`, `shared_save.py`) is one save for each rank, of its own parts into files
that all write: `layout.py` is what they must agree on first, and the first rank commits. `dcp_reader.py` and
`dcp_writer.py` do both for `torch.distributed.checkpoint`, whose planner decides what each rank reads and writes.
`ranks.py` is how ranks learn of each other's failures, and exchange small values: one that fails, is cancelled or
killed is an error on all of them, within a bounded time.
"""

from __future__ import annotations

from stio.distributed.dcp_reader import StioStorageReader
from stio.distributed.dcp_stager import StioStager
from stio.distributed.dcp_writer import StioStorageWriter
from stio.distributed.load import load_into
from stio.distributed.placed import Placements
from stio.distributed.save import Saver, save

__all__ = ["Placements", "Saver", "StioStager", "StioStorageReader", "StioStorageWriter", "load_into", "save"]
