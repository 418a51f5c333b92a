"""What a checkpoint is on storage: which files belong to it, whether they fit together, and whether they are whole.

`open.py` finds the checkpoint that a path, a directory, a URL or a `Root` names. `shards.py` opens all its shards
before the first read, parses and checks their headers, and compares them with the index: an `OpenCheckpoint`, as
`OpenOptions` say. `newest.py` finds the newest complete checkpoint among the steps of a training, by opening each.
`chain.py` opens a delta and its bases as one checkpoint, and reads what a chain changes behind one of its links;
`changes.py` has the changed elements in memory.
`integrity.py` compares the files of an open checkpoint with its manifest. `caches.py` is what loads know of caches,
which may replace the files of an open checkpoint.

No tensor is read or planned here, and no module needs torch: loads, conversions, `stio pull` and the commands begin
with what these functions return. The rules about names and texts are in `stio.format` and pure; `stio.storage` opens
and reads single files. The functions block.
"""

from stio.storage.checkpoint.caches import (
    CachedFile,
    CacheLike,
    CacheStats,
    FileCache,
    FileImage,
    ObjectCache,
    add_counts,
)
from stio.storage.checkpoint.chain import changes_of, digest_of, read_tensor, read_update, wrong_changes
from stio.storage.checkpoint.changes import Changes, Comparison, apply_changes
from stio.storage.checkpoint.integrity import judge_files, read_manifest, verify_files
from stio.storage.checkpoint.newest import latest, newest_in
from stio.storage.checkpoint.open import SourceLike, base_of, open_checkpoint
from stio.storage.checkpoint.shards import OpenCheckpoint, OpenOptions

__all__ = [
    "CacheLike",
    "CacheStats",
    "CachedFile",
    "Changes",
    "Comparison",
    "FileCache",
    "FileImage",
    "ObjectCache",
    "OpenCheckpoint",
    "OpenOptions",
    "SourceLike",
    "add_counts",
    "apply_changes",
    "base_of",
    "changes_of",
    "digest_of",
    "judge_files",
    "latest",
    "newest_in",
    "open_checkpoint",
    "read_manifest",
    "read_tensor",
    "read_update",
    "verify_files",
    "wrong_changes",
]
