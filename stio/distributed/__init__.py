"""Loads and saves of many ranks: each reads and writes only the bytes that it holds.

It is built on torch.distributed, which the caller has initialised, and on its `DTensor`s; start ranks by torchrun. The
engine below gets slices, ranges and parts of files, and does not import torch.distributed. Start with `parts.py`: which
part of the checkpoint's tensor a `DTensor` is. It has `Placements` too, for loads without a module.

- `ranks.py`: failures of other ranks, and small values that ranks exchange. A rank that fails, is cancelled or killed
  is an error on all, within a bounded time. `transfer.py`: how ranks send each other many bytes.
- Loads: `load.py` fills a sharded module or state, one load for each rank. Before that, `broadcast.py` fills what
  several ranks need: it is read once and sent.
- Saves: `save.py` and `sharded_save.py` are one save for each rank; `agreement.py` is what ranks agree on first, and
  the first rank commits. On a filesystem all write into the same files. `sharded_upload.py`: in a store each file has
  an owner, to which the others send their bytes.
- `torch.distributed.checkpoint`, whose planner decides what each rank reads and writes: `dcp_reader.py`,
  `dcp_writer.py`, `dcp_stager.py`.
- `torch_private.py`: all that is used of torch's private names.
"""

from __future__ import annotations

from stio.distributed.dcp_reader import StioStorageReader
from stio.distributed.dcp_stager import StioStager
from stio.distributed.dcp_writer import StioStorageWriter
from stio.distributed.load import load_into
from stio.distributed.parts import Placements
from stio.distributed.save import Saver, save

__all__ = ["Placements", "Saver", "StioStager", "StioStorageReader", "StioStorageWriter", "load_into", "save"]
