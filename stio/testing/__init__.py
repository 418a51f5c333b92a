"""For tests of storages, of devices, and of code that uses stio: fakes with faults on request, and a contract. Public.

A fake replaces a path or a device: `stio.load(FaultyRoot(...))`, `stio.load(MemoryRoot(files))`,
`stio.save(tensors, MemoryDestination())`, `device=FakeDevice()`. Each counts its calls, fails on request, and reports
each call that breaks its contract. They are in `faulty_root.py`, `memory_destination.py` and `fake_device.py`; start
with `faulty_root.py`. No fake sleeps: a test waits for conditions (`gate.py`).

A test class for a storage inherits from `SourceContract` (`contract.py`). `checkpoint_files` and its relatives make the
bytes of small checkpoints. The package needs pytest. Nothing in stio outside this package imports it.
"""

from stio.testing.checkpoints import checkpoint_bytes, checkpoint_files, write_checkpoint
from stio.testing.contract import SourceContract
from stio.testing.contract import read_guarded as read_guarded
from stio.testing.fake_device import POISON, FakeDevice
from stio.testing.faulty_root import FaultyRoot, MemoryRoot, Read
from stio.testing.memory_destination import MemoryDestination, Write

__all__ = [
    "POISON",
    "FakeDevice",
    "FaultyRoot",
    "MemoryDestination",
    "MemoryRoot",
    "Read",
    "SourceContract",
    "Write",
    "checkpoint_bytes",
    "checkpoint_files",
    "write_checkpoint",
]
