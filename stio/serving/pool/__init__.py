"""Pools: more models than a device holds, with the device's memory as a cache in front of host memory, disk and stores.

`policy.py` decides: which model is loaded next, which one is evicted for it, which callers get theirs. It is pure. It
also has the values in which a pool tells of itself.
`content.py` has the tensors of one model on the device: loads them, removes them, finds what still refers to them.
`thread.py` carries out what the policy decides, on the pool's thread.
`api.py` has the public class `ModelPool`; its methods run on callers' threads.

One thread owns a pool's state. Callers post to it what they want, and wait; they share no lock with it. Loads,
evictions and updates are operations of their own, and post what became of them. So a decision is made from one state,
and no caller's code runs while one is made.

Start with `policy.py`.

Rules. Room is reserved before a load begins: its tensors in blocks of the allocator, what casts and updates need on
their way, and what evicted models left that is still referenced (`content.py`); what other users of the device leave is
in `_limit` in `thread.py`. Callers are ranked by the time of their call. A model in use accepts new users until the
first caller of another model has waited for `max_hold_seconds`, so models change rarely, and no caller starves as long
as every `use` block exits. Whether a caller got its model or left first is decided by one `setdefault`. Models are
allocated under the copy stream: what users queued on other streams is behind an event recorded at the end of the block,
for which the eviction waits on its own thread.
"""

from stio.serving.pool.api import ModelPool
from stio.serving.pool.policy import ModelStatus, PoolStats

__all__ = [
    "ModelPool",
    "ModelStatus",
    "PoolStats",
]
