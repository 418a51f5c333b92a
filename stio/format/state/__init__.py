"""Nested state as text: containers and plain values in order, tensors by name. Pure.

`tree` writes and parses that text. A writer makes nodes (`scalar_node`, `MAPPING_TAGS`, `SEQUENCE_TAGS`) and encodes
them (`encode_tree`); the text is the metadata under `STATE_KEY`, or a tensor (`TREE_TENSOR`) if it is long. A reader
parses it (`parse_tree`), reads the tensors that its `Reference`s name, and puts them in (`Tree.fill`). Containers and
their sizes are untrusted: all is bounded by `stio.Limits`.
"""

from stio.format.state.tree import (
    MAPPING_TAGS,
    MAX_DEPTH,
    POINTER,
    SEQUENCE_TAGS,
    STATE_KEY,
    TREE_TENSOR,
    Node,
    Reference,
    Tree,
    check_keys,
    check_tree_bytes,
    encode_tree,
    is_json_integer,
    key_label,
    parse_tree,
    python_path,
    scalar_node,
    sorted_tree,
    tree_entries,
)

__all__ = [
    "MAPPING_TAGS",
    "MAX_DEPTH",
    "POINTER",
    "SEQUENCE_TAGS",
    "STATE_KEY",
    "TREE_TENSOR",
    "Node",
    "Reference",
    "Tree",
    "check_keys",
    "check_tree_bytes",
    "encode_tree",
    "is_json_integer",
    "key_label",
    "parse_tree",
    "python_path",
    "scalar_node",
    "sorted_tree",
    "tree_entries",
]
