"""Drop-in modules: names and contracts of other libraries, implemented by stio's loads and saves.

A program changes an import and keeps its code. `safetensors` and `huggingface_hub` are packages, `olmo` is a module.
Each behaves as its original: same results, same error classes and phrases, same files. Exceptions are defects of the
original (a save that is not atomic, a check that misses a case); they are described in the docstrings. `tests/compat`
compares the modules with the originals.

No original is imported at run time. The drop-ins add no rules of their own about the format: headers, shard names,
overlapping memory and commits are those of `stio.format` and `stio.storage`. What they add is how the original splits,
names, converts and complains. Start with the `__init__.py` of the package whose name you know.
"""
