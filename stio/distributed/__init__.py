"""Loads and saves of many ranks: each reads and writes only the bytes that it holds.

It is built on torch.distributed, which the caller has initialised, and on its `DTensor`s; start ranks by torchrun. The
engine below gets slices, ranges and parts of files, and does not import torch.distributed. Start with `parts.py`: which
part of the checkpoint's tensor a `DTensor` is, by the pure rules of `placements.py`. It has `Placements` too, for loads
without a module.

- `ranks.py`: failures of other ranks, and small values that ranks exchange. A rank that fails, is cancelled or killed
  is an error on all, within a bounded time. `transfer.py`: how ranks send each other many bytes.
- Loads: `load.py` fills a sharded module or state, one load for each rank. Before that, a broadcast fills what several
  ranks need: it is read once and sent.
- Saves: `save.py` is one save for each rank; `agreement.py` is what ranks agree on first, and the first rank commits.
  `plan_parts.py` (pure) plans what one rank writes or sends. `sharded_write.py`: on a filesystem all write into the
  same files; in a store each file has an owner, to which the others send their bytes.
- `torch.distributed.checkpoint`, whose planner decides what each rank reads and writes: `dcp_reader.py`, and
  `dcp_writer.py` with the stager of `async_save`.

Writing one file from many ranks. A page that two ranks share is written through the page cache by both; whole pages of
one rank are written past it. Hosts have no common page cache, so on a filesystem that is not local exact ranges are
written past it where O_DIRECT supports any offset (NFS on Linux). Strided ranges go through it; a client that sends
whole pages (FUSE with a write-back cache) may lose bytes of them. Ranks other than the first hold no lock: recovery
detects the first rank's death like that of any save.

Stores accept no part below 5 MiB except the last, and a digest needs the bytes in order, so one rank, the owner,
uploads each file, and the others send it their bytes in windows of at most 8 MiB. Each rank stages its bytes in the
order of the windows, which takes the owners in turn: all upload at the same time, with a bounded number of windows in
memory. The end of the first rank's upload commits a file that is the whole checkpoint. A rank that has agreed deletes
nothing any more, since the first rank may have published.

Agreement has two steps: all parts are durable and closed, then the first rank commits. Failures are looked up in the
store of the process group ten times a second, by one thread per rank over a connection of its own, not by workers
between blocks, since each request would cost a turn at the GIL. What stio sends between ranks is plain data of one
expected type; torch's own messages (plans and results of its distributed checkpoint) are pickled by torch. A
`RankError` has the other rank's error as its cause, made anew if its class is stio's or Python's.
"""

from __future__ import annotations

from stio.distributed.dcp_reader import StioStorageReader
from stio.distributed.dcp_writer import StioStager, StioStorageWriter
from stio.distributed.load import load_into
from stio.distributed.parts import Placements
from stio.distributed.save import Saver, save

__all__ = ["Placements", "Saver", "StioStager", "StioStorageReader", "StioStorageWriter", "load_into", "save"]
