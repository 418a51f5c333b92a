"""Storage of checkpoint files: opened and read for loads, written and published for saves.

For `loading/` this package has a `Root` (a place that holds a checkpoint's files) and its `Source`s (open files that
fill memory by address); for `saving/` a `Transaction`. `base.py` defines these three contracts; start there. No module
here depends on tensors, plans or devices, and none imports torch. Calls block; worker threads make them.

For loads: `open.py` chooses the implementation. `local.py` reads at an offset (`preadv`, O_DIRECT), maps and
populates; `async_files.py` reads through aiofiles where a system has no `preadv`. `checks.py` makes the errors of both,
and decides which file may be opened (regular, inside the root), by which links, and what counts as the same file.
`stio.schemes` knows which modules open URLs.

`checkpoint/` opens the files of a checkpoint together and checks their headers, finds the newest one, and compares
files with their manifest.

For saves: `commit/`, the transaction of a save to a local filesystem, its journal, and recovery after a crash; a
transaction in a store is in `stio.remote.save`.

Invariants: nothing outside the root is opened unless the caller allows it; a read never writes beyond its regions, and
when a call returns or raises no thread writes into them; a file that changed since it was opened is reported.

Reads and errors. `LocalFile.error` gives the error of a read its path, offset and errno. `LocalFile.map` decides what
happens where a file cannot be mapped. A checkpoint with more shards than the process may open descriptors keeps paths
and identities, and opens a file again for each read (`ReopenedFile`); `Identity.require_same` keeps files of two saves
from mixing. A source behind a network says how it is read best (`Requests`), and a load fits that into its budget.
Calls answered out of memory keep the GIL: reads of headers in the page cache (`RWF_NOWAIT`), and queries about open
files of filesystems without a daemon. Files are opened without it, since a virus scanner may be asked.

A new kind of source is a `Root` and a `Source` in a package beside `stio.remote`, which registers its scheme; for
saves, also a `Transaction`.
"""

from stio.storage.base import (
    FileWriter,
    Identity,
    Note,
    ParallelRoot,
    Published,
    RequestedSource,
    Requests,
    Root,
    Source,
    Transaction,
    read_bytes,
)
from stio.storage.checks import CHECKPOINT_SUFFIXES, broken_link, local_directory, refusals, steps_in
from stio.storage.local import LocalFile, MappedFile, open_at
from stio.storage.open import SingleFileRoot, max_open_files, open_destination, open_directory, open_file

__all__ = [
    "CHECKPOINT_SUFFIXES",
    "FileWriter",
    "Identity",
    "LocalFile",
    "MappedFile",
    "Note",
    "ParallelRoot",
    "Published",
    "RequestedSource",
    "Requests",
    "Root",
    "SingleFileRoot",
    "Source",
    "Transaction",
    "broken_link",
    "local_directory",
    "max_open_files",
    "open_at",
    "open_destination",
    "open_directory",
    "open_file",
    "read_bytes",
    "refusals",
    "steps_in",
]
