"""Drop-in modules: names and contracts of other libraries, implemented by stio's loads and saves.

A program changes one import, or calls `install` once; the rest of its code stays as it is. Each module (`safetensors`,
`huggingface_hub`, `olmo`) behaves as its original: same results, same error classes and phrases, same files. Exceptions
are defects of the original (a save that is not atomic, a check that misses a case); they are described in the
docstrings. `tests/compat` compares the modules with the originals.

The drop-in for huggingface_hub calls functions of the original, which must be installed; the others import no original.
`install` (`replacement.py`) puts the safetensors drop-in in the place of the original, for all code of the process. The
drop-ins add no rules of their own about the format: headers, shard names, overlapping memory and commits are those of
`stio.format` and `stio.storage`. They add the original's names, conversions and error texts. Start with the
module of the library that you replace.

`replacement.py` replaces attributes and globals of modules and records each place. One function changes names: it makes
them equal to the list of installations, and can be repeated after an interruption at any point. While stio is
installed, its `SafetensorError` derives from the original's, so each `except` catches it, however the program refers to
the class. Messages for refused headers and saves begin with the original's phrase.
"""

from stio.compat.replacement import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
