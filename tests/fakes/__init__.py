"""Fakes of storages and devices: they count calls, fail on request, and report each call that breaks their contract.

A fake replaces a path or a device: `stio.load(FaultyRoot(...))`, `stio.load(MemoryRoot(files))`,
`stio.save(tensors, MemoryDestination())`, `device=FakeDevice()`. No fake sleeps: a test waits for conditions
(`gate.py`). `checkpoint_files` and its relatives make the bytes of small checkpoints.
"""

from fakes.checkpoints import checkpoint_bytes, checkpoint_files, write_checkpoint
from fakes.destination import MemoryDestination, Write
from fakes.device import POISON, FakeDevice
from fakes.roots import FaultyRoot, MemoryRoot, Read

__all__ = [
    "POISON",
    "FakeDevice",
    "FaultyRoot",
    "MemoryDestination",
    "MemoryRoot",
    "Read",
    "Write",
    "checkpoint_bytes",
    "checkpoint_files",
    "write_checkpoint",
]
