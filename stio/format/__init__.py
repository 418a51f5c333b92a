"""The safetensors format and the checkpoint layout: bytes to values, and values to bytes.

Everything here is pure: no input or output, no torch, no device. The caller reads and writes; these modules parse,
check, split, name and build. Input is untrusted. A malformed file raises a `StioError` with path, offset, expected and
found, in bounded time and memory, and no C call blocks other threads for long (`gil_slices`).

Reading: `header` turns the start of a file into a `Header` of checked columns; `index` turns an index into a
`ShardIndex` of safe names; `manifest` reads digests; all use the strict `json_scanner`. `slicing` turns an index such
as `[0:8, :]` into byte ranges. Writing: `sharding` describes tensors (`TensorSource`) and splits them, `shared` finds
those that share memory, `naming` names the files, `header` makes the bytes before the data. Nested state: `state_tree`;
for OLMo's files `safe_pickle`. Many ranks: `placements` gives the part of a tensor that a rank holds, and which rank
reads what. `directory` finds the checkpoint of a directory, `other_sources` has the advice for sources that are none.

Start with `header`: `parse_header` shows all steps of reading a file. Continue with `dtypes` and `index`.

Some rules that span several modules: `header` decides which bytes a header may claim, and refuses holes, overlaps and
duplicate keys. `naming` decides which names an index may contain (`check_shard_name`), which step a path names, and
which destinations look like another kind of file. Where an index and its shards differ, `check_against_shards` in
`index` decides. `companions` knows which tensors mean something only together (quantized weights and their scales), and
`shared` which metadata every save makes anew (`MADE_ANEW`).

A new dtype goes into `dtypes`, with its name in torch; its DLPack code goes into `stio.device.tensors`.
"""
