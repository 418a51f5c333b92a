"""stio in frameworks that train and serve models: one module for each framework, which imports that framework only.

`transformers.py` saves and resumes trainings of Trainer, `lightning.py` those of Lightning. `vllm.py` is a load format
of vLLM. It uses `weights` of `iterators.py`, a source for any loader that takes pairs of name and tensor.
`opentelemetry.py` exports traces. `_tagged.py` converts the values of frameworks to nested state and back, and
`_step_dirs.py` holds directories of checkpoints by training step.

Invariants: only public interfaces of a framework are used; nothing in a checkpoint is executed; a process that is
killed at any time leaves a complete checkpoint. Start with the module of your framework.
"""
