"""Nested state as text: containers and plain values in order, tensors by name. Pure.

`tree` writes and parses that text. A writer makes nodes (`scalar_node`, `MAPPING_TAGS`, `SEQUENCE_TAGS`) and encodes
them (`encode_tree`); the text is the metadata under `STATE_KEY`, or a tensor (`TREE_TENSOR`) if it is long. A reader
parses it (`parse_tree`), reads the tensors that its `Reference`s name, and puts them in (`Tree.fill`). Containers and
their sizes are untrusted: all is bounded by `stio.Limits`.
"""
