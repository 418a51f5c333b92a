"""Warm starts: a module on `meta` whose forward runs while its parameters are loaded.

`api.py` has the public class `WarmStart`. It compares module and checkpoint before anything is read, and fills the
placeholders in the order in which they are used. `parameter.py` has the class of a parameter until it is filled.

Invariants: a parameter stays the same object; its shape, dtype and device are correct from the start; a use of it
blocks the thread that uses it, and no other. If the load ends early, every use of an unfilled parameter raises an
error: with a plain parameter on `meta` torch would compute wrong values. The next warm start or
`load_into(assign=True)` fills it. Start with `api.py`, and with `parameter.py` for the uses of a parameter in torch.

The parameter changes its class, since forward hooks see too few of its uses. Three checks each detect uses that the one
before misses: a hook blocks a submodule's forward until its own parameters are there; `__torch_function__` blocks every
other use from Python; `__torch_dispatch__` refuses a use from C++, functorch or jit. Workers fill the parameters, since
a forward may block the loop's thread and may run on any stream.
"""

from stio.serving.warm_start.api import WarmStart, warm_start

__all__ = [
    "WarmStart",
    "warm_start",
]
