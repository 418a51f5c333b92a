"""Memory of the host by address, and how much of it this process may use.

`regions.py` has the regions, the mappings, the calls of libc, and the budgets. `control_groups.py` says what the
machine and the control groups leave to this process: memory and processors.

Rules: memory that a process asks for is checked against its control groups before it is allocated where it is large
(`require`), and a failed allocation of anyone's becomes a `HostMemoryError` (`reporting_shortage`).
"""

from stio.runtime.memory.control_groups import available_bytes, num_processors, read_text, room_in_memory
from stio.runtime.memory.regions import (
    SYSTEM_PAGE_BYTES,
    UNCHECKED_BYTES,
    Region,
    WritableMemory,
    allocate,
    default_budget_bytes,
    fits,
    libc,
    map_file,
    memory_error,
    move,
    owned,
    populate,
    quick_libc,
    reporting_shortage,
    require,
)

__all__ = [
    "SYSTEM_PAGE_BYTES",
    "UNCHECKED_BYTES",
    "Region",
    "WritableMemory",
    "allocate",
    "available_bytes",
    "default_budget_bytes",
    "fits",
    "libc",
    "map_file",
    "memory_error",
    "move",
    "num_processors",
    "owned",
    "populate",
    "quick_libc",
    "read_text",
    "reporting_shortage",
    "require",
    "room_in_memory",
]
