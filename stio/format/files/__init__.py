"""Which files are a checkpoint: their names, the index, the manifest, and what else may be at a path. Pure.

`names` says what the name of a file means (`FileName`), how a save names its files (`FilePattern`), and which step of a
training a path names (`step_of`). `directory` finds the checkpoint among the names of a directory. `index` parses an
index (`ShardIndex`), and compares it with the headers of its shards. `manifest` has the digests of the files.
`other_kinds` knows files that are no safetensors, and what to do with each.

Names in an index are untrusted: each is checked before anything is opened (`check_shard_name`). Where an index and its
shards differ, `check_shards` decides. The names are the hub's, so that its readers read stio's checkpoints.
"""

from stio.format.files.directory import NamedCheckpoint, choose
from stio.format.files.index import ShardIndex, check_shards, parse_index, require_one_set
from stio.format.files.manifest import FileState, Hasher, HashName, Manifest, manifest_change, new_hasher
from stio.format.files.names import (
    FILE_SUFFIX,
    FILE_SUFFIXES,
    INDEX_SUFFIX,
    MANIFEST_SUFFIX,
    PICKLE_SUFFIXES,
    FileName,
    FilePattern,
    step_of,
)
from stio.format.files.other_kinds import FileKind, advice_for_missing, advice_for_path, kind_of, why_packed

__all__ = [
    "FILE_SUFFIX",
    "FILE_SUFFIXES",
    "INDEX_SUFFIX",
    "MANIFEST_SUFFIX",
    "PICKLE_SUFFIXES",
    "FileKind",
    "FileName",
    "FilePattern",
    "FileState",
    "HashName",
    "Hasher",
    "Manifest",
    "NamedCheckpoint",
    "ShardIndex",
    "advice_for_missing",
    "advice_for_path",
    "check_shards",
    "choose",
    "kind_of",
    "manifest_change",
    "new_hasher",
    "parse_index",
    "require_one_set",
    "step_of",
    "why_packed",
]
