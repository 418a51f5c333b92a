"""stio in frameworks that train and serve models: one module for each framework, which imports that framework only.

`transformers.py` saves and resumes trainings of Trainer, `lightning.py` those of Lightning. `vllm.py` is a load format
of vLLM. `iterators.py` has `weights`, a source for any loader that takes pairs of name and tensor. `sglang.py`
is a plugin of SGLang, `opentelemetry.py` exports traces. `_training.py` has what trainings of several frameworks share,
and `_step_dirs.py` the directories of checkpoints by training step, with their pushes to the hub.

Invariants: only public interfaces of a framework are used, with exceptions that the module names; nothing in a
checkpoint is executed; a process that is killed at any time leaves a complete checkpoint. Start with the module of your
framework.

Values that are not plain state become tagged dicts; no class is imported by a name from a file. A checkpoint of Trainer
is several saves and small files in one staging directory, published by one rename; if a directory of that name exists,
two renames are needed, and between them neither is visible. Under FSDP2 all ranks write into the first one's staging
directory. An optimizer's state keeps its numbered parameters with whole tensors, so a checkpoint resumes with and
without sharding. A checkpoint that is being pushed, and the best one, are not deleted. Lightning calls a `CheckpointIO`
on the first rank only, so a callback saves the random generators of each rank. vLLM's loader opens and checks
everything when it is asked for the tensors: later vLLM changes a running model, and an error then would end the engine.
"""

from __future__ import annotations

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """Return the callbacks that belong to `StioCheckpointIO`; none in a process that does not use it.

    Every Trainer of Lightning calls it, by the entry point `lightning.pytorch.callbacks_factory`.
    """
    module = sys.modules.get("stio.integrations.lightning")
    return [] if module is None else [module.RandomStates()]
