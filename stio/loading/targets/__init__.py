"""Loads into memory of the caller: a module, a nested state, parts of tensors.

`base.py` has the `LoadTarget`, which compares its memory with the checkpoint before any tensor is read, and copies each
tensor to its places; `PartsTarget` has parts from its caller. `module.py` fills a module (`module_tree.py` knows its
tensors, their names and their hooks), `nested.py` a nested state.

A target is complete or untouched where it is compared: wrong names, shapes and dtypes are errors before the first copy.
A load that fails later has filled a part; its error says so.
"""

from stio.loading.targets.base import Casting, LoadReport, LoadTarget, LocalPart, PartsTarget, checked_casting
from stio.loading.targets.module import ModuleTarget
from stio.loading.targets.module_tree import ModuleTree, views_in_files
from stio.loading.targets.nested import StateTarget, read_nested, torch_value

__all__ = [
    "Casting",
    "LoadReport",
    "LoadTarget",
    "LocalPart",
    "ModuleTarget",
    "ModuleTree",
    "PartsTarget",
    "StateTarget",
    "checked_casting",
    "read_nested",
    "torch_value",
    "views_in_files",
]
