"""Loading: from files to tensors, on the CPU or on accelerators, into dictionaries, streams and modules.

Life of a load. `api.py` checks the keywords once (`LoadOptions`) and starts an operation, whose body (`body.py`) runs
on a thread of stio's own. A load is four values, each made from the one before: `stio.storage.checkpoint` opens every
shard and checks its header (`OpenCheckpoint`); `select.py` selects the tensors of each device, their slices and casts
(`SelectedTensors`); `planned.py` decides how each file is read for each device, and `plan.py` puts the reads in order
(`PlannedLoad`): groups of neighbouring tensors that are delivered together, cut into blocks of one read each;
`scheduler.py` runs that (`LoadScheduler`). It begins groups within the budget, an executor moves their bytes, and a
group that is complete (a `LoadedGroup`) goes to a `load`, to a queue (`consumers.py`), to threads that take tensors by
name (`by_name.py`), or into memory of the caller (`targets/`): a module, a nested state, parts of tensors. A read path
(`read_paths.py`, `gds_path.py`) says where the bytes of a group go, and makes its tensors. The executor is the engine
(`engine.py`, `stio.native`) or, where that cannot move the bytes, the plain one (`plain.py`). The changed elements of
deltas are applied to a group between its reads and its tensors (`patching.py`).

Invariants. The memory of a group counts against the budget from its begin until its last user has released it, unless
the consumer keeps it. Groups begin in the plan's order; a group that is larger than the budget is read alone. A group
is delivered when its bytes are there for every thread and stream. When a load returns or raises, no thread and no copy
touches its buffers.

A cancel calls `LoadScheduler.stop`: the engine begins no further chunk, workers of the plain executor end after their
piece. The first error of the executor ends the load in the same manner, and `run` raises it.

`options.py` has the keywords. `Delivery` (`read_paths.py`) is how a consumer gets its tensors. Start with `body.py`,
then read `planned.py` and `scheduler.py`.

Rules that are easy to miss:

- A file is cold if less than half of it is in the page cache. Cold files are read past the cache, except mapped files,
  loads of 16 MiB or less, and files that other ranks on this host load too. A cold map needs no O_DIRECT: huge pages
  make the kernel read ahead in pieces of 2 MiB.
- The engine carries out a load if each file is local or held whole by a `HostCache`, and every device has a driver.
- A tensor that a delta has patched is copied, whatever `memory` says, and so are the others of its file. A part of it
  needs all codes of its patches: they are a prefix sum.
- Casts: `casts.py` decides what a cast may change, and `companions.py` which tensors mean something only together
  (quantized weights and their scales). Rows of inner dimensions are read whole, with gaps of up to 256 KiB
  (1 MiB from a store).
- Into a module on the CPU the load's thread copies. On a device the caller's thread does (`fill_from` in `api.py`), on
  its current stream: queued work may still read the old values. If a group is copied as it is, it is one tensor of
  bytes, and no temporary tensor per parameter exists.
- Where `device=` goes by name, each file is planned once per device, under one budget. Tied names on two devices become
  a tensor on each.
- A consumer that takes tensors by name can never wait forever: the requested group moves to the front, and if it would
  wait for budget (`LoadScheduler.is_blocked`), the thread that takes it reads it alone.
- A stream refers to the device storages of the group that was taken, so dropping a tensor frees no device memory. torch
  releases the GIL there, and freeing device memory takes long enough for a busy thread to take it; the end of a storage
  keeps it.
"""

from stio.loading.api import Checkpoint, Stream, fill_from, load, load_into, open
from stio.loading.body import collect, open_with_options, prefetch, reading_operation, scheduled
from stio.loading.by_name import LoadByName
from stio.loading.casts import DtypesLike, planned_casts
from stio.loading.options import DevicesLike, LoadOptions, Memory
from stio.loading.plan import Group, Names, stored_shape
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler
from stio.loading.select import PlacedPart, PlacementsLike, select_tensors

__all__ = [
    "Checkpoint",
    "Delivery",
    "DevicesLike",
    "DtypesLike",
    "Group",
    "LoadByName",
    "LoadOptions",
    "LoadScheduler",
    "Memory",
    "Names",
    "PlacedPart",
    "PlacementsLike",
    "Stream",
    "collect",
    "fill_from",
    "load",
    "load_into",
    "open",
    "open_with_options",
    "planned_casts",
    "prefetch",
    "reading_operation",
    "scheduled",
    "select_tensors",
    "stored_shape",
]
