"""What a checkpoint is on storage: which files belong to it, whether they fit together, and whether they are whole.

`open.py` finds the checkpoint that a path, a directory, a URL or a `Root` names. `shards.py` opens all its shards
before the first read, parses and checks their headers, and compares them with the index: an `OpenCheckpoint`, as
`OpenOptions` say. `latest.py` finds the newest complete checkpoint among the steps of a training, by opening each.
`integrity.py` compares the files of an open checkpoint with its manifest. `caches.py` is what loads know of caches,
which may replace the files of an open checkpoint.

No tensor is read or planned here, and no module needs torch: loads, conversions, `stio pull` and the commands begin
with what these functions return. The rules about names and texts are in `stio.format` and pure; `stio.storage` opens
and reads single files. The functions block.
"""
