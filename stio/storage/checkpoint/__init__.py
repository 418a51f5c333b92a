"""What a checkpoint is on storage: which files belong to it, whether they fit together, and whether they are whole.

`open.py` finds the checkpoint that a path, a directory, a URL or a `Root` names. `shards.py` opens all its shards
before the first read, parses and checks their headers, and compares them with the index: an `OpenCheckpoint`, as
`OpenOptions` say. `newest.py` finds the newest complete checkpoint among the steps of a training, by opening each.
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
from stio.storage.checkpoint.integrity import judge_files, no_manifest, read_manifest, verify_files
from stio.storage.checkpoint.newest import latest
from stio.storage.checkpoint.open import SourceLike, open_checkpoint
from stio.storage.checkpoint.shards import OpenCheckpoint, OpenOptions

__all__ = [
    "CacheLike",
    "CacheStats",
    "CachedFile",
    "FileCache",
    "FileImage",
    "ObjectCache",
    "OpenCheckpoint",
    "OpenOptions",
    "SourceLike",
    "add_counts",
    "judge_files",
    "latest",
    "no_manifest",
    "open_checkpoint",
    "read_manifest",
    "verify_files",
]
