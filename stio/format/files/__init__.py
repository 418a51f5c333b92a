"""Which files are a checkpoint: their names, the index, the manifest, and what else may be at a path. Pure.

`names` says what the name of a file means (`FileName`), how a save names its files (`FilePattern`), and which step of a
training a path names (`step_of`). `directory` finds the checkpoint among the names of a directory. `index` parses an
index (`ShardIndex`), and compares it with the headers of its shards. `manifest` has the digests of the files.
`other_kinds` knows files that are no safetensors, and what to do with each.

Names in an index are untrusted: each is checked before anything is opened (`check_shard_name`). Where an index and its
shards differ, `check_shards` decides. The names are the hub's, so that its readers read stio's checkpoints.
"""
