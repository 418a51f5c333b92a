"""Conversion of other checkpoints to safetensors: files of `torch.save`, other shards, another dtype. Level 5.

`stio.convert` (`api.py`) opens a source and saves its tensors with the usual save, so it has the guarantees of a save.
`OpenSource` (`sources.py`) is any source in one form: tensors by name, ties, text metadata. `ReadAhead` reads the
tensors of safetensors files one window ahead of the save. `torch_files.py` reads files of `torch.save` without
executing them; `safe_pickle.py` reads pickles of plain values, and the names of OLMo's tensors, which are such pickles.
`stio.compat.olmo` uses both too.

Invariants: memory stays within the budget, but for a single row; nothing in a file is executed without `trust_pickle`;
an error or a cancel leaves the destination unchanged. Start with `convert` in `api.py`.
"""

from stio.conversion.api import convert
from stio.conversion.safe_pickle import (
    MAX_KEYS,
    MAX_NAME_BYTES,
    KeyPath,
    PickleRefused,
    PlainPickles,
    decode_name,
    looks_encoded,
    shown,
)
from stio.conversion.sources import pickle_files
from stio.conversion.torch_files import read_pickle

__all__ = [
    "MAX_KEYS",
    "MAX_NAME_BYTES",
    "KeyPath",
    "PickleRefused",
    "PlainPickles",
    "convert",
    "decode_name",
    "looks_encoded",
    "pickle_files",
    "read_pickle",
    "shown",
]
