"""Many models on one machine: files in host memory, more models than a device holds, forwards that begin early.

`follower.py` keeps a module, or a model of a pool, at the newest checkpoint of a run. `host_cache.py` has `HostCache`:
prefetch, evict, close, `hold` for loads with `cache=`, and the entries that decide which files it holds, under one lock
and one budget. `pool/` has `ModelPool`, which loads a model when it is needed and evicts another one for it.
`warm_start/` loads a module while its forward runs. All are built on `stio.loading`, which imports none of them: loads
know caches by the interfaces of `stio.storage.checkpoint.caches`.

Invariants of the cache: an entry is one state of one file, including its times of change; what a load uses is not
removed and not changed; loads that run together read each byte once. Tensors on the CPU are copies, so none depends on
it. Within one tick of the filesystem's clock two states look the same, so a load waits if the file was written within
the last 50 ms. The file whose last use is longest ago is evicted first. Start with `host_cache.py`.
"""

from stio.serving.follower import Follower, Version, follow
from stio.serving.host_cache import HostCache

__all__ = [
    "Follower",
    "HostCache",
    "Version",
    "follow",
]
